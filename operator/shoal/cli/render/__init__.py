"""`shoal render`: the objects that the operator would make of Models, without a cluster."""

from shoal.cli.render.command import command

__all__ = ["command"]
