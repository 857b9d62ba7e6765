"""What engines and gateways say of starts finds its way to the stages of a cold start, and how long nodes take to
come to the expected one."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest

from shoal.api.demand import FirstToken
from shoal.api.model import ColdStartStatus, StartStages
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.coldstart import ADVICE
from shoal.core.facts import Pod
from shoal.kube.client import KubeClient
from shoal.kube.events import Recorder
from tests.support.operators import CONFIG, gpu_class, model
from tests.support.owners import LabelsSuffice
from tests.unit.core.test_coldstart import pod


class Starts:
    """The cold starts of one Model."""

    def __init__(self) -> None:
        client = cast("KubeClient", None)
        self.world = World(client, CONFIG, "shoal-system", Recorder(client, "test"), ownership=LabelsSuffice())
        self.world.models.upsert(model("chat", "ns") | {"metadata": {"name": "chat", "namespace": "ns", "uid": "u"}})
        self.state = FleetState(self.world)
        self.learned: list[tuple[str, str, str, float]] = []
        self.cold = ColdStarts(self.world, self.state, lambda *what: self.learned.append(what))

    def ready(self, *pods: Pod) -> None:
        for each in pods:
            self.cold.on_pod(each.key, replace(each, ready=False, was_ready=False), each)

    def tell(self, **of: tuple[float, float | None]) -> bool:
        told: Mapping[str, FirstToken] = {
            uid: FirstToken(after=after, seconds=seconds) for uid, (after, seconds) in of.items()
        }
        return self.cold.on_first_tokens("u", told)

    @property
    def last(self) -> StartStages:
        custom = self.world.models.get("ns/chat")
        assert custom is not None
        assert custom.object is not None
        [found] = self.cold.stages(custom.object).values()
        return found.last


@pytest.fixture
def starts() -> Starts:
    return Starts()


def test_the_capture_of_graphs_belongs_to_the_start_of_its_pod(starts: Starts) -> None:
    cold = starts.cold
    first, second = pod(), replace(pod(), uid="q")
    starts.ready(first, second)
    custom = starts.world.models.get("ns/chat")
    assert custom is not None
    assert custom.object is not None

    [before] = cold.stages(custom.object).values()
    assert before.last.graph_capture is None, "unknown, and not zero"
    assert cold.on_graphs(second, 12.4)
    [after] = cold.stages(custom.object).values()
    assert (after.last.load, after.last.graph_capture, after.median.graph_capture) == (60, 12, 12)
    assert not cold.on_graphs(replace(first, uid="restarted"), 30), "no start of it was measured"
    assert cold.on_graphs(first, 20)
    [both] = cold.stages(custom.object).values()
    assert (both.last.graph_capture, both.median.graph_capture) == (12, 16)
    assert starts.learned == [("u", "h100", "graph_capture", 12.4), ("u", "h100", "graph_capture", 20)]


def test_the_status_says_what_would_shorten_the_starts_on_a_class(starts: Starts) -> None:
    """Also of starts before this process began, and in the words of this version."""
    raw = model("chat", "ns") | {"metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7"}}
    slow = {"schedule": 1, "pull": 2, "fetch": 300, "load": 4}
    short = {"schedule": 1, "pull": 2, "fetch": 3, "load": 4}

    def stages() -> dict[str, ColdStartStatus]:
        custom = starts.world.models.get("ns/chat")
        assert custom is not None
        assert custom.object is not None
        return starts.cold.stages(custom.object)

    before = [
        {"class": "a100", "coldStart": {"last": short, "median": slow, "starts": 2, "advice": "of another version"}},
        {"class": "l4", "coldStart": {"last": short, "median": short, "starts": 1, "advice": "of another version"}},
    ]
    starts.world.models.upsert(raw | {"status": {"variants": before}})
    assert {name: found.advice for name, found in stages().items()} == {
        "a100": f"most is fetch: {ADVICE['fetch']}",
        "l4": None,
    }
    starts.ready(pod())
    found = stages()
    assert found["h100"].advice == f"most is fetch: {ADVICE['fetch']}", "of equals the earlier"
    assert starts.cold.on_graphs(pod(), 50)
    assert starts.tell(p=(1.0, 61.0))
    assert stages()["h100"].advice == f"most is first token: {ADVICE['first_token']}"
    assert stages() == stages()


def test_the_first_token_belongs_to_the_start_of_its_pod(starts: Starts) -> None:
    starts.ready(pod())
    assert starts.last.first_token is None, "unknown, and not zero"
    assert not starts.tell(another=(0.1, 3.0)), "its start was not measured"
    assert starts.tell(p=(0.2, 3.4))
    assert (starts.last.first_token, starts.last.load) == (3, 60)
    assert not starts.tell(p=(0.2, 3.4)), "gateways repeat what they know"
    assert starts.learned == [("u", "h100", "first_token", 3.4)]


def test_a_first_token_may_be_told_before_the_pod_is_ready(starts: Starts) -> None:
    assert not starts.tell(p=(0.2, 3.4))
    starts.ready(pod())
    assert starts.last.first_token == 3
    assert starts.learned == [("u", "h100", "first_token", 3.4)]


def test_of_several_gateways_the_one_that_sent_first_knows(starts: Starts) -> None:
    starts.ready(pod())
    assert starts.tell(p=(2.0, 0.6))
    assert starts.tell(p=(0.5, 8.0))
    assert not starts.tell(p=(30.0, 0.1))
    assert starts.last.first_token == 8
    assert len(starts.learned) == 1, "a start is counted once"
    assert starts.tell(p=(0.1, None))
    assert starts.last.first_token is None, "the first answer of all did not show it"


def test_an_answer_that_showed_nothing_is_not_counted(starts: Starts) -> None:
    starts.ready(pod())
    starts.tell(p=(0.5, None))
    assert starts.last.first_token is None
    assert starts.learned == []


def test_first_tokens_of_a_model_that_is_gone_are_not_kept(starts: Starts) -> None:
    starts.world.models.remove("ns/chat")
    assert not starts.tell(p=(0.5, 1.0))
    assert starts.state.records() == ()


def test_few_first_tokens_are_remembered(starts: Starts) -> None:
    for number in range(1000):
        starts.tell(**{f"pod-{number}": (0.0, 1.0)})
    assert len(starts.state.record("u").first_tokens) == 256


def test_a_replica_that_is_ready_again_has_not_started(starts: Starts) -> None:
    first = pod()
    starts.ready(first)
    known = starts.last
    assert first.ready_since is not None
    # Its node was silent for a minute, three days later.
    again = replace(first, ready_since=first.ready_since + timedelta(days=3))
    starts.cold.on_pod(first.key, replace(again, ready=False, was_ready=True), again)
    custom = starts.world.models.get("ns/chat")
    assert custom is not None
    assert custom.object is not None
    assert starts.last == known
    assert set(starts.cold.of(custom.object).values()) == {150}


def begins(cold: ColdStarts, uid: str, schedule: int) -> None:
    """A replica is bound after so many seconds, and Ready 145 s later."""
    before = pod()
    assert before.created is not None
    assert before.ready_since is not None
    late = timedelta(seconds=schedule - 5)
    after = replace(before, uid=uid, scheduled=before.created + timedelta(seconds=schedule))
    after = replace(after, ready_since=before.ready_since + late)
    cold.on_pod(after.key, replace(after, ready=False, was_ready=False), after)


def waits(world: World, cold: ColdStarts) -> dict[str, int]:
    custom = world.models.get("ns/chat")
    assert custom is not None
    assert custom.object is not None
    return cold.node_waits(custom.object)


def test_the_next_replica_may_wait_for_a_node_although_the_last_one_found_it(starts: Starts) -> None:
    world, cold = starts.world, starts.cold
    fixed = gpu_class("h100", "")["spec"]

    def classed(version: str, spec: dict[str, Any]) -> None:
        metadata = {"name": "h100", "uid": "c", "resourceVersion": version}
        world.classes.upsert(gpu_class("h100", "") | {"metadata": metadata, "spec": spec})

    def node(version: str, created: str) -> None:
        metadata = {"name": "n", "uid": "n", "resourceVersion": version, "creationTimestamp": created}
        world.nodes.upsert({"metadata": metadata})

    classed("1", fixed)
    begins(cold, "a", 5)
    assert waits(world, cold) == {}, "nobody adds nodes of the class"
    autoscaled = {"autoscaled": {"max": 3, "gpusPerNode": 1, "provisionSeconds": 300}}
    classed("2", {**fixed, "nodes": autoscaled})
    assert waits(world, cold) == {"h100": 295}, "what the class says, until a node has come"
    node("1", "2026-11-25T00:01:00Z")
    begins(cold, "b", 80)
    assert waits(world, cold) == {}, "the last start has all of the wait in it"
    node("2", "2026-11-24T00:00:00Z")
    begins(cold, "c", 5)
    assert waits(world, cold) == {"h100": 75}, "as measured, and no longer what the class says"
    assert cold.node_wait("h100") == 80

    # An operator that starts anew reads what the one before it measured in the class's status.
    status = {"provisionSeconds": 80}
    metadata = {"name": "h100", "uid": "c", "resourceVersion": "3"}
    world.classes.upsert(
        gpu_class("h100", "") | {"metadata": metadata, "spec": {**fixed, "nodes": autoscaled}, "status": status}
    )
    anew = ColdStarts(world, starts.state)
    assert waits(world, anew) == {"h100": 75}
    node("3", "2026-11-25T00:01:00Z")
    begins(anew, "d", 60)
    assert anew.node_wait("h100") == 80, "the longest of the last, also of those before the start"
    begins(anew, "e", 90)
    assert anew.node_wait("h100") == 90
    # A class that was deleted and made anew is another one.
    metadata = {"name": "h100", "uid": "other", "resourceVersion": "4"}
    world.classes.upsert(gpu_class("h100", "") | {"metadata": metadata, "spec": {**fixed, "nodes": autoscaled}})
    assert anew.node_wait("h100") is None
