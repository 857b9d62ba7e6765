"""How fast the replicas of each GPU class read prompts, from the sampled answers.

A sample is the tokens of a prompt that were not cached over the seconds from sending it to the first token. Waiting and
decoding beside it make a sample too low, never too high, and short prompts say more about a step's fixed cost. So the
rate is a high quantile of the longer half.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from shoal.core.advice.facts import RequestFact

LEAST_TOKENS: Final = 256
LEAST_SAMPLES: Final = 20
QUANTILE: Final = 0.97


def prefill_rates(requests: Sequence[RequestFact]) -> Mapping[str | None, float | None]:
    """Tokens per second by class; None: too few samples."""
    samples: defaultdict[str | None, list[tuple[int, float]]] = defaultdict(list)
    for one in requests:
        if one.first is None or not one.stream or one.cached is None:
            continue
        tokens, seconds = one.prompt - one.cached, one.first - one.sent
        if tokens >= LEAST_TOKENS and seconds > 0:
            samples[one.gpu_class].append((tokens, tokens / seconds))
    return {name: _rate(samples[name]) for name in {one.gpu_class for one in requests}}


def _rate(samples: Sequence[tuple[int, float]]) -> float | None:
    if len(samples) < LEAST_SAMPLES:
        return None
    longer = sorted(samples)[len(samples) // 2 :]
    rates = sorted(rate for _, rate in longer)
    return rates[int(len(rates) * QUANTILE)]
