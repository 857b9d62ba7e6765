"""What engines say of their KV caches, and what that says of the classes they run on."""

import statistics
from collections.abc import Callable, Mapping
from typing import Final

from shoal.api.model import Model
from shoal.core.sizing import GPU, Sized, Tuning, implied_overhead

_MI: Final = 2**20

SizedOf = Callable[[str, str], "tuple[Sized, Tuning] | None"]
"""(Model's uid, class) -> the sums of a replica there."""


class Calibration:
    """Figures by Model and class; the overhead of a class is the median of what they imply."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tokens: dict[str, dict[str, int]] = {}
        """Model's uid -> class -> KV tokens of one replica."""
        self._overheads: dict[str, int] = {}
        self.overheads_changed: list[Callable[[], None]] = []

    def record(self, model_uid: str, gpu_class: str, tokens: int) -> None:
        """An engine has started and said what its KV cache holds."""
        known = self._tokens.setdefault(model_uid, {})
        if known.get(gpu_class) != tokens:
            known[gpu_class] = tokens
            self._changed()

    def restore(self, model: Model) -> None:
        """What the status of a Model says of the specification that it has now."""
        if model.status is None or model.status.observed_generation != model.metadata.generation:
            return
        for variant in model.status.variants:
            if variant.kv_tokens_per_replica and (tokens := variant.kv_tokens_per_replica.engine):
                self._tokens.setdefault(model.metadata.uid, {}).setdefault(variant.gpu_class, tokens)

    def forget(self, model_uid: str) -> None:
        self._tokens.pop(model_uid, None)

    def tokens(self, model_uid: str) -> Mapping[str, int]:
        """class -> KV tokens of one replica, as the Model's engines say."""
        return self._tokens.get(model_uid, {})

    def overhead(self, gpu_class: str) -> int | None:
        """Measured overhead of one GPU of the class in bytes, whole MiB; None: no engine has said anything."""
        return self._overheads.get(gpu_class)

    def measure(self, gpus: Mapping[str, GPU], sized_of: SizedOf) -> None:
        """Computes the overheads anew."""
        implied: dict[str, list[int]] = {}
        for uid, said in self._tokens.items():
            for name, tokens in said.items():
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
