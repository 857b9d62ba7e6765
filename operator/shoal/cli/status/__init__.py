"""`shoal status`: the Models of a cluster, with the progress of each replica."""

from shoal.cli.status.command import command

__all__ = ["command"]
