"""`shoal cordon` and `shoal uncordon`: people take GPUs out of Shoal's use, and put them back, whatever signals say.

command.py  the commands
units.py    what a person named -> the units of GPUClasses
"""
