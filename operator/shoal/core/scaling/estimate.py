"""What one replica does at least, before anything was learned of it.

Only a queue's rule reads it, so that a first queue asks for what clears it and not for more. It is no limit: cached
prefixes and mixtures of experts let replicas do several times as much, and whoever took it for one would keep GPUs that
nobody needs.
"""

UNITS_PER_PASS = 120.0
"""Units of work (`learn.work`) for each time that the GPUs read the weights once. On the step-time model of
Llama-3.1-8B, saturated at 1000/250, 500/500 and 2048/28 tokens: L40S 211 to 232, A100 124 to 138, H100 218 to 230,
H200 159 to 175."""


def least_work_rate(weight_bytes_per_gpu: int, bandwidth_gbps: float) -> float | None:
    """Units of work per second of a replica; `bandwidth_gbps` is the memory bandwidth of one GPU in 10^9 bytes/s.
    None: no weights on GPUs, so nothing is known."""
    return UNITS_PER_PASS * bandwidth_gbps * 1e9 / weight_bytes_per_gpu if weight_bytes_per_gpu > 0 else None
