"""`python -m dpfl`: the command line without an installed script."""

from dpfl.cli import main

main()
