"""`shoal keys`: a Tenant's API keys. A key is shown once; objects and files contain only its hash."""

from shoal.cli.keys.command import command

__all__ = ["command"]
