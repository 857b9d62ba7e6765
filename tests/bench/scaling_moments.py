"""What one decision costs."""

import time
from collections.abc import Iterator

from shoal.core.scaling import ModelSnapshot, ScalingMemory, decide
from tests.support.scaling import load, replica, snapshot, source

_TIMES = 2000


def decision_cost() -> Iterator[tuple[str, float]]:
    """(Model, microseconds of CPU), the best of three rounds."""
    gateways = [source(f"gateway-{i}", arrivals=100, in_flight=3) for i in range(8)]
    busy = [replica(i, load(running=20, waiting=3, kv_tokens_used=50_000)) for i in range(50)]
    yield "at zero, 8 gateways", _cost(snapshot(sources=[source(f"gateway-{i}") for i in range(8)]))
    yield "1 replica, 8 gateways", _cost(snapshot(busy[0], sources=gateways))
    yield "50 replicas, 8 gateways", _cost(snapshot(*busy, sources=gateways))


def _cost(seen: ModelSnapshot) -> float:
    best = float("inf")
    for _ in range(3):
        memory: ScalingMemory | None = None
        begun = time.process_time()
        for i in range(_TIMES):
            _, memory = decide(seen, memory, float(i))
        best = min(best, time.process_time() - begun)
    return 1e6 * best / _TIMES
