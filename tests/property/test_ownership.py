"""A pod is a replica by its chain of owners, in whatever order its parts are seen, and for as long as it lives."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api import names
from shoal.core.ownership import Link, Owner, link, verdict
from shoal.kube import ownership
from shoal.kube.ownership import Ownership
from tests.support.owners import owned

MODEL = "uid-llama"
RAW = {
    "metadata": {
        "name": "llama-l4-1-x",
        "namespace": "chat",
        "uid": "pod",
        "labels": {names.LABEL_MODEL: "llama", names.LABEL_MODEL_UID: MODEL, names.LABEL_GPU_CLASS: "l4"},
    }
}
POD, REPLICA_SET, DEPLOYMENT = (link(each) for each in owned(RAW))

Step = Callable[[Ownership], Any]
SEEN: dict[str, Step] = {
    "pod": lambda o: o.pod(POD),
    "ReplicaSet": lambda o: o.replica_set(REPLICA_SET),
    "Deployment": lambda o: o.deployment(DEPLOYMENT),
    "Model": lambda o: o.model(MODEL, "chat/llama"),
}
GONE: dict[str, Step] = {
    "ReplicaSet": lambda o: o.replica_set_gone(REPLICA_SET.uid),
    "Deployment": lambda o: o.deployment_gone(DEPLOYMENT.uid),
    "Model": lambda o: o.model_gone(MODEL),
}


def believed(known: Ownership) -> bool:
    return known.pod(POD)


@pytest.mark.parametrize("order", list(itertools.permutations(SEEN)), ids=" ".join)
def test_in_every_order_a_replica_proves_itself_once_all_is_seen(order: tuple[str, ...]) -> None:
    known, proved = Ownership(), list[str]()
    known.proved.append(lambda pod: proved.append(pod.uid))
    for number, each in enumerate(order):
        SEEN[each](known)
        seen = set(order[: number + 1])
        assert known.rogue == int("pod" in seen and seen != set(SEEN))
    assert proved == ([] if order[-1] == "pod" else ["pod"])
    assert believed(known)


@given(st.permutations(list(GONE)), st.integers(0, 3))
def test_what_was_proven_stays_proven_whatever_of_its_owners_goes(gone: list[str], times: int) -> None:
    known = Ownership()
    for see in SEEN.values():
        see(known)
    assert believed(known)
    for each in gone[:times]:
        GONE[each](known)
        assert believed(known)
    known.forget(POD.uid)
    assert believed(known) == (times == 0)


@given(st.lists(st.one_of(st.sampled_from(sorted(SEEN)), st.sampled_from(sorted(GONE)).map(lambda n: f"-{n}"))))
def test_the_state_after_any_events_is_that_of_the_pure_verdict_or_an_earlier_proof(events: list[str]) -> None:
    known, seen, proven = Ownership(), set[str](), False
    for event in events:
        if event.startswith("-"):
            GONE[event[1:]](known)
            seen.discard(event[1:])
        else:
            SEEN[event](known)
            seen.add(event)
        proven = proven or seen == set(SEEN)
        if "pod" in seen:
            assert known.rogue == (0 if proven else 1)
    if "pod" in seen:
        assert believed(known) == proven


FORGED: Mapping[str, tuple[Link, Link, Link, Mapping[str, str]]] = {
    "a label and no owner": (replace(POD, owner=None), REPLICA_SET, DEPLOYMENT, {MODEL: "chat/llama"}),
    "owned by the Model itself": (
        replace(POD, owner=Owner("shoal.dev", "Model", MODEL)),
        REPLICA_SET,
        DEPLOYMENT,
        {MODEL: "chat/llama"},
    ),
    "owned by the Deployment itself": (
        replace(POD, owner=Owner("apps", "Deployment", DEPLOYMENT.uid)),
        REPLICA_SET,
        DEPLOYMENT,
        {MODEL: "chat/llama"},
    ),
    "owned by a StatefulSet with a ReplicaSet's uid": (
        replace(POD, owner=Owner("apps", "StatefulSet", REPLICA_SET.uid)),
        REPLICA_SET,
        DEPLOYMENT,
        {MODEL: "chat/llama"},
    ),
    "in another namespace, with the real ReplicaSet's uid": (
        replace(POD, namespace="evil"),
        REPLICA_SET,
        DEPLOYMENT,
        {MODEL: "chat/llama"},
    ),
    "a whole chain in another namespace": (
        replace(POD, namespace="evil"),
        replace(REPLICA_SET, namespace="evil"),
        replace(DEPLOYMENT, namespace="evil"),
        {MODEL: "chat/llama"},
    ),
    "a ReplicaSet that no Deployment controls": (
        POD,
        replace(REPLICA_SET, owner=None),
        DEPLOYMENT,
        {MODEL: "chat/llama"},
    ),
    "a Deployment that no Model controls": (POD, REPLICA_SET, replace(DEPLOYMENT, owner=None), {MODEL: "chat/llama"}),
    "a Deployment of another Model": (
        POD,
        REPLICA_SET,
        replace(DEPLOYMENT, owner=Owner("shoal.dev", "Model", "uid-other")),
        {MODEL: "chat/llama", "uid-other": "chat/other"},
    ),
    "a Deployment with a name of its own": (
        POD,
        REPLICA_SET,
        replace(DEPLOYMENT, name="mine"),
        {MODEL: "chat/llama"},
    ),
    "another Model's label on a replica": (
        replace(POD, model_uid="uid-other", model="other"),
        REPLICA_SET,
        DEPLOYMENT,
        {MODEL: "chat/llama", "uid-other": "chat/other"},
    ),
    "another GPU class": (replace(POD, gpu_class="h100"), REPLICA_SET, DEPLOYMENT, {MODEL: "chat/llama"}),
    "a Model of the name with another uid": (POD, REPLICA_SET, DEPLOYMENT, {MODEL: "chat/namesake"}),
}


@pytest.mark.parametrize("forged", list(FORGED.values()), ids=list(FORGED))
def test_a_forged_chain_is_refused(forged: tuple[Link, Link, Link, Mapping[str, str]]) -> None:
    pod, replica_set, deployment, models = forged
    found = verdict(pod, {replica_set.uid: replica_set}, {deployment.uid: deployment}, models)
    assert found.outcome == "refused"
    assert found.reason


def test_the_chain_above_without_a_forgery_is_proven() -> None:
    # Else the test before this one would hold for any chain.
    owners = {REPLICA_SET.uid: REPLICA_SET}, {DEPLOYMENT.uid: DEPLOYMENT}
    assert verdict(POD, *owners, {MODEL: "chat/llama"}).outcome == "proven"


@given(st.sets(st.sampled_from(["ReplicaSet", "Deployment", "Model"]), min_size=1))
def test_what_was_not_seen_is_unknown_and_not_refused(missing: set[str]) -> None:
    found = verdict(
        POD,
        {} if "ReplicaSet" in missing else {REPLICA_SET.uid: REPLICA_SET},
        {} if "Deployment" in missing else {DEPLOYMENT.uid: DEPLOYMENT},
        {} if "Model" in missing else {MODEL: "chat/llama"},
    )
    assert found.outcome == "unknown"


def test_a_replica_that_is_relabelled_has_to_prove_itself_again() -> None:
    known = Ownership()
    for see in SEEN.values():
        see(known)
    assert not known.pod(replace(POD, model="other", model_uid="uid-other"))
    assert known.pod(POD)


def test_people_are_told_once_of_a_forged_pod_and_late_of_one_whose_owner_is_missing() -> None:
    now = 0.0
    known, told = Ownership(lambda: now), list[str]()
    known.reported.append(lambda pod, _why: told.append(pod.uid))
    for _ in range(2):
        known.pod(replace(POD, uid="forged", owner=None))
    known.pod(POD)
    known.report()
    assert told == ["forged"]
    now = ownership.GRACE_SECONDS
    known.report()
    known.report()
    assert told == ["forged", "pod"]
    assert known.rogue == 2
    known.forget("forged")
    known.forget("pod")
    assert known.rogue == 0
