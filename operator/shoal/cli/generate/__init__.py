"""`shoal generate`: every file of the repository that is made from the code. See `files.py` for what is made."""

from shoal.cli.generate.command import command

__all__ = ["command"]
