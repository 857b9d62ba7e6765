"""The conditions of a Model, as GitOps tools and people read them."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.model import Model
from shoal.core.artifacts import SourceReading
from shoal.core.facts import Container, Deployment, Pod
from shoal.core.placement import Placement, VariantPlan
from shoal.core.routing.servednames import served_names
from shoal.core.status.conditions import ConditionUpdate, merge, shorten
from shoal.core.status.diagnosis import Cause
from shoal.core.status.modelstatus import ModelProblem, Observed, ServedNames, first_status, status

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
PLACED = Placement((VariantPlan("l4", 1, 1, "0.43"),), (), 0, "Placed", "1 on l4, 1 GPU each")


SERVING = Pod("ns", "old", "old", "n1", False, False, True, {}, "u", gpu_class="l4", was_ready=True)


def model(name: str = "chat", *, created: datetime = NOW, uid: str = "u", names: tuple[str, ...] = ()) -> Model:
    return Model.model_validate(
        {
            "metadata": {
                "name": name,
                "namespace": "ns",
                "uid": uid,
                "generation": 3,
                "creationTimestamp": created.isoformat(),
            },
            "spec": {"source": {"uri": "file:///m"}, "servedNames": list(names)},
        }
    )


def deployment(*, ready: int = 1, updated: int = 1, total: int = 1, refused: str | None = None) -> Deployment:
    return Deployment(
        "ns", "chat-l4", "d", "1", "u", "l4", 1, "nvidia.com/gpu", 1, 1, 1,
        frozenset({"shoal-scaler"}), updated, ready, total, refused, False,
    )  # fmt: skip


def observed(**changes) -> Observed:
    base: dict[str, Any] = {
        "model": model(),
        "problems": (),
        "served": ServedNames(("chat",), ()),
        "placement": PLACED,
        "deployments": (deployment(),),
        "pods": (SERVING,),
    }
    return Observed(**(base | changes))


def told(seen: Observed) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in status(seen, NOW).conditions}


def test_at_first_sight_nothing_is_claimed() -> None:
    first = first_status(model(), NOW)
    assert first.observed_generation == 3
    assert {c.type: c.status for c in first.conditions} == {
        "Accepted": "Unknown",
        "Placed": "Unknown",
        "Available": "Unknown",
        "Ready": "Unknown",
        "Reconciling": "True",
    }


def test_a_model_that_serves_has_neither_reconciling_nor_stalled() -> None:
    assert told(observed()) == {
        "Accepted": ("True", "Valid"),
        "Placed": ("True", "Placed"),
        "Available": ("True", "ReplicasReady"),
        "Ready": ("True", "ReplicasReady"),
    }


def test_a_rollout_is_available_and_not_ready() -> None:
    found = told(observed(deployments=(deployment(updated=0, total=2),)))
    assert found["Available"][0] == "True"
    assert found["Ready"] == ("False", "Starting")
    assert found["Reconciling"] == ("True", "Starting")


def test_ready_does_not_blink_while_a_deployment_is_scaled_and_does_change_with_the_specification() -> None:
    served = status(observed(), NOW).model_dump(by_alias=True, mode="json")
    scaled = replace(deployment(), generation=2)  # its controller has seen 1
    said = model().model_dump(by_alias=True, mode="json") | {"status": served}
    assert told(observed(model=Model.model_validate(said), deployments=(scaled,)))["Ready"] == ("True", "ReplicasReady")

    said["metadata"]["generation"] = 4  # edited: what runs is not known to be that
    assert told(observed(model=Model.model_validate(said), deployments=(scaled,)))["Ready"] == ("False", "Starting")


def test_a_refused_model_that_still_serves_is_available_and_stalled() -> None:
    found = told(observed(problems=(ModelProblem("ClassNotFound", "no class"),), placement=None))
    assert found["Accepted"] == ("False", "ClassNotFound")
    assert found["Placed"] == ("Unknown", "Pending")
    assert found["Available"] == ("True", "ReplicasReady")
    assert found["Stalled"] == ("True", "ClassNotFound")


@pytest.mark.parametrize(
    "changed",
    [
        {"problems": (ModelProblem("SourceNotFound", "there is no team/m"),)},
        {"reading": SourceReading(failure=Cause("SourceNotFound", "there is no team/m"))},
    ],
)
def test_a_change_that_is_not_applied_says_that_what_ran_before_still_serves(changed: dict[str, Any]) -> None:
    def message(**more: Any) -> str:
        return next(c.message for c in status(observed(placement=None, **changed, **more), NOW).conditions
                    if c.type == "Ready")  # fmt: skip

    said = "there is no team/m; while this lasts no change is applied, and what ran before still serves"
    assert message() == f"{said} (1 replica ready)"
    assert message(deployments=(), pods=()) == "there is no team/m"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("SourceChanged", "Stalled"),  # a force-pushed revision does not come back by itself
        ("Gated", "Stalled"),
        ("DigestMismatch", "Stalled"),
        ("SourceUnreachable", "Reconciling"),
        ("DiskFull", "Reconciling"),
        ("CacheUnavailable", "Reconciling"),
    ],
)
def test_what_a_replica_cannot_fetch_is_told_while_the_others_serve(reason: str, kind: str) -> None:
    said = json.dumps({"reason": reason, "message": "what to do"})
    stage = Container("stage", False, 2, "CrashLoopBackOff", None, 1, "Error", said, running=False)
    starting = Pod("ns", "new", "new", "n2", False, False, False, {}, "u", gpu_class="l4", containers=(stage,))
    placed = Placement((VariantPlan("l4", 2, 1, "0.86"),), (), 0, "Placed", "2 on l4, 1 GPU each")
    wants_two = Model.model_validate(
        model().model_dump(by_alias=True, mode="json")
        | {"spec": {"source": {"uri": "hf://team/m"}, "scaling": {"minReplicas": 2}}}
    )
    seen = observed(
        model=wants_two,
        placement=placed,
        deployments=(deployment(ready=1, updated=2, total=2),),
        pods=(SERVING, starting),
    )
    found = {c.type: c for c in status(seen, NOW).conditions}
    assert (found["Ready"].status, found["Ready"].reason) == ("False", reason)
    assert found["Ready"].message == "what to do (pod ns/new, attempt 3)"
    assert found["Available"].status == "True"
    assert (found[kind].status, found[kind].reason) == ("True", reason)


def test_a_replacement_that_does_not_start_is_told_though_all_that_is_wanted_serves() -> None:
    said = json.dumps({"reason": "SourceChanged", "message": "its history was rewritten"})
    stage = Container("stage", False, 0, "CrashLoopBackOff", None, 1, "Error", said, running=False)
    starting = Pod("ns", "new", "new", "n2", False, False, False, {}, "u", gpu_class="h100", containers=(stage,))
    waiting = Pod("ns", "new", "new", None, False, False, False, {}, "u", gpu_class="h100", unschedulable="0/6 nodes")

    def ready(pod: Pod) -> tuple[str, str]:
        found = {c.type: c for c in status(observed(pods=(SERVING, pod)), NOW).conditions}["Ready"]
        return found.status, found.message

    assert ready(starting) == (
        "True",
        "1 of 1 replicas ready; one that is to replace another does not start: its history was rewritten "
        "(pod ns/new, attempt 1)",
    )
    assert ready(waiting) == ("True", "1 of 1 replicas ready")


def test_equal_observations_give_an_equal_status_at_any_time() -> None:
    first = status(observed(), NOW)
    again = model().model_copy(update={"status": first})
    assert status(observed(model=again), NOW + timedelta(hours=1)) == first


def test_the_transition_time_moves_only_when_the_status_flips() -> None:
    first = merge((), [ConditionUpdate("Ready", "False", "Starting", "0 of 1")], generation=1, now=NOW)
    later = NOW + timedelta(minutes=1)
    (same,) = merge(first, [ConditionUpdate("Ready", "False", "Unschedulable", "full")], generation=2, now=later)
    assert (same.last_transition_time, same.reason, same.observed_generation) == (NOW, "Unschedulable", 2)
    (flipped,) = merge(first, [ConditionUpdate("Ready", "True", "ReplicasReady", "1 of 1")], generation=2, now=later)
    assert flipped.last_transition_time == later


def test_a_long_message_keeps_its_end() -> None:
    text = shorten("Traceback " + "x" * 5000 + " CUDA out of memory")
    assert len(text) <= 1024
    assert text.startswith("Traceback")
    assert text.endswith("CUDA out of memory")


def test_a_name_belongs_to_the_oldest_and_of_equals_to_the_lower_uid() -> None:
    older = model("a", created=NOW - timedelta(days=1), uid="z", names=("llama",))
    first, second = model("b", uid="b", names=("llama",)), model("c", uid="c", names=("llama", "own"))
    everyone = [older, first, second]
    assert served_names(older, everyone) == ServedNames(("llama",), ())
    assert served_names(second, everyone) == ServedNames(("own",), (("llama", "the older Model ns/a"),))
    assert served_names(first, [first, second]) == ServedNames(("llama",), ())
    # Of one file, both are of one second: neither is the older.
    why = "Model ns/b, which was created in the same second and is first by its uid"
    assert served_names(second, [first, second]).lost == (("llama", why),)
