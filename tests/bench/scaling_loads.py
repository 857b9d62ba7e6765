"""The loads that scaling rules are replayed on."""

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.bench.scaling_engine import Request

CODE = "azure_llm_2023_code.csv"
CODE_SPEED = 3.0
"""The code trace is replayed this many times as fast: its mean load then takes about two L40S."""
L40S, H100 = "l40s:bfloat16", "h100_sxm:bfloat16"
BANDWIDTH_GBPS = {L40S: 864.0, H100: 3350.0}
"""Of their memory."""
WEIGHT_BYTES = 16_060_000_000
"""Llama-3.1-8B in bfloat16."""

Shape = Callable[[float], float]
"""Requests per second at a time."""
Make = Callable[[random.Random, Path], list[Request]]


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    gpu: str
    make: Make
    from_zero: bool = False
    """Begins without replicas, and those policies that can go to zero may."""


def poisson(rate: Shape, seconds: float, prompt: int, answer: int) -> Make:
    """Arrivals by thinning; lengths exponential about their means, at least 16 and 2, at most eight times the mean."""

    def make(draw: random.Random, _: Path) -> list[Request]:
        top = max(rate(float(t)) for t in range(int(seconds)))
        found: list[Request] = []
        now = 0.0
        while (now := now + draw.expovariate(top)) < seconds:
            if draw.random() * top <= rate(now):
                lengths = [
                    max(least, min(8 * mean, round(draw.expovariate(1 / mean))))
                    for least, mean in ((16, prompt), (2, answer))
                ]
                found.append(Request(now, *lengths))
        return found

    return make


def code_trace(draw: random.Random, folder: Path) -> list[Request]:
    """The published arrivals and lengths, faster; each seed shifts arrivals by up to a second."""
    with (folder / CODE).open() as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(r["TIMESTAMP"][:26]).timestamp() for r in rows]
    first = min(times)
    found = [
        Request(
            (at - first) / CODE_SPEED + draw.random(),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )
        for at, row in zip(times, rows, strict=True)
    ]
    return sorted(found, key=lambda r: r.arrival)


def _step(t: float) -> float:
    return 10.0 if 300 <= t < 1500 else 1.5


def _ramp(t: float) -> float:
    return 0.5 + 11.5 * (1 - abs(t - 900) / 900)


def _burst(t: float) -> float:
    return 16.0 if t % 300 < 30 else 1.5


def _visits(t: float) -> float:
    return 2.0 if t % 1200 < 120 else 0.0


SCENARIOS = (
    Scenario("code", f"Azure code trace, {CODE_SPEED:.0f} x as fast, L40S", L40S, code_trace),
    Scenario("step", "1.5 -> 10 -> 1.5 requests/s, 1000/250 tokens, L40S", L40S, poisson(_step, 2400, 1000, 250)),
    Scenario("ramp", "0.5 -> 12 -> 0.5 requests/s, 1000/250 tokens, L40S", L40S, poisson(_ramp, 1800, 1000, 250)),
    Scenario(
        "burst",
        "16 requests/s for 30 of 300 s, else 1.5, 1000/250 tokens, L40S",
        L40S,
        poisson(_burst, 1800, 1000, 250),
    ),
    Scenario("prefill", "60 requests/s, 1000/250 tokens, H100", H100, poisson(lambda _: 60.0, 1500, 1000, 250)),
    Scenario("decode", "30 requests/s, 100/1000 tokens, H100", H100, poisson(lambda _: 30.0, 1500, 100, 1000)),
    Scenario(
        "visits",
        "2 requests/s for 120 of 1200 s, from zero, 1000/250 tokens, L40S (KEDA's triggers: engines' metrics)",
        L40S,
        poisson(_visits, 4800, 1000, 250),
        from_zero=True,
    ),
)
