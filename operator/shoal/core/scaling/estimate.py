"""The least that one replica does, before anything was learned of it.

Only the queue rule reads this estimate, so that a first queue asks for no more than what clears it. It is not a limit:
with cached prefixes or a mixture of experts a replica does several times as much, and used as a limit the estimate
would keep GPUs that are not needed.
"""

UNITS_PER_PASS = 120.0
"""Units of work (`learn.work`) per read of all weights by the GPUs. On the step-time model of Llama-3.1-8B, saturated
at 1000/250, 500/500 and 2048/28 tokens: L40S 211 to 232, A100 124 to 138, H100 218 to 230, H200 159 to 175. By the
prefill rate and the step of 256 requests that were measured on an H200 (docs/sizing.md): 131 to 179."""


def least_work_rate(weight_bytes_per_gpu: int, bandwidth_gbps: float) -> float | None:
    """Units of work per second of one replica; `bandwidth_gbps`: memory bandwidth of one GPU in 10^9 bytes/s. None: no
    weights are on GPUs."""
    return UNITS_PER_PASS * bandwidth_gbps * 1e9 / weight_bytes_per_gpu if weight_bytes_per_gpu > 0 else None
