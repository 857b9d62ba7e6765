"""LoRAPools and LoRAAdapters.

pools.py, adapters.py  the status of each kind;  chosen.py  a pool and its Model, as adapters see them
reader.py     Jobs that read the sources of adapters, a batch each;  namespaces.py  who may join a pool
placer.py     a plan per pool: which replica should hold what (poolplan.py: what it keeps of one)
observe.py    what a plan is made from;  hearing.py  from whom
floors.py     tells the agents
book.py       what is told to people;  serve.py  where
"""

from shoal.controllers.lora.lora import LoRA

__all__ = ["LoRA"]
