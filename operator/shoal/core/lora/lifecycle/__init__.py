"""The life cycle of an adapter in an engine.

registry.py     state of a replica's adapters, and what the agent's stream reports of them
planstep.py     what the agent does next;  staging.py  which files are fetched, and which adapters may go
leases.py       which gateways may use which adapters;  unload.py  when an adapter may be unloaded
held.py         where one adapter is loaded, over all replicas
revisions.py    which revision is served, and which one is next
"""
