"""Why a replica does not serve, as a person reads it."""

import json
from typing import Any

import pytest

from shoal.core.facts import Container, Pod
from shoal.core.status.diagnosis import diagnose, progress


def container(name: str, **state) -> Container:
    base: dict[str, Any] = {
        "ready": False,
        "restarts": 0,
        "waiting_reason": None,
        "waiting_message": None,
        "exit_code": None,
        "exit_reason": None,
        "exit_message": None,
        "running": False,
    }
    return Container(name=name, **(base | state))


def pod(*containers: Container, name: str = "p", **state) -> Pod:
    base: dict[str, Any] = {
        "namespace": "ns",
        "uid": name,
        "node": "n1",
        "finished": False,
        "deleting": False,
        "ready": False,
        "requests": {},
        "model_uid": "u",
    }
    return Pod(name=name, containers=containers, **(base | state))


GATED = json.dumps({"reason": "Gated", "message": "the repository needs a token: set spec.source.secretRef"})


@pytest.mark.parametrize(
    ("sick", "reason", "message"),
    [
        (
            pod(container("stage", exit_code=1, restarts=1, exit_message=GATED)),
            "Gated",
            "the repository needs a token: set spec.source.secretRef (pod ns/p, attempt 2)",
        ),
        (
            pod(container("stage", exit_code=137, exit_reason="OOMKilled")),
            "StageFailed",
            "staging ended with exit code 137: OOMKilled (pod ns/p, attempt 1)",
        ),
        (
            pod(container("stage", exit_code=1, exit_message="Traceback: boom")),
            "StageFailed",
            "staging ended with exit code 1: Traceback: boom (pod ns/p, attempt 1)",
        ),
        (
            pod(container("engine", waiting_reason="ImagePullBackOff", waiting_message="no such image")),
            "ImageUnavailable",
            "container engine of pod ns/p: ImagePullBackOff: no such image",
        ),
        (
            pod(container("engine", exit_code=1, restarts=3, exit_message="CUDA out of memory\n")),
            "EngineFailed",
            "the engine of pod ns/p ended with exit code 1 (3 restarts): CUDA out of memory",
        ),
        (
            pod(node=None, unschedulable="0/6 nodes are available: 6 Insufficient nvidia.com/gpu."),
            "Unschedulable",
            "pod ns/p: 0/6 nodes are available: 6 Insufficient nvidia.com/gpu.",
        ),
        (
            pod(node=None, unschedulable='0/6 nodes: persistentvolumeclaim "extra" not found. not found'),
            "Unschedulable",
            "pod ns/p waits: there is no PersistentVolumeClaim extra in namespace ns: create it",
        ),
    ],
)
def test_the_cause_is_named_with_the_words_of_whoever_knows(sick: Pod, reason: str, message: str) -> None:
    cause = diagnose([sick])
    assert cause is not None
    assert (cause.reason, cause.message) == (reason, message)


def test_the_nearest_cause_of_several_pods_is_shown() -> None:
    waiting = pod(name="a", node=None, unschedulable="full")
    broken = pod(container("engine", exit_code=1, exit_message="boom"), name="b")
    fetching = pod(container("stage", exit_code=1, exit_message=GATED), name="c")
    for pods, reason in (([waiting, broken, fetching], "Gated"), ([waiting, broken], "EngineFailed")):
        cause = diagnose(pods)
        assert cause is not None
        assert cause.reason == reason


def test_pods_that_serve_or_go_are_no_cause() -> None:
    crashed = container("engine", exit_code=1, restarts=1, exit_message="boom")
    assert diagnose([pod(crashed, ready=True), pod(crashed, deleting=True), pod(crashed, finished=True)]) is None
    staged = container("stage", exit_code=0)
    assert diagnose([pod(staged, container("engine", running=True))]) is None


def test_progress_counts_replicas_by_what_they_do() -> None:
    pods = [
        pod(container("stage", running=True), container("engine")),
        pod(container("stage", exit_code=0), container("engine", running=True)),
        pod(),
        pod(node=None),
        pod(ready=True),
    ]
    assert progress(pods) == "1 scheduled, 1 staging, 1 loading"


def test_a_replica_whose_node_fell_silent_is_not_said_to_load() -> None:
    served = (container("stage", exit_code=0, ready=True), container("engine", running=True, ready=True))
    assert (
        progress([pod(*served), pod(container("engine", running=True))]) == "1 on nodes that do not answer, 1 loading"
    )


def test_an_engine_that_served_and_is_started_again_waits_for_nobody() -> None:
    ended = container("engine", exit_code=137, restarts=1, running=True)
    crashed = diagnose([pod(ended, was_ready=True)])
    assert crashed is not None
    assert crashed.reason == "EngineFailed"
    assert not crashed.waits_for_a_person


@pytest.mark.parametrize(
    "sick",
    [
        pod(container("engine", exit_code=1, restarts=1, running=True)),
        pod(container("engine", exit_code=1, restarts=2, waiting_reason="CrashLoopBackOff"), was_ready=True),
    ],
    ids=["never served", "ends again and again"],
)
def test_an_engine_that_fails_for_good_waits_for_a_person(sick: Pod) -> None:
    cause = diagnose([sick])
    assert cause is not None
    assert cause.waits_for_a_person
