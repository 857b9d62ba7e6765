"""`shoal explain`: the operator's placement decision, from files instead of a cluster."""

from shoal.cli.explain.command import command

__all__ = ["command"]
