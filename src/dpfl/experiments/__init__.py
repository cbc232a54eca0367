"""The papers' tables and figures as data (one TOML file each) and the runner that carries them out."""
