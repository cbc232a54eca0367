"""The server: it averages uploads and evaluates on public data; it never sees a record."""
