"""`shoal generate`: every file of the repository that is made from the code. See `files.py` for what is made."""

from shoal_dev.generate.command import command

__all__ = ["command"]
