"""The replay on which scaling rules are compared: its engine does its work, and the decider follows a load."""

import math
import random
from pathlib import Path

from shoal.core.scaling import Policy
from tests.bench.scaling_engine import Engine, Params, Request
from tests.bench.scaling_fleet import replay
from tests.bench.scaling_loads import poisson
from tests.bench.scaling_policies import Shoal

L40S = Params(24.2, 0.0646, 14.46, 1.85e-4, 2.93e-6, 0.21, 190_048, 2048)


def test_an_engine_prefills_and_generates_exactly_what_was_asked() -> None:
    draw = random.Random(1)  # noqa: S311
    engine, requests = Engine(L40S), [Request(i / 5, draw.randint(1, 6000), draw.randint(1, 400)) for i in range(300)]
    for request in requests:
        engine.advance(request.arrival)
        engine.add(request)
    engine.advance(1e5)

    assert engine.prompt_tokens == sum(r.prompt for r in requests)
    assert engine.generated_tokens == sum(r.answer for r in requests)
    assert (engine.in_flight, engine.kv_used, engine.reserved) == (0, 0, 0)
    assert all(r.arrival < r.first <= r.done for r in requests)


def test_an_engine_alone_takes_as_long_as_its_formula_says() -> None:
    engine, request = Engine(L40S), Request(0.0, 1000, 101)
    engine.add(request)
    engine.advance(100.0)

    prefill = max(24.2, 0.0646 * 1000 + 14.46) + 2.93e-6 * 1000 * 500 + 1.0 + 0.01
    decode = sum(24.2 + max(0.21, 1.85e-4 * (1001 + i)) + 1.0 + 0.01 for i in range(100))
    assert math.isclose(request.first, prefill / 1e3, rel_tol=1e-9)
    assert math.isclose(request.done, (prefill + decode) / 1e3, rel_tol=1e-3)


def test_the_decider_follows_a_step_up_and_down_again_in_one_turn() -> None:
    load = poisson(lambda t: 8.0 if 200 <= t < 800 else 1.0, 1200, 1000, 250)
    requests = load(random.Random(3), Path())  # noqa: S311
    result = replay(requests, Shoal(Policy(minimum=1, maximum=16)), L40S, seed=3)

    assert (result.refused, result.unfinished) == (0, 0)
    assert result.flaps == 1
    assert 2 <= max(n for _, n in result.steps) <= 5
    assert result.steps[-1][1] == 1
    assert result.quantile(0.9) < 5.0
