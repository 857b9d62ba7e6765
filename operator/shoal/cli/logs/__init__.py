"""`shoal logs`: a tenant's request log, and deleting from it.

reach.py    asks a gateway, with the key for logs
view.py     entries as lines
command.py  the commands
"""

from shoal.cli.logs.command import command

__all__ = ["command"]
