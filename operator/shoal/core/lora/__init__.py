"""LoRA adapters: pure functions with reasons.

format/       what an adapter is, and whether it fits its base and its pool (facts Job, operator and agent)
placement/    which replica of a pool should hold which adapters (operator)
lifecycle/    which revision is loaded, leased, unloaded (agent and gateway); which one answers (operator)
pool.py       what a LoRAPool means for the engines of its Model
joining.py    whether an adapter may join a pool;  owner.py  which of two claimants has a name
"""
