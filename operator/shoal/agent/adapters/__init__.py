"""The adapters of this replica: their files, the engine that loads them, those who ask for them.

service.py  what goes on: one call to the engine at a time, and everybody's answers
files.py    the folder that agent and engine share
calls.py    what a call to the engine comes to
web.py      who may ask over HTTP, and what they get
metrics.py  what scrapers see

What to do next is decided in `core/lora/lifecycle/planstep.py`.
"""
