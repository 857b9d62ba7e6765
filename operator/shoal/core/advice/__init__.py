"""What routing is worth for a Model's own traffic: a replay of sampled requests without their prompts.

- `marks.py`: what a gateway keeps of a prompt, as keyed hashes of its beginnings;
- `facts.py`: the inputs: requests, and the fleet that served them;
- `cache.py`, `replay.py`: the same arrivals at replicas that another rule chooses;
- `rates.py`, `pools.py`, `locality.py`: prefill rates, prefill/decode pools, adapters;
- `report.py`: all of it as one report; `sentences.py`: the report in sentences.
"""
