"""What a LoRA adapter is, and whether it fits.

peft.py     an adapter from its adapter_config.json and its tensors;  layers.py  which layers it changes
check.py    whether it goes with a base and a pool
facts.py    what a Job reports of a batch of adapters
sources.py  addresses of adapters
"""
