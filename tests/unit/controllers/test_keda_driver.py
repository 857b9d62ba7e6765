"""In which order KEDA is told what, and what it is answered meanwhile."""

import hashlib
from typing import Any, cast

import pytest

from shoal.api import names, reasons
from shoal.api.config import KEDA, Scaling
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.children.replicas import ScaleWriter
from shoal.controllers.children.scaledobjects import ScaledObjectWriter
from shoal.controllers.keda.driver import Driver
from shoal.controllers.keda.targets import ScalerTargets
from shoal.controllers.state import FleetState
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.core.keda import ScalerAnswer
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound, ObjectInvalid, UnknownField, from_status
from shoal.kube.events import Recorder
from shoal.kube.resources import Resource
from shoal.manifests.keda import spelling
from tests.support.operators import CONFIG, model
from tests.unit.controllers.test_scale_writes import UID, deployment

KEY = ("ns", "chat-l4")
ADDRESS = "shoal-scaler.shoal-system.svc:9666"


class Server:
    """Takes what is applied, and notes it beside what KEDA would have been answered at that moment."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, JsonObject, int | None]] = []
        self.deleted: list[str] = []
        self.refuse: KubeError | None = None
        self.book: ScalerTargets | None = None

    async def get_metadata(self, *_: Any) -> JsonObject:
        raise NotFound("none", status=404)

    async def apply(self, resource: Resource, obj: JsonObject, **_: Any) -> JsonObject:
        if self.refuse is not None:
            raise self.refuse
        assert self.book is not None
        self.applied.append((resource.kind, obj, self.book.number(KEY)))
        version = str(len(self.applied) + 1)
        added = {"uid": f"uid-{resource.kind}", "resourceVersion": version, "generation": len(self.applied)}
        return obj | {"metadata": obj["metadata"] | added}

    async def delete(self, resource: Resource, name: str, *_: Any, **__: Any) -> None:
        self.deleted.append(f"{resource.kind} {name}")


class Endpoint:
    """Where KEDA is answered."""

    ca: str | None = None
    problem: str | None = None

    def need(self) -> None:
        """It listens all the time."""


class Rig:
    """A Model with one Deployment that KEDA has scaled so far."""

    def __init__(self, replicas: int, *, tls: bool = False) -> None:
        self.server, self.version = Server(), 0
        config = CONFIG.model_copy(update={"scaling": Scaling(driver="KEDA", keda=KEDA(tls=tls))})
        client = cast("KubeClient", self.server)
        self.world = World(client, config, "shoal-system", Recorder(client, "test"))
        self.stands(replicas)
        raw = model("chat", "ns")
        raw["metadata"] |= {"uid": UID, "resourceVersion": "1", "generation": 1}
        self.model = Model.model_validate(raw)
        self.world.models.upsert(raw)
        self.state, self.endpoint = FleetState(self.world), Endpoint()
        self.woken: list[str] = []
        targets = ScalerTargets(self.world, self.state.reservations, self.woken.append)
        self.driver = Driver(self.world, targets, self.endpoint, self.woken.append)
        self.scales = ScaleWriter(self.world, lambda _: None)
        self.writer = ScaledObjectWriter(self.world, self.state, self.scales, self.driver)
        subscribe(self.world.deployments, self.driver.on_deployment)
        subscribe(self.world.scaled_objects, self.driver.on_scaled)
        subscribe(self.world.trigger_authentications, self.driver.on_scaled)
        self.driver.kinds.installed = True
        self.server.book = self.driver.targets
        self.told: list[tuple[int, bool]] = []
        self.driver.targets.changed.append(self._changed)

    def builtin(self) -> None:
        """The driver is Shoal's own again."""
        raw = model("chat", "ns", scaling={"driver": "BuiltIn"})
        raw["metadata"] |= {"uid": UID}
        self.model = Model.model_validate(raw)

    def _changed(self, namespace: str, name: str) -> None:
        said = self.driver.targets.answer(namespace, name)
        if said is not None:
            self.told.append((said.replicas, said.above_zero))

    def stands(self, replicas: int) -> None:
        """What the Deployment asks for, as KEDA wrote it."""
        self.version += 1
        self.world.deployments.upsert(deployment(replicas, version=self.version, manager="keda"))

    async def scale(self, number: int) -> None:
        # As the Executor does it.
        if self.driver.is_out(self.model, "l4"):
            await self.scales.scale(self.model, "l4", lambda: number)
        else:
            await self.writer.scale(self.model, "l4", lambda: number)

    def bounds(self) -> list[tuple[int, int, int | None]]:
        """minReplicaCount, maxReplicaCount, and what was answered when they were applied."""
        return [
            (obj["spec"]["minReplicaCount"], obj["spec"]["maxReplicaCount"], answered)
            for kind, obj, answered in self.server.applied
            if kind == "ScaledObject"
        ]


async def test_the_bounds_allow_zero_before_zero_is_answered_and_not_longer() -> None:
    rig = Rig(1)
    await rig.scale(1)
    await rig.scale(0)
    assert rig.bounds() == [(1, 10, None), (0, 10, 1)]
    assert rig.driver.targets.answer(*KEY) == ScalerAnswer(False, 0, 0.0, 1.0, above_zero=True)
    rig.stands(0)
    await rig.scale(1)
    assert rig.bounds()[2:] == [(1, 10, 1)], "from zero the answer goes first: somebody waits"
    assert rig.told == [(1, True), (0, True), (0, False), (1, False)]
    rig.stands(1)
    assert rig.told[4:] == [(1, True)], "told once it stands, so that it is not pushed any more"


async def test_a_wake_is_told_before_anything_is_written() -> None:
    rig = Rig(0)
    await rig.scale(0)
    rig.told.clear()
    before = len(rig.server.applied)
    await rig.writer.wake(rig.model, "l4", lambda: 3)
    assert rig.told == [(3, False)]
    assert len(rig.server.applied) == before


async def test_an_api_server_without_tolerance_gets_the_number_as_bounds() -> None:
    rig = Rig(12)
    await rig.scale(12)
    assert rig.bounds() == [(12, 12, None)], "no HPA is known yet that is exact"
    hpa = {
        "metadata": {
            "name": "keda-hpa-chat-l4", "namespace": "ns", "uid": "h", "resourceVersion": "1",
            "ownerReferences": [{"kind": "ScaledObject", "uid": "uid-ScaledObject"}],
            "labels": {names.LABEL_MODEL_UID: UID},
        },
        "spec": {
            "scaleTargetRef": {"kind": "Deployment", "name": "chat-l4"},
            "behavior": {"scaleUp": {"tolerance": "0"}, "scaleDown": {"tolerance": "0"}},
        },
    }  # fmt: skip
    rig.world.autoscalers.upsert(hpa)
    await rig.scale(12)
    assert rig.bounds()[1:] == [(1, 12, 12)], "what stands is never above the maximum"


async def test_what_stands_is_not_written_again() -> None:
    rig = Rig(2)
    for _ in range(3):
        await rig.scale(2)
    assert len(rig.server.applied) == 1
    assert rig.told == [(2, True)]


async def test_keda_is_given_the_ca_and_trusts_a_public_one_without() -> None:
    rig = Rig(1, tls=True)
    await rig.writer.prepare(rig.model)
    await rig.scale(1)
    assert rig.server.applied == [], "no certificate yet: KEDA would call a closed port"
    rig.endpoint.ca = "PEM"
    for _ in range(2):
        await rig.writer.prepare(rig.model)
        await rig.scale(1)
    kinds = [kind for kind, _, _ in rig.server.applied]
    assert kinds == ["ConfigMap", "TriggerAuthentication", "ScaledObject"]
    config_map, authentication, scaled = (obj for _, obj, _ in rig.server.applied)
    assert config_map["data"] == {"ca.crt": "PEM"}
    found = authentication["spec"]["configMapTargetRef"]
    assert found == [{"parameter": "caCert", "name": "chat-scaler", "key": "ca.crt"}]
    trigger = scaled["spec"]["triggers"][0]
    assert trigger["authenticationRef"] == {"name": "chat-scaler"}
    said = {"scalerAddress": ADDRESS, "enableTLS": "true"}
    assert trigger["metadata"] == said | {"caSHA256": hashlib.sha256(b"PEM").hexdigest()[:16]}
    public = Rig(1, tls=True)
    public.endpoint.ca = ""
    await public.writer.prepare(public.model)
    await public.scale(1)
    assert [kind for kind, _, _ in public.server.applied] == ["ScaledObject"]


async def test_a_renewed_ca_reaches_keda_and_the_streams_that_it_has_open() -> None:
    rig = Rig(1, tls=True)
    for ca in ("one", "one", "two"):
        rig.endpoint.ca = ca
        await rig.writer.prepare(rig.model)
        await rig.scale(1)
    written = [(kind, obj) for kind, obj, _ in rig.server.applied if kind != "TriggerAuthentication"]
    assert [kind for kind, _ in written] == ["ConfigMap", "ScaledObject"] * 2, "first the CA: KEDA looks for it at once"
    assert [obj["data"]["ca.crt"] for kind, obj in written if kind == "ConfigMap"] == ["one", "two"]
    first, second = (obj["spec"]["triggers"] for kind, obj in written if kind == "ScaledObject")
    assert first != second, "KEDA opens its streams anew only for another spec"
    assert "two" not in str(second)


async def test_keda_that_hangs_in_a_connection_is_led_out_of_it_once() -> None:
    """The leader's node vanished: nothing ends KEDA's question to it, and the next leader is not asked."""
    rig, now = Rig(1), [0.0]
    rig.driver.targets.clock = lambda: now[0]
    woken = rig.woken

    async def look(*times: float) -> list[str]:
        """Where the ScaledObject says that the operator is, each time that it was written."""
        for at in times:
            now[0] = at
            rig.driver.conditions.sweep()
            await rig.scale(1)
        objects = [obj for kind, obj, _ in rig.server.applied if kind == "ScaledObject"]
        return [obj["spec"]["triggers"][0]["metadata"]["scalerAddress"] for obj in objects]

    await rig.scale(1)
    assert await look(0, 44) == [ADDRESS]
    woken.clear()
    now[0] = 50
    rig.driver.conditions.sweep()
    assert woken == [UID]
    # KEDA keeps a connection for each way of writing an address. Where it is away, no more is written.
    assert await look(51, 55, 300) == [ADDRESS, f"dns:///{ADDRESS}"]
    rig.driver.targets.polled(*KEY)
    assert len(await look(301)) == 2
    assert (await look(350))[2:] == [ADDRESS]


async def test_keda_that_is_paused_is_not_called() -> None:
    rig, now = Rig(1), [0.0]
    rig.driver.targets.clock = lambda: now[0]
    await rig.scale(1)
    _, applied, _ = rig.server.applied[0]
    paused = {"annotations": {"autoscaling.keda.sh/paused": "true"}, "resourceVersion": "9", "generation": 1}
    rig.world.scaled_objects.upsert(applied | {"metadata": applied["metadata"] | paused | {"uid": "uid-ScaledObject"}})
    for at in (0.0, 100.0, 200.0):
        now[0] = at
        rig.driver.conditions.sweep()
        await rig.scale(1)
    assert len(rig.server.applied) == 1


def test_an_address_with_a_resolver_of_its_own_is_left_as_it_is() -> None:
    assert [spelling("dns:///scaler.example:443", turn) for turn in (0, 1)] == ["dns:///scaler.example:443"] * 2


async def test_what_keda_was_given_is_taken_away_once_no_scaled_object_refers_to_it() -> None:
    rig = Rig(1, tls=True)
    rig.endpoint.ca = "PEM"
    await rig.writer.prepare(rig.model)
    await rig.scale(1)
    rig.builtin()
    await rig.writer.prepare(rig.model)
    assert rig.server.deleted == [], "its ScaledObject is still there"
    rig.world.scaled_objects.remove("ns/chat-l4")
    await rig.writer.prepare(rig.model)
    assert rig.server.deleted == ["ConfigMap chat-scaler", "TriggerAuthentication chat-scaler"]


async def test_back_to_builtin_keda_is_answered_until_it_has_let_go() -> None:
    rig = Rig(2)
    await rig.scale(2)
    rig.builtin()
    await rig.scale(3)
    assert rig.server.deleted == ["ScaledObject chat-l4"]
    answer = rig.driver.targets.answer(*KEY)
    assert answer is not None
    assert answer.replicas == 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            from_status(500, {"message": ".spec.x: field not declared in schema"}),
            ".spec.x: field not declared in schema; KEDA 2.18 or later is needed",
        ),
        (
            ObjectInvalid("the workload is already managed by the hpa mine"),
            "the workload is already managed by the hpa mine",
        ),
    ],
)
async def test_a_refused_scaled_object_is_told(error: KubeError, words: str) -> None:
    rig = Rig(2)
    rig.server.refuse = error
    await rig.scale(2)
    finding = rig.driver.conditions.finding(rig.model)
    assert finding is not None
    assert (finding.status, finding.reason) == ("False", reasons.SCALED_OBJECT_REFUSED)
    assert finding.message == f"the API server refuses ScaledObject chat-l4: {words}"
    assert rig.driver.conditions.refused(rig.model), "tried again"
    rig.server.refuse = None
    await rig.scale(2)
    assert not rig.driver.conditions.refused(rig.model)


def test_only_a_missing_field_is_called_so() -> None:
    assert not isinstance(from_status(500, {"message": "etcdserver: timeout"}), UnknownField)


async def test_a_new_term_answers_nothing_before_it_has_decided() -> None:
    rig = Rig(2)
    await rig.scale(2)
    assert {name: (r.replicas, r.gpus) for name, r in rig.state.reservations.of(UID, "keda").items()} == {"l4": (2, 1)}
    rig.driver.begin()
    assert rig.driver.targets.answer(*KEY) is None
    assert rig.state.reservations.of(UID, "keda") == {}


async def test_a_paused_model_is_answered_what_stands() -> None:
    rig = Rig(3)
    rig.driver.hold(rig.model)
    assert rig.told == [(3, True)]
    await rig.scale(2)
    rig.driver.hold(rig.model)
    assert rig.driver.targets.number(KEY) == 2, "what was decided before stays"


async def test_shoal_owns_no_replicas_of_such_a_deployment() -> None:
    rig = Rig(2)
    await rig.scale(5)
    assert [kind for kind, _, _ in rig.server.applied] == ["ScaledObject"], "no /scale, which this server has not"
