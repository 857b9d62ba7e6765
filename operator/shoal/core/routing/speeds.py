"""How fast each replica reads prompts, learned from the answers that this gateway saw.

A sample is the work that lay ahead of an answer (tokens not in the prefix cache, its own and those ahead of it), over
the seconds until its first token. Work that the gateway did not see makes a sample too low, never too high, so the
estimate follows an upper quantile. One sample moves it by a bounded factor, however wrong the sample is.

An unknown rate is None. A replica without enough samples of its own has the mean of its GPU class in the Model, else
that of the Model.
"""

import math
from dataclasses import dataclass
from typing import Final

QUANTILE: Final = 0.7
"""Of the samples, which the estimate follows."""
LEAST_TOKENS: Final = 64
"""A sample of less work says more about the network than about the engine."""
FULL_TOKENS: Final = 1024
"""A sample of this much work has full weight."""
SLOWEST: Final = 10.0
FASTEST: Final = 1e7
"""Bounds of a rate, in tokens per second."""
_FIRST_STEP: Final = 0.7
_LAST_STEP: Final = 0.1
"""Change of the estimate's logarithm per sample, at first and once it has settled."""
_NEEDED: Final = 4.0
"""Weight of the samples with which a replica's own rate replaces its class's."""


@dataclass(slots=True)
class Speed:
    """Estimate of one replica's prefill rate."""

    gpu_class: str | None
    model_uid: str
    log_rate: float = 0.0
    weight: float = 0.0
    """Of the samples so far."""

    @property
    def rate(self) -> float | None:
        """Tokens per second; None: too few samples."""
        return math.exp(self.log_rate) if self.weight >= _NEEDED else None


class Speeds:
    """Rates by uid of a pod. `forget` a pod that is gone."""

    def __init__(self) -> None:
        self._known: dict[str, Speed] = {}
        self._priors: dict[tuple[str, str | None], float | None] = {}
        """Means by Model and class (None: of the whole Model); rebuilt when a rate changes."""

    def observe(self, uid: str, model_uid: str, gpu_class: str | None, tokens: float, seconds: float) -> None:
        """Adds a sample: `tokens` of work took `seconds` until the first token of the answer."""
        if not (LEAST_TOKENS <= tokens < math.inf and 0.0 < seconds < math.inf):
            return
        sample = math.log(min(FASTEST, max(SLOWEST, tokens / seconds)))
        speed = self._known.get(uid)
        if speed is None:
            speed = self._known[uid] = Speed(gpu_class, model_uid)
        weight = min(1.0, tokens / FULL_TOKENS)
        if not speed.weight:
            speed.log_rate = sample
        else:
            step = weight * max(_LAST_STEP, _FIRST_STEP / (1.0 + speed.weight))
            towards = QUANTILE if sample > speed.log_rate else -(1.0 - QUANTILE)
            moved = speed.log_rate + 2.0 * step * towards
            # Not beyond the sample: an estimate that is right stays.
            speed.log_rate = min(moved, sample) if towards > 0 else max(moved, sample)
        speed.weight = min(speed.weight + weight, 1e6)
        self._priors.clear()

    def rate(self, uid: str, model_uid: str, gpu_class: str | None) -> float | None:
        """Tokens per second that a replica prefills; None: nothing is known of the Model."""
        if (rate := self.own(uid)) is not None:
            return rate
        prior = self._prior(model_uid, gpu_class)
        return prior if prior is not None else self._prior(model_uid, None)

    def own(self, uid: str) -> float | None:
        """A replica's rate from its own samples alone."""
        speed = self._known.get(uid)
        return None if speed is None else speed.rate

    @property
    def known(self) -> bool:
        """Whether there are samples of any replica."""
        return bool(self._known)

    def forget(self, uid: str) -> None:
        if self._known.pop(uid, None) is not None:
            self._priors.clear()

    def __len__(self) -> int:
        return len(self._known)

    def _prior(self, model_uid: str, gpu_class: str | None) -> float | None:
        key = (model_uid, gpu_class)
        if key not in self._priors:
            logs = [
                s.log_rate
                for s in self._known.values()
                if s.model_uid == model_uid and s.weight >= _NEEDED and (gpu_class is None or s.gpu_class == gpu_class)
            ]
            self._priors[key] = math.exp(sum(logs) / len(logs)) if logs else None
        return self._priors[key]
