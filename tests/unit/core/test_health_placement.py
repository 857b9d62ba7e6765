"""What is out of use is not placed on, what runs there is replaced, and `why` says so."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.core.health import HealthPlan, HealthSignal, Quarantine, Unit, Withheld
from shoal.core.layers.causes import causes
from shoal.core.layers.types import Explanation, WhyPod, WhySnapshot
from shoal.core.placement import Candidate, ClassSupply, Demand, Held, NodeSupply, ReplicaState, plan
from shoal.core.placement.types import BROKEN
from shoal.core.status import healthstatus
from shoal.kube import layerviews
from shoal.manifests.devices import claim_template, selectors
from shoal.manifests.shape import VariantShape
from tests.unit.manifests.test_manifests_devices import shape

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
SINCE = datetime(2026, 11, 26, 11, 50, tzinfo=UTC)


def out(device: str = "", **more: Any) -> Quarantine:
    return Quarantine(Unit("a", device), "GPUFellOffBus", "condition XIDErrors is True: Xid 79", SINCE, **more)


def test_the_status_says_what_stands_and_is_read_as_it_was_written() -> None:
    entries = (out(), out("gpu.test/a/gpu-0", state="Probation", times=3, by="Shoal", model="chat/llama"))
    given = GPUClass.model_validate(
        {
            "metadata": {"name": "h100"},
            "spec": {"nodeSelector": {"a": "b"}, "memoryPerGPU": "80Gi"},
            "status": {
                "quarantined": [
                    each.model_dump(mode="json", by_alias=True)
                    for each in healthstatus.shown(entries, {"gpu.test/a/gpu-0": "GPU-1"})
                ]
            },
        }
    )
    assert healthstatus.stored(given) == entries
    assert healthstatus.out_of_use(given) == {Unit("a")}, "on probation it is in use"


def test_the_condition_names_what_is_out_and_what_should_be() -> None:
    assert healthstatus.condition(HealthPlan(()), []) is None
    found = healthstatus.condition(HealthPlan((out(),)), [])
    assert found is not None
    assert (found.reason, found.status) == ("GPUsQuarantined", "False")
    withheld = Withheld(HealthSignal(Unit("b"), "GPUUnhealthy", "Xid 48"), "no GPU of the class would be left")
    found = healthstatus.condition(HealthPlan((out(),), (withheld,)), ["the annotation shoal.dev/cordon is not JSON"])
    assert found is not None
    assert found.reason == "QuarantineWithheld"
    assert found.message == (
        "node b stays in use, since no GPU of the class would be left (GPUUnhealthy: Xid 48); the annotation "
        "shoal.dev/cordon is not JSON; node a is out of use (GPUFellOffBus: condition XIDErrors is True: Xid 79)"
    )


def test_the_condition_says_once_that_a_gpu_on_probation_stays_in_use() -> None:
    withheld = Withheld(HealthSignal(Unit("a"), "ReplicaAnswersDiffer", "a replica there failed its test"), "2 of 8")
    found = healthstatus.condition(HealthPlan((out(state="Probation"),), (withheld,)), [])
    assert found is not None
    assert (found.reason, found.message) == (
        "QuarantineWithheld",
        "node a stays in use, since 2 of 8 (ReplicaAnswersDiffer: a replica there failed its test)",
    )


def test_of_a_node_with_one_broken_gpu_only_the_replica_that_has_it_is_replaced() -> None:
    state = ReplicaState(8, 1, {"a": Held(7, 7), f"a{BROKEN}": Held(1, 1)}, pods=8)
    demand = Demand("chat/llama", "u", 8, [Candidate("h100", 1)], replica_states={"h100": state})
    supply = ClassSupply("h100", [NodeSupply("a", free=-1, allocatable=7), NodeSupply("b", free=8, allocatable=8)])
    found = plan([demand], [supply])["u"]
    [variant] = found.variants
    assert variant.replicas == 9, "one more, until it is ready: not two"
    ready = ReplicaState(9, 1, {"a": Held(7, 7), f"a{BROKEN}": Held(1, 1), "b": Held(1, 1)}, pods=9)
    demand = Demand("chat/llama", "u", 8, [Candidate("h100", 1)], replica_states={"h100": ready})
    supply = ClassSupply("h100", [NodeSupply("a", free=-1, allocatable=7), NodeSupply("b", free=7, allocatable=8)])
    [variant] = plan([demand], [supply])["u"].variants
    assert variant.replicas == 8
    assert variant.forced == ((f"a{BROKEN}", 1),), "and it is that one"


class Replicas:
    """A Deployment of a Model that wants two replicas; both are on node `sick`, which is out of use. Pods go as
    Kubernetes' ReplicaSets choose them: not bound, then not ready, then by the deletion cost that plans set."""

    def __init__(self) -> None:
        self.replicas, self.ready, self.starting, self.sick, self.pending = 2, 0, 0, 2, 0
        self.asked = [2]

    def plan(self) -> None:
        others = {f"n{i}": Held(1, i < self.ready) for i in range(self.ready + self.starting)}
        held = others | ({"sick": Held(self.sick, self.sick)} if self.sick else {})
        pods = self.ready + self.starting + self.sick + self.pending
        demand = Demand("storm/steady", "u", 2, [Candidate("l40s", 1)],
                        replica_states={"l40s": ReplicaState(self.replicas, 1, held, pods=pods)})  # fmt: skip
        nodes = [NodeSupply(f"n{i}", free=int(f"n{i}" not in others), allocatable=1) for i in range(6)]
        [variant] = plan([demand], [ClassSupply("l40s", nodes)])["u"].variants
        leaving = dict(variant.leaving)
        self.replicas = variant.replicas
        if self.asked[-1] != self.replicas:
            self.asked.append(self.replicas)
        for _ in range(self.ready + self.starting + self.sick + self.pending - self.replicas):
            if self.pending:
                self.pending -= 1
            elif self.starting:
                self.starting -= 1
            elif leaving.get("sick"):
                leaving["sick"] -= 1
                self.sick -= 1
            else:
                self.ready -= 1
        self.pending += max(0, self.replicas - self.ready - self.starting - self.sick - self.pending)

    def bind(self) -> None:
        self.starting, self.pending = self.starting + self.pending, 0


def test_a_replacement_that_starts_does_not_go_instead_of_the_replica_that_it_replaces() -> None:
    """A Model went 4, 3, 4 replicas without end: one of two replacements was ready, the Deployment shrank,
    and the ReplicaSet deleted the other one, which was not ready yet."""
    seen = Replicas()
    seen.plan()
    assert seen.replicas == 4, "two replacements first"
    seen.bind()
    seen.starting, seen.ready = 1, 1
    for _ in range(20):
        seen.plan()
        seen.bind()
        assert seen.starting == 1, "it goes on starting"
        assert seen.ready + seen.sick >= 2
    seen.starting, seen.ready = 0, 2
    seen.plan()
    assert (seen.ready, seen.sick) == (2, 0), "then both go whose place is taken"
    assert seen.asked == [2, 4, 2]


def with_status(given: VariantShape, *quarantined: JsonObject) -> VariantShape:
    entries = [
        {"node": "a", "state": "Quarantined", "reason": "R", "message": "", "by": "Shoal", "times": 1,
         "since": "2026-11-26T00:00:00Z"} | each
        for each in quarantined
    ]  # fmt: skip
    raw = given.gpu_class.model_dump(mode="json", by_alias=True, exclude_none=True)
    changed = GPUClass.model_validate(raw | {"status": {"quarantined": entries}})
    return VariantShape(given.model, changed, given.gpus, given.version, given.config, given.install_key)


def test_claims_leave_devices_out_that_are_out_of_use_under_the_same_name() -> None:
    plain = claim_template(shape("true"))
    less = claim_template(
        with_status(
            shape("true"),
            {"device": "gpu.test/a/gpu-0", "uuid": "GPU-0"},
            {"device": "gpu.test/b/gpu-0", "uuid": "GPU-1", "state": "Probation"},
            {"device": "gpu.test/b/gpu-2"},
            {"uuid": "GPU-3"},
        )
    )
    assert plain is not None
    assert less is not None
    assert plain["metadata"]["name"] == less["metadata"]["name"], "no Deployment is rolled"
    assert selectors(less) == [
        {"cel": {"expression": "true"}},
        {"cel": {"expression": 'device.driver != "gpu.test" || '
                               '!(device.attributes["gpu.test"].?uuid.orValue("") in ["GPU-0"])'}},
    ]  # fmt: skip


@pytest.mark.parametrize("uuid", ['"] || true || "', "a" * 300, "GPU\n0"])
def test_what_a_driver_calls_a_device_does_not_become_an_expression(uuid: str) -> None:
    plain = claim_template(shape("true"))
    if len(uuid) < 254:
        assert claim_template(with_status(shape("true"), {"device": "gpu.test/a/x", "uuid": uuid})) == plain


def view(*entries: JsonObject) -> Any:
    raw = {
        "metadata": {"name": "h100", "generation": 1},
        "spec": {"nodeSelector": {"gpu": "h100"}},
        "status": {
            "observedGeneration": 1,
            "conditions": [{"type": "Ready", "status": "True", "reason": "NodesFound", "message": "2 nodes"}],
            "quarantined": list(entries),
        },
    }
    return layerviews.shoal_object("class", raw)


SICK: JsonObject = {
    "node": "a", "state": "Quarantined", "reason": "GPUFellOffBus", "message": "condition XIDErrors is True: Xid 79",
    "by": "Shoal", "times": 1, "since": "2026-11-26T11:50:00Z",
}  # fmt: skip


def pod(node: str) -> WhyPod:
    raw = {
        "metadata": {"namespace": "chat", "name": f"llama-{node}"},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    return layerviews.pod(raw)


def of_pod(node: str, *entries: JsonObject) -> Explanation:
    return causes(WhySnapshot("pod", f"chat/llama-{node}", related=(view(*entries),), pods=(pod(node),)), NOW)


def test_why_names_the_gpu_its_layer_and_what_was_tried() -> None:
    [cause] = of_pod("a", SICK).causes
    assert (cause.reason, cause.layer.value, cause.state) == ("GPUFellOffBus", "L0", "fault")
    assert "the GPUs of node a are out of use (GPUFellOffBus)" in cause.message
    assert cause.evidence[0].age_seconds == 600
    assert any("starts a replacement for chat/llama-a" in tried for tried in cause.tried)
    assert not of_pod("b", SICK).causes, "another node's GPUs are not this pod's matter"


def test_once_it_is_replaced_it_is_a_note_and_the_model_is_well() -> None:
    [cause] = causes(WhySnapshot("model", "chat/llama", related=(view(SICK),), pods=(pod("b"),)), NOW).causes
    assert (cause.reason, cause.state) == ("GPUsQuarantined", "note")
    assert "uncordon" in cause.do


@pytest.mark.parametrize("entry", [{}, {"node": 7}, {"since": "soon"}, {"reason": "Made\x1b[31mUp"}])
def test_a_status_that_others_wrote_is_no_error(entry: JsonObject) -> None:
    assert all("\x1b" not in cause.message for cause in of_pod("a", SICK | entry).causes)
