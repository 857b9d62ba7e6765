"""`python -m shoal` is `shoal`."""

from shoal.cli.main import main

main()
