"""How many replicas each Model has, and the one who writes it.

ears.py      what is heard of replicas and gateways, as decisions read it
observe.py   one Model's snapshot for the decider
scaler.py    decides when something changed or is due; hands the number to the planner
wake.py      from zero: `/scale` at once, ahead of the plan
scale.py     the writes: `replicas`, and which pods go first
book.py      the last decisions with their inputs;  serve.py  tells them
"""
