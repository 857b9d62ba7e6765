"""How many replicas each Model has. The Executor (`controllers/executor.py`) writes it.

signals.py       what replicas and gateways report, as decisions read it
observe.py       one Model's snapshot for the decider
scaler.py        decides when something changed or is due; hands the number to the planner
wake.py          from zero: chooses a class and has it raised at once, ahead of the plan
stalesignals.py  which gateways and replicas are silent, for the status
history.py       the last decisions with their inputs;  serve.py  the endpoint
"""
