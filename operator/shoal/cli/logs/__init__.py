"""`shoal logs`: a tenant's request log, and deleting from it.

reach.py    asks a gateway, with the key of a person who may read the install key
view.py     entries as lines
command.py  the commands
"""

from shoal.cli.logs.command import command

__all__ = ["command"]
