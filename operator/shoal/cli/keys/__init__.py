"""`shoal keys`: a Tenant's API keys. A key is shown once; objects and files get its hash only."""

from shoal.cli.keys.command import command

__all__ = ["command"]
