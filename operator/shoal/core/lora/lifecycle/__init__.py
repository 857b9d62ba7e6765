"""The life of an adapter in an engine.

registry.py     what one replica knows of its adapters, and their states
planstep.py     what the agent does next;  staging.py  whose files are fetched, and which adapters may go
leases.py       which gateways may use which adapters;  unload.py  when an adapter may be unloaded
streamstate.py  what the agent's stream reports
held.py         where one adapter is, over all replicas
revisions.py    which revision answers;  switch.py  when gateways may be sent to a newer one
"""
