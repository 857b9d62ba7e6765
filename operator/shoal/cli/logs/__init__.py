"""`shoal logs`: a tenant's request log, and deleting from it.

volumes.py  volumes of gateways that were scaled away
view.py     entries as lines
command.py  the commands
"""

from shoal.cli.logs.command import command

__all__ = ["command"]
