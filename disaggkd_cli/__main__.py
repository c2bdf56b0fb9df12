"""`python -m disaggkd_cli` is the `disaggkd` command."""

from disaggkd_cli.cli import main

main()
