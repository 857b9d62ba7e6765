"""What engines say of their KV caches, and what that says of the classes they run on."""

import statistics
from collections.abc import Callable, Mapping
from typing import Final

from shoal.controllers.state import FleetState
from shoal.core.sizing import GPU, Sized, Tuning, implied_overhead

_MI: Final = 2**20

SizedOf = Callable[[str, str], "tuple[Sized, Tuning] | None"]
"""(Model's uid, class) -> the sums of a replica there."""


class Calibration:
    """KV tokens by Model and class, in the Models' records; a class's overhead is the median of what they imply."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._overheads: dict[str, int] = {}
        self.overheads_changed: list[Callable[[], None]] = []

    def record(self, model_uid: str, gpu_class: str, tokens: int) -> bool:
        """An engine has started and said what its KV cache holds. Returns whether that was not known before."""
        known = self._state.record(model_uid).kv_tokens
        if known.get(gpu_class) == tokens:
            return False
        known[gpu_class] = tokens
        self._state.replan()
        return True

    def overhead(self, gpu_class: str) -> int | None:
        """Measured overhead of one GPU of the class in bytes, whole MiB; None: no engine has said anything."""
        return self._overheads.get(gpu_class)

    def measure(self, gpus: Mapping[str, GPU], sized_of: SizedOf) -> None:
        """Computes the overheads anew."""
        implied: dict[str, list[int]] = {}
        for uid, record in self._state.records():
            for name, tokens in record.kv_tokens.items():
                sized, gpu = sized_of(uid, name), gpus.get(name)
                if sized is None or gpu is None:
                    continue
                overhead = implied_overhead(gpu, sized[0], tokens, sized[1])
                if overhead is not None:
                    implied.setdefault(name, []).append(overhead)
        found = {name: int(statistics.median_low(values)) // _MI * _MI for name, values in implied.items()}
        if found != self._overheads:
            self._overheads = found
            for listener in self.overheads_changed:
                listener()
