"""`shoal status`, also as `kubectl shoal status`: Models as the cluster has them, with how far each fetch is."""

from shoal.cli.status.command import command

__all__ = ["command"]
