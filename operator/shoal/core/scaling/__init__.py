"""How many replicas a Model needs: from what agents and gateways say, as a pure function with reasons.

types.py    what is read (Snapshot, Memory) and said (Decision)
decide.py   the decision, with the table of rules;  rules.py  one function each;  view.py  what they look at
figures.py  what is said, added up;  fleet.py  replicas in the order in which they are filled and kept
learn.py    from one decision to the next: the last request, the arrival rate, what a request costs and a replica can do
estimate.py what a replica does at least, before anything was learned
window.py   the most that was enough over the last seconds;  words.py  numbers in sentences
voices.py   who is not heard, once that has held for a while
"""

from shoal.core.scaling.decide import decide
from shoal.core.scaling.types import (
    Decision,
    Demand,
    Load,
    Memory,
    Policy,
    Replica,
    Rule,
    Snapshot,
    Variant,
    Voice,
)
from shoal.core.scaling.voices import Steady, due, silence, steady

__all__ = [
    "Decision",
    "Demand",
    "Load",
    "Memory",
    "Policy",
    "Replica",
    "Rule",
    "Snapshot",
    "Steady",
    "Variant",
    "Voice",
    "decide",
    "due",
    "silence",
    "steady",
]
