"""`python -m comet_cli` is `comet`."""

from comet_cli.main import main

main()
