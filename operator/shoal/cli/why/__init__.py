"""`shoal why`: what is wrong with something, on which layer, and what to do.

command.py    the command
subjects.py   the table of subjects: a further one is a row there and a module with a function `answer`
reader.py     how they read: bounded, and what cannot be read is said
model.py, adapter.py, pool.py, route.py, tenant.py, pod.py, gpuclass.py, node.py   what is read of each subject
show.py       the answer as text and as data
"""

from shoal.cli.why.command import command

__all__ = ["command"]
