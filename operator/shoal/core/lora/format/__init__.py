"""The format of a LoRA adapter, and whether it fits.

peft.py     an adapter's facts, from adapter_config.json and its tensors;  layers.py  the layers that adapters change
check.py    whether an adapter fits a base and a pool
facts.py    the termination message of a Job that reads a batch of adapters
sources.py  addresses of adapters
"""
