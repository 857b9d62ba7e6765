"""Adapters in use at once against the slots of the replicas: what a user sees of it."""

from typing import Any

from shoal.api import reasons
from shoal.core.scaling import ModelSnapshot, Policy, SignalSource, decide
from tests.support.scaling import Term, load, replica, snapshot, source

SLOTS = 7


def using(name: str, *adapters: str) -> SignalSource:
    return source(name, adapters=frozenset(adapters), in_flight=len(adapters))


def pool(*sources: SignalSource, replicas: int = 1, **fields: Any) -> ModelSnapshot:
    return snapshot(
        *(replica(i, load(adapter_slots=SLOTS, running=1)) for i in range(replicas)), sources=sources, **fields
    )


def test_more_adapters_in_use_than_slots_ask_for_another_replica_though_nothing_else_does() -> None:
    adapters = [f"adapter-{i}" for i in range(9)]

    decision, _ = decide(pool(using("gateway-0", *adapters)), None, 10.0)

    assert (decision.wanted, decision.reason) == (2, reasons.SCALING_UP)
    assert decision.message == "9 adapters in use at once, target 6 per replica of 7 slots"
    assert decision.alternative == "1 replica would have 9.0 adapters in use each"
    assert decision.rules[0].name == "adapters"
    assert decision.rules[0].inputs == {"adaptersInUse": 9, "slotsPerReplica": 7, "targetPerReplica": 6}


def test_an_adapter_that_two_gateways_use_takes_one_slot() -> None:
    first, second = using("gateway-0", "a", "b", "c", "d"), using("gateway-1", "c", "d", "e", "f")

    decision, _ = decide(pool(first, second), None, 10.0)

    assert decision.wanted == 1
    assert next(r for r in decision.rules if r.name == "adapters").inputs["adaptersInUse"] == 6


def test_many_requests_for_few_adapters_need_no_slots() -> None:
    busy = source(adapters=frozenset({"a"}), in_flight=200)

    assert decide(pool(busy), None, 10.0)[0].wanted == 1


def test_a_model_without_a_pool_is_not_asked_about_adapters() -> None:
    decision, _ = decide(snapshot(replica(), sources=[using("gateway-0", "a")]), None, 10.0)

    rule = next(r for r in decision.rules if r.name == "adapters")
    assert (rule.replicas, rule.sentence) == (0, "no replica says that it serves adapters")


def test_replicas_stay_while_their_slots_are_needed_and_go_when_they_are_not() -> None:
    adapters = [f"adapter-{i}" for i in range(9)]
    policy = Policy(minimum=1, stabilization_seconds=60)
    term = Term()
    busy = pool(using("gateway-0", *adapters), replicas=2, policy=policy)
    for now in range(0, 300, 10):
        assert term.at(float(now), busy).wanted == 2

    few = pool(using("gateway-0", "a"), replicas=2, policy=policy)
    assert term.at(310.0, few).wanted == 2
    assert term.at(400.0, few).wanted == 1


def test_a_gateway_that_does_not_tell_its_adapters_keeps_the_replicas() -> None:
    policy = Policy(minimum=1, stabilization_seconds=60)
    older = source("gateway-1", adapters=None)
    term = Term()
    for now in range(0, 400, 10):
        term.at(float(now), pool(using("gateway-0", "a"), older, replicas=2, policy=policy))

    assert term.decision is not None
    assert term.decision.wanted == 2
