"""What Prometheus sees of the fleet through the operator that leads."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.metrics import EventMetrics, ObjectMetrics
from shoal.controllers.triggers import subscribe
from shoal.core.scaling import ScalingDecision
from shoal.kube.store import Table
from tests.support.signals import FakeSignals, gateway_pod
from tests.unit.controllers.test_scale_writes import UID, Plane

BORN, READY = "2026-01-01T00:00:00Z", "2026-01-01T00:00:42Z"
LLAMA = {"model": "ns/chat"}
ON_L4 = {**LLAMA, "gpu_class": "l4"}


def engine_pod(name: str, *, ready: bool, was_ready: bool = False, deleting: bool = False) -> JsonObject:
    labels = {
        names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        names.LABEL_MODEL_UID: UID,
        names.LABEL_GPU_CLASS: "l4",
    }
    metadata: JsonObject = {
        "name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "labels": labels,
        "creationTimestamp": BORN,
    }  # fmt: skip
    if deleting:
        metadata["deletionTimestamp"] = READY
    since = READY if ready or was_ready else BORN
    conditions = [{"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": since}]
    container = {"name": names.CONTAINER_ENGINE, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    status = {"conditions": conditions, "startTime": BORN}
    return {"metadata": metadata, "spec": {"nodeName": "l4-0", "containers": [container]}, "status": status}


class Fleet:
    """One Model, one class of two GPUs at 0.43 an hour, one gateway, and what Prometheus sees of them."""

    def __init__(self) -> None:
        self.plane = Plane()
        self.world = self.plane.world
        self.signals = FakeSignals()
        self.leads = True
        self.now = 100.0
        self.wanted: int | None = 2
        self.version = 1
        self.registry = CollectorRegistry()
        gpus = FleetGPUs(self.world)
        subscribe(self.world.nodes, gpus.on_node)
        self.events = EventMetrics(self.world, self.registry, lambda: self.leads, lambda: self.now)
        subscribe(self.world.pods, gpus.on_pod, self.events.on_pod)
        subscribe(self.world.models, self.events.on_model)
        self.registry.register(ObjectMetrics(self.world, gpus, self.signals, lambda _: self.wanted, lambda: self.leads))
        pod = gateway_pod()
        pod["metadata"] |= {"uid": "g", "resourceVersion": "1"}
        self.world.pods.upsert(pod)

    def pod(self, name: str, **changes: Any) -> None:
        self.version += 1
        raw = engine_pod(name, **changes)
        raw["metadata"]["resourceVersion"] = str(self.version)
        self.world.pods.upsert(raw)

    def status(self, **status: Any) -> None:
        raw = self.plane.model.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        self.world.models.upsert({**raw, "status": status})

    def decide(self, before: int, wanted: int, reason: str = reasons.SCALING_UP) -> None:
        self.events.decided(self.plane.model, ScalingDecision(wanted, before, reason, "why"), before)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_replicas_are_told_by_what_becomes_of_them(fleet: Fleet) -> None:
    fleet.status(variants=[{"class": "l4", "desired": 2, "waiting": 1}])
    fleet.pod("a", ready=True)
    fleet.pod("b", ready=False)
    fleet.pod("c", ready=True, deleting=True)
    states = {
        state: fleet.value("shoal_model_replicas", **ON_L4, state=state)
        for state in ("desired", "waiting", "starting", "ready", "draining")
    }
    assert states == {"desired": 2, "waiting": 1, "starting": 1, "ready": 1, "draining": 1}
    assert fleet.value("shoal_model_replicas_wanted", **LLAMA) == 2
    assert fleet.value("shoal_model_replicas_min", **LLAMA) == 0
    assert fleet.value("shoal_model_replicas_max", **LLAMA) is None  # there is no bound


def test_a_number_that_nobody_decided_yet_is_not_zero(fleet: Fleet) -> None:
    fleet.wanted = None
    assert fleet.value("shoal_model_replicas_wanted", **LLAMA) is None


def test_gpus_and_what_they_cost_with_those_that_are_given_back_only_later(fleet: Fleet) -> None:
    fleet.pod("a", ready=True)
    fleet.pod("b", ready=True, deleting=True)
    assert fleet.value("shoal_model_gpus", **ON_L4) == 2
    assert fleet.value("shoal_model_hourly_cost", **ON_L4, currency="USD") == pytest.approx(0.86)
    assert fleet.value("shoal_gpu_class_hourly_cost", gpu_class="l4", currency="USD") == pytest.approx(0.43)
    counts = {s: fleet.value("shoal_gpu_class_gpus", gpu_class="l4", state=s) for s in ("capacity", "free")}
    assert counts == {"capacity": 2, "free": 0}


def test_a_silent_replica_is_a_stale_signal_source(fleet: Fleet) -> None:
    fleet.pod("a", ready=True)
    fleet.pod("b", ready=True)
    fleet.pod("c", ready=False)  # never was ready: nobody waits for its word
    fleet.signals.silent = {"b"}
    sources = {
        (kind, state): fleet.value("shoal_model_signal_sources", **LLAMA, kind=kind, state=state)
        for kind in ("replica", "gateway")
        for state in ("live", "stale")
    }
    assert sources == {("replica", "live"): 1, ("replica", "stale"): 1, ("gateway", "live"): 1, ("gateway", "stale"): 0}


def test_conditions_have_their_reasons_and_no_words(fleet: Fleet) -> None:
    condition = {"type": "Placed", "status": "False", "reason": reasons.NO_CAPACITY, "message": "secret sk-1"}
    fleet.status(conditions=[{**condition, "lastTransitionTime": BORN}])
    labels = {**LLAMA, "type": "Placed", "status": "False", "reason": "NoCapacity", "layer": "control"}
    assert fleet.value("shoal_model_condition", **labels) == 1
    samples = [s for family in fleet.registry.collect() for s in family.samples]
    assert not [s for s in samples if "sk-1" in str(s)]


def conditions(kind: str, status: str, reason: str) -> JsonObject:
    return {"conditions": [
        {"type": kind, "status": status, "reason": reason, "message": "secret sk-1", "lastTransitionTime": BORN}
    ]}  # fmt: skip


def test_conditions_of_every_kind_have_the_layer_of_their_reason(fleet: Fleet) -> None:
    def add(table: Table[Any], name: str, status: JsonObject, **spec: Any) -> None:
        metadata = {"name": name, "uid": name, "resourceVersion": "1", "creationTimestamp": BORN}
        table.upsert({"metadata": metadata, "spec": spec, "status": status})

    def add_in(table: Table[Any], namespace: str, name: str, status: JsonObject, **spec: Any) -> None:
        metadata = {"name": name, "namespace": namespace, "uid": f"{namespace}/{name}", "resourceVersion": "1"}
        table.upsert({"metadata": {**metadata, "creationTimestamp": BORN}, "spec": spec, "status": status})

    world = fleet.world
    selector = {"matchLabels": {"gpu": "h100"}}
    add(
        world.classes,
        "h100",
        conditions("Ready", "False", reasons.NO_NODES),
        memoryPerGPU="80Gi",
        nodeSelector=selector,
    )
    for name in ("acme", "umbrella"):
        add(world.tenants, name, conditions("Ready", "False", reasons.NO_USABLE_KEY))
    add(world.tenants, "initech", conditions("Ready", "True", reasons.ACTIVE))
    add_in(world.pools, "ns", "lora", conditions("Ready", "False", reasons.PENDING), modelRef={"name": "chat"})
    bad = conditions("Ready", "False", reasons.RANK_TOO_HIGH)
    for name in ("a", "b"):
        add_in(world.adapters, "ns", name, bad, poolRef={"name": "lora"}, tenants=["*"], source={"uri": "hf://acme/a"})
    add_in(
        world.adapters,
        "ns",
        "c",
        bad,
        poolRef={"name": "a-name-of-a-client"},
        tenants=["*"],
        source={"uri": "hf://acme/a"},
    )
    add_in(world.routes, "ns", "r", conditions("Ready", "False", "OfAnotherVersion"), unknown="Invalid here")
    route = world.routes.get("ns/r")
    assert route is not None
    assert route.object is None, "this version refuses it, and its condition is shown"

    ready = {"type": "Ready", "status": "False"}
    found = {
        (each.name, each.labels.get("gpu_class") or each.labels.get("pool") or each.labels.get("route") or ""): each
        for family in fleet.registry.collect()
        if family.name.endswith(("_condition", "_conditions"))
        for each in family.samples
        if each.labels["status"] == "False"
    }
    assert {key: (sample.value, sample.labels["reason"], sample.labels["layer"]) for key, sample in found.items()} == {
        ("shoal_gpu_class_condition", "h100"): (1, "NoNodes", "L2"),
        ("shoal_tenant_conditions", ""): (2, "NoUsableKey", "L6"),
        ("shoal_lora_pool_condition", "ns/lora"): (1, "Pending", "control"),
        ("shoal_lora_adapter_conditions", "ns/lora"): (2, "RankTooHigh", "L2.5"),
        ("shoal_lora_adapter_conditions", ""): (1, "RankTooHigh", "L2.5"),
        ("shoal_model_route_condition", "ns/r"): (1, "OfAnotherVersion", ""),
    }
    assert all(ready.items() <= sample.labels.items() for sample in found.values())
    assert fleet.value("shoal_tenant_conditions", type="Ready", status="True", reason="Active", layer="L6") == 1


def test_the_longest_stage_of_cold_starts_is_the_one_that_the_advice_names(fleet: Fleet) -> None:
    def longest() -> dict[str, float]:
        family = next(f for f in fleet.registry.collect() if f.name == "shoal_model_cold_start_longest_stage_seconds")
        return {
            sample.labels["stage"]: sample.value for sample in family.samples if ON_L4.items() <= sample.labels.items()
        }

    def measured(**median: int) -> None:
        last = {"schedule": 1, "pull": 90, "fetch": 1, "load": 1}
        start = {"last": last, "median": {"schedule": 1, "pull": 2, "fetch": 1, "load": 4} | median, "starts": 3}
        fleet.status(variants=[{"class": "l4", "coldStart": start}])

    measured(fetch=70)
    assert longest() == {"fetch": 70}
    measured(load=70, graphCapture=50)
    assert longest() == {"graph_capture": 50}
    measured()
    assert longest() == {}, "a short start needs no advice"


def test_an_operator_that_does_not_lead_shows_nothing_of_the_fleet(fleet: Fleet) -> None:
    fleet.pod("a", ready=True)
    fleet.leads = False
    assert [f.name for f in fleet.registry.collect() if f.name.startswith(("shoal_model_rep", "shoal_gpu"))] == []
    fleet.pod("b", ready=False)
    fleet.pod("b", ready=True)
    assert fleet.value("shoal_model_cold_start_seconds_count", **ON_L4) is None


def test_a_wake_lasts_from_the_decision_to_the_first_ready_replica(fleet: Fleet) -> None:
    fleet.decide(0, 2, reasons.WAKING)
    fleet.now += 7
    for name in ("a", "b"):
        fleet.pod(name, ready=False)
        fleet.pod(name, ready=True)
        fleet.now += 60
    assert fleet.value("shoal_model_wake_seconds_count", **LLAMA) == 1
    assert fleet.value("shoal_model_wake_seconds_sum", **LLAMA) == 7
    assert fleet.value("shoal_model_cold_start_seconds_count", **ON_L4) == 2
    assert fleet.value("shoal_model_cold_start_seconds_sum", **ON_L4) == 84
    assert fleet.value("shoal_model_decisions_total", **LLAMA, direction="up", reason="Waking", layer="control") == 1


def test_a_wake_and_a_cold_start_are_shown_before_they_end(fleet: Fleet) -> None:
    """An increase over a time does not see what a series begins with."""
    fleet.decide(0, 1, reasons.WAKING)
    fleet.pod("a", ready=False)
    assert fleet.value("shoal_model_wake_seconds_count", **LLAMA) == 0
    assert fleet.value("shoal_model_cold_start_seconds_count", **ON_L4) == 0


def test_stages_that_no_pod_tells_are_counted_when_they_are_learned(fleet: Fleet) -> None:
    series = {stage: {**ON_L4, "stage": stage} for stage in ("load", "graph_capture", "first_token")}
    name = "shoal_model_cold_start_stage_seconds"
    fleet.pod("a", ready=False)
    assert {stage: fleet.value(f"{name}_count", **of) for stage, of in series.items()} == dict.fromkeys(series, 0)
    fleet.pod("a", ready=True)
    fleet.events.learned(UID, "l4", "first_token", 2.5)
    assert fleet.value(f"{name}_sum", **series["first_token"]) == 2.5
    assert fleet.value(f"{name}_count", **series["graph_capture"]) == 0, "unknown is no observation"
    fleet.events.learned("of a Model that is gone", "l4", "first_token", 2.5)
    fleet.leads = False
    fleet.events.learned(UID, "l4", "first_token", 2.5)
    assert fleet.value(f"{name}_count", **series["first_token"]) == 1


def test_a_wake_that_was_called_off_is_none(fleet: Fleet) -> None:
    fleet.decide(0, 1, reasons.WAKING)
    fleet.decide(1, 0, reasons.SCALED_TO_ZERO)
    fleet.pod("a", ready=False)
    fleet.pod("a", ready=True)
    assert fleet.value("shoal_model_wake_seconds_count", **LLAMA) == 0


def test_more_replicas_of_a_model_that_serves_are_no_wake(fleet: Fleet) -> None:
    fleet.decide(1, 2)
    fleet.pod("a", ready=False)
    fleet.pod("a", ready=True)
    assert fleet.value("shoal_model_wake_seconds_count", **LLAMA) is None


def test_a_replica_that_is_ready_again_did_not_start_cold(fleet: Fleet) -> None:
    fleet.pod("a", ready=False)
    fleet.pod("a", ready=True)
    fleet.pod("a", ready=False, was_ready=True)
    fleet.pod("a", ready=True)
    assert fleet.value("shoal_model_cold_start_seconds_count", **ON_L4) == 1


def test_series_go_with_their_model(fleet: Fleet) -> None:
    fleet.decide(0, 1, reasons.WAKING)
    fleet.pod("a", ready=False)
    fleet.pod("a", ready=True)
    fleet.world.models.remove("ns/chat")
    samples = [s for family in fleet.registry.collect() for s in family.samples]
    assert not [s for s in samples if s.labels.get("model") == "ns/chat"]
