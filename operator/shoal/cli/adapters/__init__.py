"""`shoal adapters`: where the adapters of LoRA pools are, how they are used, and why one is not placed."""

from shoal.cli.adapters.command import command

__all__ = ["command"]
