"""`shoal support bundle`: collects what an issue needs, without secrets.

clean.py    what is removed from objects and logs
bundle.py   what is collected, and the command
"""

from shoal.cli.support.bundle import support

__all__ = ["support"]
