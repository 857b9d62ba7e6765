"""Which decisions are kept for `kubectl shoal why`."""

from datetime import UTC, datetime

from shoal.controllers.scaling.history import DecisionHistory, current_message, enter, records
from shoal.controllers.state import DECISIONS_KEPT, ModelRecord
from shoal.core.scaling import ScalingDecision
from tests.faults.worlds import condition
from tests.support.operators import model
from tests.support.signals import FakeSignals
from tests.unit.controllers.test_scale_writes import UID, Plane


def kept(*decisions: ScalingDecision) -> list[tuple[int, int, str, str, int]]:
    history = ModelRecord().history
    for decision in decisions:
        enter(history, decision, datetime(2026, 1, 1, tzinfo=UTC))
    return [(r.before, r.wanted, r.reason, r.message, r.count) for r in records(history)]


def test_a_change_stays_with_what_led_to_it_while_its_result_is_decided_again_and_again() -> None:
    down = ScalingDecision(0, 1, "ScaledToZero", "no request for 600 s")
    still = ScalingDecision(0, 0, "ScaledToZero", "no request")
    assert kept(down, still, still) == [
        (0, 0, "ScaledToZero", "no request", 2),
        (1, 0, "ScaledToZero", "no request for 600 s", 1),
    ]


def test_the_same_again_counts_and_shows_the_newest_numbers() -> None:
    again = [ScalingDecision(2, 2, "ReplicasReady", f"{n} queued") for n in (1, 2, 3)]
    assert kept(*again) == [(2, 2, "ReplicasReady", "3 queued", 3)]


def test_two_steps_up_are_two_entries() -> None:
    steps = [ScalingDecision(n + 1, n, "ScalingUp", "queue") for n in (1, 2)]
    assert [entry[:2] for entry in kept(*steps)] == [(2, 3), (1, 2)]


def test_the_oldest_are_forgotten() -> None:
    many = [ScalingDecision(n + 1, n, "ScalingUp", "queue") for n in range(DECISIONS_KEPT + 5)]
    found = kept(*many)
    assert len(found) == DECISIONS_KEPT
    assert found[0][1] == DECISIONS_KEPT + 5


def test_a_decision_has_the_layer_of_its_reason() -> None:
    history = ModelRecord().history
    for wanted, reason in ((1, "Waking"), (0, "EngineFailed"), (0, "OfAnotherVersion")):
        enter(history, ScalingDecision(wanted, 0, reason, ""), datetime(2026, 1, 1, tzinfo=UTC))
    assert [record.layer for record in records(history)] == [None, "L4", "control"]


def test_until_the_replicas_are_there_it_is_told_why_they_are_wanted() -> None:
    up = ScalingDecision(3, 1, "ScalingUp", "12 queued on 1 replica, target 2")
    enough = ScalingDecision(3, 3, "ReplicasReady", "3 replicas are enough")
    none_free = ScalingDecision(3, 3, "NoCapacity", "class l4-24gb has 0 free")

    assert current_message([up, enough], 1) == ("ScalingUp", "12 queued on 1 replica, target 2")
    assert current_message([up, enough], 3) == ("ReplicasReady", "3 replicas are enough")
    assert current_message([up, none_free], 1) == ("NoCapacity", "class l4-24gb has 0 free")
    assert current_message([enough], 2) == ("ReplicasReady", "3 replicas are enough")


def test_of_a_model_without_a_replica_top_says_what_stands_in_the_way() -> None:
    plane = Plane()
    said = condition("Ready", "False", "NoFit", "no class is large enough")
    raw = model("chat", "ns") | {"status": {"conditions": [said]}}
    raw["metadata"] |= {"uid": UID, "resourceVersion": "2", "generation": 1}
    plane.world.models.upsert(raw)
    waits = ScalingDecision(1, 1, "ScalingUp", "1 replica wanted, and no class is known to fit")
    enter(plane.state.record(UID).history, waits, datetime(2026, 1, 1, tzinfo=UTC))
    history = DecisionHistory(plane.world, plane.state, FakeSignals(), lambda _: None)

    (shown,) = history.stats()
    assert (shown.reason, shown.layer, shown.message) == ("NoFit", "control", "no class is large enough")
    alone = history.model("ns/chat")
    assert alone is not None
    assert alone.reason == "ScalingUp", "why reads the condition itself"
