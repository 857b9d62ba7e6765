"""LoRA adapters: pure functions with reasons.

format/       an adapter's files, and whether they fit a base and a pool (facts Job, operator and agent)
placement/    which replica of a pool should hold which adapters (operator)
lifecycle/    which revision is loaded, leased, unloaded (agent and gateway); which one is served (operator)
pool.py       whether a LoRAPool fits the engines of its Model, and their settings
joining.py    whether an adapter may join a pool
"""
