"""LoRAPools and LoRAAdapters.

pools.py, adapters.py  the status of each kind;  choices.py  a pool and its Model, as adapters see them
reader.py     Jobs that read the sources of adapters, a batch each;  namespaces.py  who may join a pool
placer.py     a plan per pool: which replica should hold which adapters (poolplan.py: what is kept of one pool)
observe.py    the snapshot that a plan is made from;  signals.py  what replicas and gateways report
desired.py    writes each replica's desired adapters to its agent
view.py       pools and adapters for people;  serve.py  the endpoint
"""

from shoal.controllers.lora.lora import LoRAControllers

__all__ = ["LoRAControllers"]
