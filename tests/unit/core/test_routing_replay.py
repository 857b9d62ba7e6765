"""What the routing rule is worth, in short replays of `tests/bench/bench_routing` in virtual time: a change of its
weights that sends requests to the wrong replicas is found here. Times are those of the engine's model, so no machine
moves them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import bench_routing as bench
from tests.bench import routing_closed as closed
from tests.bench.bench_routing import RULES, Result
from tests.bench.routing_engine import Asked, Replica, engine
from tests.bench.routing_exact import Told
from tests.bench.scaling_engine import Params

L40S = Params(24.2, 0.0646, 14.46, 0.000185, 2.93e-6, 0.2064, 190_048, 2048)
"""Llama-3.1-8B in bfloat16, fitted to measured kernels."""
SEED = 21
SIMPLE = ("round robin", "least in flight")


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "params", lambda _gpu: L40S)
    monkeypatch.setattr(bench, "TRACES", Path("no-traces"))


def replayed(traffic: str, gateways: int, *rules: str) -> list[Result]:
    asked, fleet = bench.loads(600, gateways, SEED)[traffic]
    return [bench.replay(asked, RULES[rule], fleet, gateways) for rule in rules]


@pytest.mark.parametrize("gateways", [2, 8])
@pytest.mark.parametrize(
    ("traffic", "most"),
    [
        ("unique single-turn", 1.0),
        ("multi-turn, as ShareGPT", 1.02),
        ("multi-turn, one at half speed", 0.97),
        ("shared system prompts", 0.7),
    ],
)
def test_requests_wait_no_longer_than_behind_a_simple_balancer_and_shorter_where_traffic_has_structure(
    traffic: str, most: float, gateways: int
) -> None:
    """Of the mean time to the first token."""
    ours, *others = replayed(traffic, gateways, "Shoal", *SIMPLE)
    assert ours.mean <= most * min(each.mean for each in others)


@pytest.mark.parametrize("gateways", [2, 8])
def test_conversations_find_more_of_their_prompts_in_the_caches(gateways: int) -> None:
    ours, *others = replayed("multi-turn, as ShareGPT", gateways, "Shoal", *SIMPLE)
    assert ours.hit >= 1.4 * max(each.hit for each in others)


def test_what_gateways_tell_each_other_of_their_load_shortens_the_wait_of_unique_prompts() -> None:
    told, alone = replayed("unique single-turn", 8, "Shoal", "Shoal, heads only")
    assert told.mean <= 0.93 * alone.mean


class Misjudged(Told):
    """Takes prompts for a third as long as they are, as another tokenizer makes them look."""

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        return super().choose(_third(asked), replicas, now)

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        super().sent(_third(asked), replica, now)


def _third(asked: Asked) -> Asked:
    blocks = tuple((name, max(1, tokens // 3)) for name, tokens in asked.blocks)
    return replace(asked, blocks=blocks, system_tokens=asked.system_tokens // 3)


def test_prompts_that_fit_only_into_all_caches_together_stay_each_where_it_is() -> None:
    """Requests that share a prompt need its space in the KV cache once; however long a token is."""
    asked, fleet = bench.held_out(600, 2, SEED)["shared prompts, small caches"]
    smg = bench.replay(asked, RULES["smg cache_aware (model)"], fleet, 2)
    for rule in (Told, Misjudged):
        ours = bench.replay(asked, rule, fleet, 2)
        assert ours.hit > smg.hit
        assert ours.mean < smg.mean


def asked_at_once(case: str, requests: int) -> tuple[Result, Result]:
    """Clients that wait for each answer, in front of caches of which none holds all prompts: Shoal, and smg's best rule
    there."""
    engines = closed.CASES[case]
    asked = closed.questions(engines, requests, 2, SEED)
    ours, smg = (closed.replay(asked, RULES[rule], engines, 2) for rule in ("Shoal", "smg cache_aware (model)"))
    return ours, smg


def test_a_prompt_is_not_copied_where_it_puts_out_another_that_will_be_asked_for() -> None:
    ours, smg = asked_at_once("12 at once, fast engines", 600)
    assert ours.hit > smg.hit + 0.05
    assert ours.mean < smg.mean


def test_caches_that_evict_each_prompt_before_it_comes_again_recover_under_full_load() -> None:
    """All prompts come at once to gateways that know nothing, and go everywhere."""
    ours, smg = asked_at_once("40 at once", 1200)
    assert ours.hit > 0.7
    assert ours.mean < smg.mean


def test_a_block_that_several_requests_use_takes_its_space_once_and_stays() -> None:
    replica = engine(0, replace(L40S, kv_tokens=10_000), "l40s", 0.0, 0)
    shared = (1, 4000)
    for number in range(3):
        replica.send(Asked(number, 0.0, (shared, (10 + number, 100)), (20 + number, 1000)), 0.0)
        replica.advance(1.0 + number)
    assert replica.running == 3
    assert 4300 < replica.kv_used < 4300 + 3 * 1000
    replica.send(Asked(3, 3.0, ((2, 4000),), (30, 10)), 3.0)
    replica.advance(1000.0)
    assert (replica.kv_used, replica.locked, replica.shared, replica.reserved, replica.users) == (0, 0, 0, 0, {})
    assert replica.held <= 9500
    assert replica.held == sum(replica.blocks.values())
