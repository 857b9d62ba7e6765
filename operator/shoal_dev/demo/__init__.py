"""`shoal demo`: declared Models serve a real request, end to end, with the time each stage took."""

from shoal_dev.demo.command import command

__all__ = ["command"]
