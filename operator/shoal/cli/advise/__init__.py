"""`shoal advise`: what routing is worth for a Model's own traffic.

gather.py    asks gateways, ledger and API server
show.py      the report for people, and for programs
command.py   the command
"""

from shoal.cli.advise.command import command

__all__ = ["command"]
