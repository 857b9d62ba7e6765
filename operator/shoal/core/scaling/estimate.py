"""What one replica does per second, before anything was learned of it."""

UNITS_PER_PASS = 200.0
"""Units of work (`learn.work`) for each time that the GPUs read the weights once. On the step-time model of
Llama-3.1-8B, saturated at 1000/250, 500/500 and 2048/28 tokens: L40S 211 to 232, A100 124 to 138, H100 218 to 230,
H200 159 to 175. It is on the high side: a rate that is too high asks for too few and a queue corrects it; one that is
too low would keep GPUs that nobody needs."""
AT_LEAST = 0.6
"""Share of an estimate that a replica does at least: the slowest of them."""


def work_rate(weight_bytes: int, bandwidth_gbps: float, gpus: int = 1) -> float:
    """Units of work per second of a replica: `bandwidth_gbps` is the memory bandwidth of one GPU in 10^9 bytes/s,
    `weight_bytes` those of all its GPUs together that a token touches."""
    return UNITS_PER_PASS * bandwidth_gbps * 1e9 * gpus / weight_bytes
