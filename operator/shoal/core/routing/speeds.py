"""How fast each replica is, learned from the answers that this gateway saw: how fast it reads prompts, how long a step
takes, and how long requests stay.

A sample of the prefill rate is the work that lay ahead of an answer (tokens not in the prefix cache, its own and those
ahead of it), over the seconds until its first token. Work that the gateway did not see makes a sample too low, never
too high, so the estimate follows an upper quantile. One sample moves it by a bounded factor, however wrong the sample
is.

Until a replica has enough samples, its rate is between what they say and the best prior: the mean of its GPU class in
the Model, the mean of the Model, else one rate for all replicas. That is never right, but the same for all, so requests
go where least is ahead of them. The first samples replace it.

A replica that gets no requests gives no samples. Its estimates then go back to the prior, so that a replica which was
slow for a while is tried again.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Final, NamedTuple

QUANTILE: Final = 0.7
"""Of the samples, which the estimate follows."""
LEAST_TOKENS: Final = 64
"""A sample of less work says more about the network than about the engine."""
FULL_TOKENS: Final = 1024
"""A sample of this much work has full weight."""
SLOWEST: Final = 10.0
FASTEST: Final = 1e7
"""Bounds of a rate, in tokens per second."""
PRIOR_RATE: Final = 10_000.0
"""Of a replica about which nothing is known: an 8B model on a GPU of the middle class."""
PRIOR_STAY: Final = 10.0
PRIOR_STEP: Final = 0.03
IDLE_SECONDS: Final = 30.0
"""Each time that a replica had no sample for so long, its estimates go half the way back to the prior."""
_FIRST_STEP: Final = 0.7
_LAST_STEP: Final = 0.1
"""Change of the estimate's logarithm per sample, at first and once it has settled."""
_NEEDED: Final = 4.0
"""Weight of the samples with which a replica's own rate replaces the prior."""
_LEAST_ANSWER: Final = 8
"""Tokens of an answer that tells how long a step takes."""
_LONGEST: Final = 900.0
_LONGEST_STEP: Final = 0.5


class Pace(NamedTuple):
    """What is believed of one replica."""

    rate: float
    """Prompt tokens per second."""
    stay: float = PRIOR_STAY
    """Seconds from the first token of an answer to its end."""
    step: float = PRIOR_STEP
    """Seconds between two tokens of an answer."""
    learned: bool = False
    """The rate is the replica's own."""


NOTHING_KNOWN: Final = Pace(PRIOR_RATE)


@dataclass(slots=True)
class Speed:
    """Estimates of one replica."""

    gpu_class: str | None
    model_uid: str
    log_rate: float = 0.0
    weight: float = 0.0
    """Of the samples of the rate so far."""
    log_stay: float | None = None
    log_step: float | None = None
    at: float = -math.inf
    """Of the last sample, or when the estimates last went back."""

    @property
    def rate(self) -> float | None:
        """Tokens per second; None: too few samples."""
        return math.exp(self.log_rate) if self.weight >= _NEEDED else None


class Speeds:
    """Estimates by uid of a pod. `keep` forgets pods that are gone."""

    def __init__(self) -> None:
        self._known: dict[str, Speed] = {}
        self._priors: dict[tuple[str, str | None], Pace | None] = {}
        """Means by Model and class (None: of the whole Model); rebuilt when an estimate changes."""

    def observe(
        self, uid: str, model_uid: str, gpu_class: str | None, tokens: float, seconds: float, now: float = 0.0
    ) -> None:
        """Adds a sample: `tokens` of work took `seconds` until the first token of the answer."""
        if not (LEAST_TOKENS <= tokens < math.inf and 0.0 < seconds < math.inf):
            return
        sample = math.log(min(FASTEST, max(SLOWEST, tokens / seconds)))
        speed = self._speed(uid, model_uid, gpu_class, now)
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

    def ran(
        self, uid: str, model_uid: str, gpu_class: str | None, tokens: int, seconds: float, now: float = 0.0
    ) -> None:
        """An answer of so many tokens took `seconds` from its first token to its last one."""
        if not (0.0 < seconds < math.inf and tokens >= 1):
            return
        speed = self._speed(uid, model_uid, gpu_class, now)
        speed.log_stay = _moved(speed.log_stay, seconds, _LONGEST)
        if tokens >= _LEAST_ANSWER:
            speed.log_step = _moved(speed.log_step, seconds / (tokens - 1), _LONGEST_STEP)
        self._priors.clear()

    def pace(self, uid: str, model_uid: str, gpu_class: str | None) -> Pace:
        """What is believed of a replica now."""
        speed = self._known.get(uid)
        if speed is not None and speed.weight >= _NEEDED and speed.log_stay is not None and speed.log_step is not None:
            # Almost all: it needs no prior, which is the mean of many.
            return Pace(math.exp(speed.log_rate), math.exp(speed.log_stay), math.exp(speed.log_step), True)
        prior = self._prior_of(model_uid, gpu_class)
        if speed is None:
            return prior
        share = min(1.0, speed.weight / _NEEDED)
        log_rate = share * speed.log_rate + (1.0 - share) * math.log(prior.rate)
        return Pace(
            math.exp(log_rate),
            prior.stay if speed.log_stay is None else math.exp(speed.log_stay),
            prior.step if speed.log_step is None else math.exp(speed.log_step),
            speed.weight >= _NEEDED,
        )

    def rest(self, uid: str, now: float) -> None:
        """Lets the estimates of a replica without samples go back to the prior. Called now and then."""
        speed = self._known.get(uid)
        if speed is None or now - speed.at < IDLE_SECONDS:
            return
        if speed.at > -math.inf and speed.weight:
            prior = self._mean(speed.model_uid, speed.gpu_class, without=uid)
            if prior is not None:
                speed.log_rate += 0.5 * (math.log(prior.rate) - speed.log_rate)
                if speed.log_step is not None:
                    speed.log_step += 0.5 * (math.log(prior.step) - speed.log_step)
            # Its next samples count more.
            speed.weight = min(speed.weight, _NEEDED)
            self._priors.clear()
        speed.at = now

    def own(self, uid: str) -> float | None:
        """A replica's rate from its own samples alone."""
        speed = self._known.get(uid)
        return None if speed is None else speed.rate

    def keep(self, uids: Container[str]) -> None:
        """Forgets pods that are gone."""
        gone = [uid for uid in self._known if uid not in uids]
        for uid in gone:
            del self._known[uid]
        if gone:
            self._priors.clear()

    def __len__(self) -> int:
        return len(self._known)

    def _speed(self, uid: str, model_uid: str, gpu_class: str | None, now: float) -> Speed:
        speed = self._known.get(uid)
        if speed is None:
            speed = self._known[uid] = Speed(gpu_class, model_uid)
        speed.at = max(speed.at, now)
        return speed

    def _prior_of(self, model_uid: str, gpu_class: str | None) -> Pace:
        for of in (gpu_class, None):
            key = (model_uid, of)
            if key not in self._priors:
                self._priors[key] = self._mean(model_uid, of)
            if (prior := self._priors[key]) is not None:
                return prior
        return NOTHING_KNOWN

    def _mean(self, model_uid: str, gpu_class: str | None, without: str | None = None) -> Pace | None:
        """The mean of the replicas of a class, or of a Model; None: nothing is known of any."""
        rates: list[float] = []
        stays: list[float] = []
        steps: list[float] = []
        for uid, speed in self._known.items():
            if uid == without or speed.model_uid != model_uid or gpu_class not in (None, speed.gpu_class):
                continue
            if speed.weight >= 1.0:
                rates.append(speed.log_rate)
            if speed.log_stay is not None:
                stays.append(speed.log_stay)
            if speed.log_step is not None:
                steps.append(speed.log_step)
        if not rates:
            return None
        return Pace(
            math.exp(sum(rates) / len(rates)),
            math.exp(sum(stays) / len(stays)) if stays else PRIOR_STAY,
            math.exp(sum(steps) / len(steps)) if steps else PRIOR_STEP,
        )


def _moved(before: float | None, value: float, most: float) -> float:
    """The logarithm of an estimate after a further value, of at most `most`. It follows a lower quantile, and one value
    moves it by a few percent: clients that read slowly make values too large, never too small."""
    sample = math.log(min(most, max(1e-4, value)))
    if before is None:
        return sample
    towards = QUANTILE if sample < before else 1.0 - QUANTILE
    return before + _LAST_STEP * towards * max(-1.0, min(1.0, sample - before))
