"""`shoal doctor`: checks a whole installation, and changes nothing.

command.py   the command, and how its results are shown
read.py      what is read; `core/doctor` has the checks
"""

from shoal.cli.doctor.command import command

__all__ = ["command"]
