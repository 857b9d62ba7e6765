"""`shoal explain`: what the operator would decide, from files instead of a cluster."""

from shoal.cli.explain.command import command

__all__ = ["command"]
