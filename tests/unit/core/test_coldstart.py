"""The stages of a replica's start, from its pod's own times."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from shoal.api.model import ColdStartStatus, StartStages
from shoal.core.coldstart import ADVICE, ColdStart, advise, describe, measured, median, node_wait, of_pod
from shoal.core.facts import Container, Node, Pod
from shoal.kube import projections

NOW = datetime(2026, 11, 25, tzinfo=UTC)


def at(seconds: int) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def raw(*, restarts: int = 0, managed: bool = False) -> dict[str, Any]:
    """A pod bound after 5 s, staging from 12 to 72, its engine started at 90 and Ready at 150."""
    labels = {
        "app.kubernetes.io/component": "engine", "shoal.dev/model-uid": "u", "shoal.dev/gpu-class": "h100",
    } | ({"kueue.x-k8s.io/managed": "true"} if managed else {})  # fmt: skip
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": "p", "creationTimestamp": at(0), "labels": labels},
        "spec": {"nodeName": "n", "containers": []},
        "status": {
            "startTime": at(5),
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(5)},
                {"type": "Ready", "status": "True", "lastTransitionTime": at(150)},
            ],
            "initContainerStatuses": [
                {
                    "name": "stage",
                    "restartCount": 0,
                    "state": {"terminated": {"exitCode": 0, "startedAt": at(12), "finishedAt": at(72)}},
                }
            ],
            "containerStatuses": [
                {"name": "engine", "ready": True, "restartCount": restarts, "state": {"running": {"startedAt": at(90)}}}
            ],
        },
    }


def pod(**how: Any) -> Pod:
    found = projections.pod(raw(**how))
    assert found is not None
    return found


def test_each_stage_has_the_time_that_the_pod_says() -> None:
    found = of_pod(pod())
    assert found is not None
    assert found == ColdStart(schedule=5, pull=7 + 18, fetch=60, load=60)
    assert found.total == 150


def node(created: int | None) -> Node:
    metadata = {"name": "n"} | ({} if created is None else {"creationTimestamp": at(created)})
    return projections.node({"metadata": metadata})


def test_a_pod_that_is_older_than_its_node_waited_for_it() -> None:
    assert node_wait(pod(), node(3)) == 5
    assert node_wait(pod(), node(-1)) is None, "the node was there"
    assert node_wait(pod(), node(None)) is None
    assert node_wait(pod(managed=True), node(3)) is None, "it also waited for quota"


def test_the_wait_for_a_queue_is_no_stage() -> None:
    found = of_pod(pod(managed=True))
    assert found is not None
    assert (found.schedule, found.total) == (0, 145)


def test_a_start_whose_times_are_mixed_or_missing_is_unknown() -> None:
    assert of_pod(pod(restarts=1)) is None
    known = pod()
    assert of_pod(replace(known, scheduled=None)) is None
    assert of_pod(replace(known, ready_since=None)) is None
    assert of_pod(replace(known, containers=known.containers[:1])) is None


def test_a_time_that_is_none_is_unknown() -> None:
    broken = raw()
    broken["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = "yesterday"
    found = projections.pod(broken)
    assert found is not None
    engine = found.container("engine")
    assert isinstance(engine, Container)
    assert (engine.started, of_pod(found)) == (None, None)


def test_the_median_is_of_each_stage() -> None:
    assert median([]) is None
    starts = [ColdStart(1, 10, 60, 30), ColdStart(100, 10, 20, 30), ColdStart(1, 12, 61, 31)]
    assert median(starts) == ColdStart(1, 10, 60, 30)


def test_the_longest_stage_has_an_advice() -> None:
    text = describe("h100", ColdStart(2, 10, 300, 40), ColdStart(2, 10, 200, 40))
    assert text.startswith(
        "cold start on h100: 352 s (schedule 2 s, pull 10 s, fetch 300 s, load 40 s, of which graph capture "
        "unknown), then the first token: unknown; usually 252 s; most is"
    )
    assert text.endswith(
        "most is fetch: put the weights on the nodes before: spec.prefetch, or a source that is nearer"
    )
    assert "most is" not in describe("h100", ColdStart(1, 1, 2, 3))


def test_the_capture_of_graphs_is_a_part_of_the_load_and_has_its_own_advice() -> None:
    start = ColdStart(1, 1, 1, 60).with_graphs(44.6)
    assert (start.graphs, start.total) == (45, 63)
    text = describe("h100", start)
    assert "load 60 s, of which graph capture 45 s)" in text
    assert "most is load: capture fewer CUDA graphs" in text
    assert "most is load: load less" in describe("h100", ColdStart(1, 1, 1, 60).with_graphs(20))
    assert ColdStart(1, 1, 1, 60).with_graphs(1e6).graphs == 60, "it cannot be longer than all of the load"
    known = median([start, ColdStart(1, 1, 1, 60), ColdStart(1, 1, 1, 60).with_graphs(43)])
    assert known is not None
    assert known.graphs == 44, "of those that say it"


def test_the_first_token_comes_after_the_start_and_has_its_own_advice() -> None:
    start = ColdStart(1, 1, 1, 6).with_first_token(40.4)
    assert (start.first_token, start.total, start.longest) == (40, 9, "first_token")
    text = describe("h100", start)
    assert "cold start on h100: 9 s (" in text
    assert "), then the first token: 40 s; most is first token: have the engine warm up" in text
    assert describe("h100", ColdStart(1, 1, 1, 6)).endswith("then the first token: unknown"), "short needs no advice"
    assert start.with_first_token(None).first_token is None
    assert start.with_first_token(-0.4).first_token == 0
    usual = median([start, ColdStart(1, 1, 1, 6), ColdStart(1, 1, 1, 6).with_first_token(20)])
    assert usual is not None
    assert usual.first_token == 30, "of those of which it is known"
    assert "; usually 9 s, then 30 s; most is" in describe("h100", start, usual)


def test_the_advice_of_a_start_stays_the_same_while_the_same_stage_is_the_longest() -> None:
    assert advise(ColdStart(2, 10, 300, 40)) == advise(ColdStart(0, 3, 41, 40)) == f"most is fetch: {ADVICE['fetch']}"
    assert advise(ColdStart(2, 10, 39, 40)) == f"most is load: {ADVICE['load']}"
    assert advise(ColdStart(1, 1, 2, 3)) is None
    assert advise(ColdStart(1, 1, 2, 3, first_token=4)) == f"most is first token: {ADVICE['first_token']}"


def test_the_bottleneck_has_its_own_seconds() -> None:
    assert ColdStart(2, 10, 300, 40).bottleneck == ("fetch", 300)
    assert ColdStart(2, 10, 30, 40, graphs=25).bottleneck == ("graph_capture", 25)
    assert ColdStart(2, 10, 30, 40, graphs=20).bottleneck == ("load", 40), "half of it is not most"
    assert ColdStart(1, 1, 2, 3).bottleneck is None


def test_every_advice_fits_in_the_status() -> None:
    starts = {
        "schedule": ColdStart(60, 1, 1, 1),
        "pull": ColdStart(1, 60, 1, 1),
        "fetch": ColdStart(1, 1, 60, 1),
        "load": ColdStart(1, 1, 1, 60),
        "graph_capture": ColdStart(1, 1, 1, 60, graphs=50),
        "first_token": ColdStart(1, 1, 1, 1, first_token=60),
    }
    assert set(starts) == set(ADVICE)
    for stage, start in starts.items():
        text = advise(start)
        assert text is not None
        assert text.endswith(ADVICE[stage])
        stages = StartStages(
            schedule=start.schedule, pull=start.pull, fetch=start.fetch, load=start.load,
            graph_capture=start.graphs, first_token=start.first_token,
        )  # fmt: skip
        assert measured(stages) == start
        assert ColdStartStatus(last=stages, median=stages, starts=1, advice=text).advice == text
