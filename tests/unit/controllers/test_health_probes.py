"""Canaries and paces of replicas, from the store to what a class says of its GPUs."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import aiohttp
import pytest

from shoal.api import names
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.api.model import CanaryAnswers
from shoal.api.replica import CanaryAnswer
from shoal.controllers import healthprobes
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.health import FleetHealth
from shoal.controllers.healthprobes import HealthProbes
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.health import HealthPlan, Unit
from shoal.core.health.slow import WINDOW_SECONDS, WINDOWS
from shoal.core.scaling import Load
from shoal.core.status import healthstatus
from shoal.kube.client import KubeClient
from shoal.kube.events import Recorder
from tests.support.devices import class_of_devices, device_class, resource_slice
from tests.support.operators import CONFIG, model
from tests.support.owners import LabelsSuffice

START = datetime(2026, 11, 26, tzinfo=UTC)
DEVICES = [f"gpu-{i}" for i in range(8)]
WEIGHTS = "sha256:" + "0" * 64
GOOD, BAD = " Paris, and that of", "!!!!!!!!!!!!!!!!!!!"


class Fleet:
    """Eight devices, and replicas of one Model on some of them, which answer as a test says."""

    def __init__(self, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = START
        client = cast("KubeClient", None)
        self.world = World(
            client, CONFIG, "shoal-system", Recorder(client, "test"), now=lambda: self.now, ownership=LabelsSuffice()
        )
        self.gpus = FleetGPUs(self.world)
        self.health = FleetHealth(self.world, self.gpus)
        self.changed: list[str] = []
        self.loads: dict[str, Load] = {}
        install = cast("Any", None)
        self.learned: dict[str, CanaryAnswers] = {}
        self.probes = HealthProbes(self.world, install, self.health, self.loads.get, self.changed.append, self.learn)
        self.answers: dict[str, str | None] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(self.probes, "_ask", self.ask)
        self.world.device_classes.upsert(stored(device_class()))
        self.world.resource_slices.upsert(stored(resource_slice("n", *DEVICES)))
        self.world.nodes.upsert(
            {"metadata": {"name": "n", "uid": "n"}, "spec": {},
             "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        )  # fmt: skip
        self.world.models.upsert(stored(model("chat", "ns"), uid="m"))
        self.version = 0
        self.status: JsonObject = {}
        self.write()
        for i in range(replicas):
            self.replica(i)

    def write(self) -> None:
        self.version += 1
        raw = stored(class_of_devices("devices"), uid="c") | {"status": self.status}
        raw["metadata"] = raw["metadata"] | {"resourceVersion": str(self.version)}
        self.world.classes.upsert(raw)

    def replica(self, i: int, image: str = "sglang:1", weights: str | None = WEIGHTS) -> None:
        labels = {
            names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL: "chat", names.LABEL_MODEL_UID: "m",
            names.LABEL_GPU_CLASS: "devices",
        }  # fmt: skip
        name = f"chat-{i}"
        stage = [{"name": names.STAGE_URI_ENV, "value": "pvc://weights/chat"}]
        if weights is not None:
            stage = [{"name": names.STAGE_URI_ENV, "value": "hf://acme/chat"},
                     {"name": names.STAGE_MANIFEST_ENV, "value": weights}]  # fmt: skip
        pod = {
            "metadata": {"namespace": "ns", "name": name, "uid": name, "labels": labels, "resourceVersion": "1",
                         "annotations": {names.ANNOTATION_DEVICES: "1"}},
            "spec": {"nodeName": "n", "containers": [{"name": names.CONTAINER_ENGINE, "image": image}],
                     "initContainers": [{"name": names.CONTAINER_STAGE, "env": stage}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
        }  # fmt: skip
        self.world.pods.upsert(pod)
        result = {"driver": "gpu.test", "pool": "n", "device": DEVICES[i]}
        status = {"allocation": {"devices": {"results": [result]}},
                  "reservedFor": [{"resource": "pods", "name": name, "uid": name}]}  # fmt: skip
        self.world.resource_claims.upsert(stored({"metadata": {"namespace": "ns", "name": name}, "status": status}))
        self.answers[name] = GOOD

    def gone(self, i: int) -> None:
        self.world.pods.remove(f"ns/chat-{i}")
        self.world.resource_claims.remove(f"ns/chat-{i}")

    async def ask(self, _session: aiohttp.ClientSession, pod: facts.Pod, number: int) -> CanaryAnswer | None:
        if number == 0:
            self.asked.append(pod.name)
        text = self.answers[pod.name]
        return None if text is None else CanaryAnswer(prompt=f"prompt {number}", text=text)

    async def step(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        elapsed = (self.now - START).total_seconds()
        self.probes.observe(elapsed)
        await self.probes.ask(cast("Any", None), elapsed)

    async def busy(self, minutes: int) -> None:
        """The Model is used for so long."""
        for _ in range(minutes):
            made = int((self.now - START).total_seconds() * 100)
            running = [pod.uid for pod in self.world.pods.values()]
            self.loads.update((uid, Load(running=1, generation_tokens_total=made)) for uid in running)
            await self.step(60)

    def learn(self, model_uid: str, gpu_class: str, answers: CanaryAnswers) -> None:
        """As the Model's controller writes it into the status."""
        assert (model_uid, gpu_class) == ("m", "devices")
        self.learned[gpu_class] = answers
        self.read_model()

    def read_model(self) -> None:
        """The Model, with what was learned."""
        self.version += 1
        variants = [
            {"class": name, "canary": each.model_dump(mode="json", by_alias=True, exclude_none=True)}
            for name, each in self.learned.items()
        ]
        raw = stored(model("chat", "ns"), uid="m")
        raw["metadata"] |= {"resourceVersion": str(self.version)}
        self.world.models.upsert(raw | {"status": {"variants": variants}})

    def decide(self) -> HealthPlan:
        custom = self.world.classes.get("devices")
        assert custom is not None
        assert custom.object is not None
        return self.health.decide(custom.object).plan

    def write_plan(self) -> None:
        """As the controller writes it into the status."""
        shown = healthstatus.shown(self.decide().quarantined, {})
        self.status = {
            "quarantined": [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in shown]
        }
        self.write()

    def quarantined(self, device: int, state: str) -> None:
        entry = {
            "node": "n", "device": f"gpu.test/n/{DEVICES[device]}", "state": state, "reason": "GPUUnhealthy",
            "message": "", "by": "Shoal", "since": "2026-11-25T00:00:00Z", "times": 1,
        }  # fmt: skip
        self.status = {"quarantined": [entry]}
        GPUClass.model_validate(class_of_devices("devices") | {"status": self.status})
        self.write()


def stored(raw: JsonObject, uid: str = "") -> JsonObject:
    metadata = {"resourceVersion": "1", "generation": 1} | raw["metadata"]
    return raw | {"metadata": metadata | {"uid": uid or f"uid-{metadata['name']}"}}


async def test_a_replica_on_probation_that_answers_as_the_others_do_releases_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(3, monkeypatch)
    fleet.quarantined(0, "Probation")
    assert [q.state for q in fleet.decide().quarantined] == ["Probation"]
    await fleet.step(5)
    assert fleet.asked[0] == "chat-0"
    assert fleet.changed == ["devices"]
    plan = fleet.decide()
    assert not plan.quarantined
    assert [why for _, why in plan.released] == ["a replica there passed its test"]


async def test_one_that_answers_otherwise_goes_back_into_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(3, monkeypatch)
    fleet.quarantined(0, "Probation")
    fleet.answers["chat-0"] = BAD
    await fleet.step(5)
    [found] = fleet.decide().quarantined
    assert (found.state, found.times) == ("Quarantined", 2)


@pytest.mark.parametrize("replicas", [1, 3])
async def test_without_an_answer_or_a_witness_it_stays_on_probation(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(replicas, monkeypatch)
    fleet.quarantined(0, "Probation")
    if replicas > 1:
        fleet.answers["chat-0"] = None
    for _ in range(5):
        await fleet.step(60)
    assert [q.state for q in fleet.decide().quarantined] == ["Probation"]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_replica_that_is_alone_ends_the_probation_after_an_hour_if_it_answers(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(1, monkeypatch)
    fleet.quarantined(0, "Probation")
    if not answers:
        fleet.answers["chat-0"] = None
    for _ in range(59):
        await fleet.step(60)
        fleet.write_plan()
        assert [q["state"] for q in fleet.status["quarantined"]] == ["Probation"]
    for _ in range(3):
        await fleet.step(60)
        fleet.write_plan()
    assert len(fleet.status["quarantined"]) == (0 if answers else 1)
    assert len(fleet.asked) > 50, "it goes on being tested: another replica may come"


async def test_a_model_that_is_not_used_is_not_asked_and_one_that_is_every_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(4, monkeypatch)
    for _ in range(40):
        await fleet.step(60)
    assert not fleet.asked, "a canary must not keep a Model from going to zero"
    for minute in range(40):
        fleet.loads |= {f"chat-{i}": Load(running=0, generation_tokens_total=minute * 5000) for i in range(4)}
        await fleet.step(60)
    assert not fleet.asked, "the time in which it has to be idle would begin anew"
    for minute in range(40, 80):
        fleet.loads |= {f"chat-{i}": Load(running=1, generation_tokens_total=minute * 5000) for i in range(4)}
        await fleet.step(60)
    assert 8 <= len(fleet.asked) <= 16


async def test_a_replica_that_answers_garbage_loses_its_gpu_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(4, monkeypatch)
    fleet.answers["chat-2"] = BAD
    found: set[Unit] = set()
    for tick in range(200):
        fleet.loads |= {f"chat-{i}": Load(running=1, generation_tokens_total=tick * 5000) for i in range(4)}
        await fleet.step(30)
        plan = fleet.decide()
        found |= {q.unit for q in plan.quarantined}
        if plan.quarantined:
            assert (plan.quarantined[0].reason, plan.quarantined[0].model) == ("ReplicaAnswersDiffer", "ns/chat")
    assert found == {Unit("n", "gpu.test/n/gpu-2")}


async def test_a_replica_that_is_far_slower_loses_its_gpu_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(4, monkeypatch)
    made: Mapping[str, float] = {"chat-0": 40, "chat-1": 5, "chat-2": 41, "chat-3": 39}
    reached = 0.0
    for tick in range(int((WINDOWS + 4) * WINDOW_SECONDS / 5)):
        for name, rate in made.items():
            fleet.loads[name] = Load(engine_boot="b", running=4, generation_tokens_total=int(tick * 5 * rate))
        await fleet.step(5)
        plan = fleet.decide()
        assert {q.unit for q in plan.quarantined} <= {Unit("n", "gpu.test/n/gpu-1")}
        if plan.quarantined and not reached:
            reached = tick * 5.0
            assert plan.quarantined[0].reason == "ReplicaFarSlower"
    assert WINDOWS * WINDOW_SECONDS <= reached <= (WINDOWS + 2) * WINDOW_SECONDS, "minutes of evidence"


@pytest.mark.parametrize("held_down", [True, False])
async def test_of_two_replicas_the_far_slower_one_loses_its_gpu_if_its_clocks_are_held_down(
    held_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(2, monkeypatch)
    hot = Unit("n", "gpu.test/n/gpu-1")

    def said(_class: str, unit: Unit) -> str:
        return "too hot (hardware)" if held_down and unit == hot else ""

    monkeypatch.setattr(fleet.probes, "_held_down", said)
    out: set[Unit] = set()
    for tick in range(int((WINDOWS + 3) * WINDOW_SECONDS / 5)):
        for name, rate in {"chat-0": 40, "chat-1": 5}.items():
            fleet.loads[name] = Load(engine_boot="b", running=4, generation_tokens_total=int(tick * 5 * rate))
        await fleet.step(5)
        out |= {q.unit for q in fleet.decide().quarantined}
    assert out == ({hot} if held_down else set())


async def test_a_replica_with_several_gpus_and_one_that_nobody_names_take_no_node_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(4, monkeypatch)
    pod = fleet.world.pods.get("ns/chat-0")
    assert pod is not None
    assert fleet.probes._unit(pod) == Unit("n", "gpu.test/n/gpu-0")  # pyright: ignore[reportPrivateUsage]
    fleet.world.resource_claims.remove("ns/chat-0")
    assert fleet.probes._unit(pod) is None  # pyright: ignore[reportPrivateUsage]
    assert healthprobes.MOST_ASKED >= 3


# --- one replica, and what is remembered ------------------------------------------------------------------------------


async def learned(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A Model of one replica that has run on two GPUs, one after the other."""
    fleet = Fleet(1, monkeypatch)
    await fleet.busy(25)
    assert not any(each.known for each in fleet.learned["devices"].prompts), "one GPU alone"
    fleet.gone(0)
    fleet.replica(1)
    await fleet.busy(25)
    assert [each.known[0].gpus for each in fleet.learned["devices"].prompts] == [2, 2, 2]
    assert (fleet.learned["devices"].image, fleet.learned["devices"].weights) == ("sglang:1", WEIGHTS)
    return fleet


async def test_the_only_replica_of_a_model_loses_a_gpu_that_computes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await learned(monkeypatch)
    await fleet.busy(60)
    assert not fleet.decide().quarantined
    fleet.answers["chat-1"] = BAD
    await fleet.busy(35)
    fleet.decide()
    await fleet.step(20)
    [found] = fleet.decide().quarantined
    assert (found.unit, found.reason) == (Unit("n", "gpu.test/n/gpu-1"), "ReplicaAnswersDiffer")


async def test_what_is_known_outlives_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await learned(monkeypatch)
    fleet.probes.begin_term()
    fleet.gone(1)
    fleet.replica(2)
    fleet.answers["chat-2"] = BAD
    await fleet.busy(45)
    assert [s.unit.device for s in fleet.health.found.signals["devices"]] == ["gpu.test/n/gpu-2"]


@pytest.mark.parametrize("text", [GOOD, BAD])
async def test_with_a_known_answer_the_only_replica_decides_on_its_gpus_probation(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await learned(monkeypatch)
    fleet.gone(1)
    fleet.replica(3)
    fleet.answers["chat-3"] = text
    fleet.quarantined(3, "Probation")
    await fleet.step(60)
    plan = fleet.decide()
    if text == GOOD:
        assert [why for _, why in plan.released] == ["a replica there passed its test"]
    else:
        assert [(q.state, q.times) for q in plan.quarantined] == [("Quarantined", 2)]


async def test_weights_that_may_change_in_place_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(0, monkeypatch)
    fleet.replica(0, weights=None)
    await fleet.busy(60)
    assert not fleet.asked
    assert not fleet.learned


@pytest.mark.parametrize(
    "other", [{"image": "sglang:2"}, {"weights": "sha256:" + "1" * 64}], ids=["another engine", "other weights"]
)
async def test_what_was_known_says_nothing_of_other_weights_or_another_engine(
    other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await learned(monkeypatch)
    fleet.gone(1)
    fleet.replica(2, **other)
    fleet.answers["chat-2"] = "They have other words for it"
    await fleet.busy(60)
    assert not fleet.health.found.signals
    now = fleet.learned["devices"]
    assert {"image": now.image, "weights": now.weights}.items() >= other.items()
    assert not any(each.known for each in now.prompts)


async def test_each_replica_of_many_is_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthprobes, "MOST_ASKED", 3)
    fleet = Fleet(8, monkeypatch)
    await fleet.busy(60)
    assert {fleet.asked.count(f"chat-{i}") for i in range(8)} <= {1, 2}


def publish(fleet: Fleet, *devices: str) -> None:
    fleet.version += 1
    raw = stored(resource_slice("n", *devices))
    raw["metadata"] |= {"resourceVersion": str(fleet.version)}
    fleet.world.resource_slices.upsert(raw)


def test_a_device_that_its_driver_drops_stays_out_of_use_while_the_cluster_has_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(0, monkeypatch)
    fleet.quarantined(0, "Quarantined")
    publish(fleet, *DEVICES[1:])
    for _ in range(4):  # its signal is gone, and its time of ten minutes passes
        fleet.now += timedelta(minutes=6)
        fleet.write_plan()
    assert [each.unit.device for each in fleet.decide().quarantined] == [f"gpu.test/n/{DEVICES[0]}"]
    publish(fleet, *DEVICES)
    assert [each.state for each in fleet.decide().quarantined] == ["Probation"], "it is tested before it is free"


def test_an_idle_device_with_a_taint_is_not_the_last_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(0, monkeypatch)
    publish(fleet, "gpu-0!", "gpu-1")
    for _ in range(5):
        fleet.decide()
        fleet.now += timedelta(seconds=5)
    plan = fleet.decide()
    assert [each.unit.device for each in plan.quarantined] == ["gpu.test/n/gpu-0"]
    assert not plan.withheld
