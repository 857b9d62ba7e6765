"""Requests for adapters, as the placement of adapters is measured with."""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

CLIENTS = "servegen_m-mid_clients.json"
RATES = "servegen_m-mid_client_rates_10min.csv"
WINDOW = 600.0
"""Seconds of one window of the trace."""
SLOPE = 0.91
"""Of the popularity of 874 adapters in the GenTD26 trace."""


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    adapter: int
    seconds: float
    """From its first token to its last."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    adapters: int
    requests: list[Request]
    warm: float
    """Seconds before figures are taken."""


def zipf(adapters: int, rate: float, seconds: float, service: float, *, drifts: bool, seed: int = 1) -> Load:
    """Poisson arrivals. Drifting: each half minute one adapter in a hundred changes its popularity with another one, so
    that after an hour hardly one has the popularity that it began with."""
    draw = random.Random(seed)  # noqa: S311 - the same load each time
    ranks = list(range(adapters))
    draw.shuffle(ranks)
    weights = list(accumulate((rank + 1) ** -SLOPE for rank in range(adapters)))
    requests: list[Request] = []
    now, due = 0.0, 30.0
    while (now := now + draw.expovariate(rate)) < seconds:
        while drifts and now >= due:
            due += 30.0
            for _ in range(adapters // 100):
                a, b = draw.randrange(adapters), draw.randrange(adapters)
                ranks[a], ranks[b] = ranks[b], ranks[a]
        (rank,) = draw.choices(range(adapters), cum_weights=weights)
        requests.append(Request(now, ranks[rank], draw.expovariate(1 / service)))
    name = f"Zipf {SLOPE}, {'drifting' if drifts else 'constant'}"
    return Load(name, adapters, requests, seconds / 3)


def clients(folder: Path, rate: float, speed: float, service: float, *, day: int = 2, seed: int = 1) -> Load | None:
    """The clients of ServeGen's m-mid as adapters, over one day replayed `speed` times as fast; rates scaled so that
    the mean is `rate` per second. Arrivals within a window are gamma with the client's own variation."""
    if not (folder / RATES).exists():
        return None
    order = [int(c) for c in json.loads((folder / CLIENTS).read_text())["order_by_requests"]]
    number = {client: i for i, client in enumerate(order)}
    first = day * 86_400.0
    with (folder / RATES).open() as file:
        rows = [r for r in csv.DictReader(file) if first <= float(r["t_s"]) < first + 86_400]
    scale = rate / (sum(float(r["rate_rps"]) for r in rows) * WINDOW / 86_400)
    draw = random.Random(seed)  # noqa: S311 - the same load each time
    found: list[Request] = []
    for row in rows:
        begin = (float(row["t_s"]) - first) / speed
        arrivals = _gamma(draw, float(row["rate_rps"]) * scale, float(row["cv"] or 1.0), WINDOW / speed)
        client = number[int(row["client"])]
        found += [Request(begin + at, client, draw.expovariate(1 / service)) for at in arrivals]
    found.sort(key=lambda r: r.at)
    return Load("clients of ServeGen m-mid", len(order), found, 86_400 / speed / 8)


def _gamma(draw: random.Random, rate: float, variation: float, seconds: float) -> Iterator[float]:
    shape = 1 / max(0.05, min(5.0, variation)) ** 2
    now = draw.random() / rate if rate > 0 else seconds
    while now < seconds:
        yield now
        now += draw.gammavariate(shape, 1 / (rate * shape))
