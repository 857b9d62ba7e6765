"""Pods that pass themselves off as replicas, on a real API server: nobody tells them a key, and nobody believes them.

The admission policy is not installed here, but where a test says so: it would refuse most of them
(tests/e2e/test_policies.py).
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.agent.stream import AgentStream
from shoal.api import keys, names
from shoal.api.meta import JsonObject
from shoal.core.ownership import OwnershipVerdict
from shoal.gateway.process import GatewayProcess
from shoal.gateway.settings import GatewaySettings
from shoal.kube import ownership
from shoal.kube.resources import DEPLOYMENTS, EVENTS, MODELS, NAMESPACES, PODS, REPLICASETS
from shoal.ledger.reconcile.watch import Reconciler
from shoal.ledger.store import LedgerStore
from shoal.net.installkey import KeyRing
from shoal.runtime.operator import OperatorProcess
from tests.support.addresses import pod_ip
from tests.support.controlplane import Fleet
from tests.support.operators import NAMESPACE, eventually, model, model_with, running_operator
from tests.support.rolekeys import give
from tests.support.signals import IDLE, gateway_pod
from tests.support.streams import ToldGateway, agent, told_gateway, until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
]

GATEWAY_IP, ENGINE_IP, ROGUE_IP = pod_ip(4), pod_ip(5), pod_ip(6)
ELSEWHERE = "ns-of-somebody-else"


class Listener:
    """Listens at the rogues' address on the agents' and the engines' port, and notes what it is told."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    async def _handle(self, request: web.Request) -> web.Response:
        self.told.add(request.headers.get("authorization", ""))
        return web.json_response({}, status=503)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            for port in (names.AGENT_PORT, names.ENGINE_PORT):
                await web.TCPSite(runner, ROGUE_IP, port).start()
            yield
        finally:
            await runner.cleanup()


class Cluster:
    """An operator, a gateway and a ledger, a Model with one replica, and a listener for rogues."""

    def __init__(
        self, fleet: Fleet, operator: OperatorProcess, gateway: GatewayProcess, ledger: Reconciler, listener: Listener
    ):
        self.fleet, self.operator, self.gateway, self.ledger = fleet, operator, gateway, ledger
        self.listener, self.model_uid, self.labels = listener, "", dict[str, str]()

    async def replicas(self) -> int:
        found = await self.fleet.client.get(DEPLOYMENTS, "chat-l4", self.fleet.namespace)
        return found["spec"]["replicas"]

    def key(self, role: keys.Role) -> str:
        assert self.operator.install.keys is not None
        return self.operator.install.keys.current.bearer_for(role, self.model_uid)

    @property
    def rogues(self) -> list[int]:
        """As each of the three counts them."""
        parts = (self.operator.world.ownership, self.gateway.pods.ownership, self.ledger.pods.ownership)
        return [part.rogue for part in parts]

    async def forge(self) -> int:
        """Makes the rogues; returns how many pods that are."""
        client, ns = self.fleet.client, self.fleet.namespace
        (replica,) = [o async for o in client.list(PODS, namespace=ns, label_selector=ownership.ENGINES)]
        self.labels = dict(replica["metadata"]["labels"])
        (owner,) = replica["metadata"]["ownerReferences"]
        deployment = await client.get(DEPLOYMENTS, "chat-l4", ns)
        above = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-l4", "controller": True}
        above["uid"] = deployment["metadata"]["uid"]
        hashless = {k: v for k, v in self.labels.items() if k != "pod-template-hash"}
        annotations = {names.ANNOTATION_INSTALL_KEY: replica["metadata"]["annotations"][names.ANNOTATION_INSTALL_KEY]}
        self.fleet.kubelet.pod_ips = repeat(ROGUE_IP)

        def pod(name: str, namespace: str, labels: dict[str, str], **metadata: Any) -> JsonObject:
            given = {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations, **metadata}
            return {"apiVersion": "v1", "kind": "Pod", "metadata": given, "spec": _SPEC}

        forged = [
            pod("labels-only", ns, hashless),
            pod("labels-only", ELSEWHERE, self.labels),
            pod("owned-by-the-deployment", ns, hashless, ownerReferences=[above]),
            pod("owned-by-the-model", ns, hashless, ownerReferences=deployment["metadata"]["ownerReferences"]),
            pod("another-model", ns, hashless | {names.LABEL_MODEL: "other"}, ownerReferences=[owner]),
        ]
        for each in forged:
            await client.apply(PODS, each, manager="person")
        for namespace in (ns, ELSEWHERE):
            template = {"metadata": {"labels": hashless | {"mine": "yes"}, "annotations": annotations}, "spec": _SPEC}
            body = {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {"name": "forged", "namespace": namespace, "labels": {**ENGINE, "mine": "yes"}},
                "spec": {"replicas": 1, "selector": {"matchLabels": {"mine": "yes"}}, "template": template},
            }
            await client.apply(REPLICASETS, body, manager="person")
        return len(forged) + 2

    async def clear(self) -> None:
        """Takes the rogues away, which nobody else owns."""
        client = self.fleet.client
        for namespace in (self.fleet.namespace, ELSEWHERE):
            await client.delete(REPLICASETS, "forged", namespace)
            for pod in [o async for o in client.list(PODS, namespace=namespace)]:
                await client.delete(PODS, pod["metadata"]["name"], namespace)


ENGINE = {
    names.LABEL_MANAGED_BY: names.MANAGED_BY,
    names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
    names.LABEL_MODEL: "chat",
}
_SPEC = {"containers": [{"name": "engine", "image": "mine"}], "terminationGracePeriodSeconds": 0}


@contextlib.asynccontextmanager
async def cluster(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Cluster]:
    monkeypatch.setattr("shoal.ledger.reconcile.watch.ROUND_SECONDS", 0.2)
    client, ns = fleet.client, fleet.namespace
    await client.apply(
        NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ELSEWHERE}}, manager="test"
    )
    hub, listener = AgentStream(), Listener()
    hub.update(IDLE)
    for role in keys.BUNDLES:
        (tmp_path / role).mkdir()
    settings = GatewaySettings(
        host="127.0.0.1", port=0, ops_host="127.0.0.1", ops_port=0, settle_seconds=0.0, pod_namespace=NAMESPACE,
        keys_dir=tmp_path / "gateway", spool_dir=tmp_path / "spool", log_dir=tmp_path / "logs",
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        said: ToldGateway = await stack.enter_async_context(told_gateway(GATEWAY_IP, names.OPS_PORT))
        await stack.enter_async_context(agent(hub, ENGINE_IP, names.AGENT_PORT))
        await stack.enter_async_context(listener.listening())
        operator = await stack.enter_async_context(running_operator(client, fleet.kubeconfig))
        await until(lambda: operator.install.keys is not None, 60)
        assert operator.install.keys is not None
        root = operator.install.keys.current.value
        said.ring.known = (root,)
        for role in keys.BUNDLES:
            give(tmp_path / role, root, role)
        fleet.kubelet.pod_ips = repeat(GATEWAY_IP)
        await client.apply(PODS, gateway_pod(), manager="person")
        await eventually(
            lambda: client.get(PODS, "shoal-gateway-0", NAMESPACE), lambda p: p["status"].get("podIP") == GATEWAY_IP
        )
        fleet.kubelet.pod_ips = repeat(ENGINE_IP)
        store = LedgerStore(f"sqlite:///{tmp_path}/ledger.sqlite")
        store.start()
        stack.push_async_callback(store.stop)
        ring = KeyRing(tmp_path / "ledger")
        ring.refresh()
        ledger, gateway = Reconciler(client, ring, store), GatewayProcess(settings, client)
        listening = asyncio.create_task(ledger.run())
        serving = asyncio.create_task(gateway.run())
        stack.push_async_callback(asyncio.wait, [listening, serving])
        stack.callback(listening.cancel)
        stack.callback(gateway.stop)
        it = Cluster(fleet, operator, gateway, ledger, listener)
        await fleet.apply(model("chat", ns, scaling={"minReplicas": 1, "idleSeconds": 2, "stabilizationSeconds": 1}))
        await model_with(client, ns, "chat", "Ready", "True")
        it.model_uid = (await client.get(MODELS, "chat", ns))["metadata"]["uid"]
        await until(lambda: hub.readers == 3, 60)  # operator, gateway and ledger hear the replica
        try:
            yield it
        finally:
            await it.clear()


async def test_a_pod_that_is_not_ours_gets_no_key_and_is_no_signal_source(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "GRACE_SECONDS", 1.0)
    client, ns = fleet.client, fleet.namespace
    async with cluster(fleet, tmp_path, monkeypatch) as it:
        await it.forge()
        # A pod in another namespace with an owner that is not there is taken away by the garbage collector.
        await until(lambda: min(it.rogues) >= 6, 60)
        await asyncio.sleep(3)  # a listener connects at once; after a refusal in a second
        assert it.listener.told == set()
        assert await it.replicas() == 1
        assert len(it.operator.world.pods.by("model", it.model_uid)) == 1
        assert [pod.name for pods in it.gateway.directory.snapshot.replicas.values() for pod in pods] != []
        assert sum(map(len, it.gateway.directory.snapshot.replicas.values())) == 1

        async def notes() -> str:
            found = [o async for o in client.list(EVENTS, namespace=ns)]
            return "\n".join(o["note"] for o in found if o["reason"] == "RoguePod")

        await eventually(notes, lambda text: f"pod {ns}/labels-only has the labels" in text, what="an event")
        # They are silent, and hold nothing up.
        await fleet.apply(model("chat", ns, scaling={"idleSeconds": 2, "stabilizationSeconds": 1}))
        await eventually(it.replicas, lambda n: n == 0, what="zero replicas")
        assert it.listener.told == set()


async def test_without_the_chain_of_owners_a_label_is_told_every_key(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before this one can fail."""
    monkeypatch.setattr(ownership, "verdict", lambda *_: OwnershipVerdict("proven"))
    async with cluster(fleet, tmp_path, monkeypatch) as it:
        await it.forge()
        roles: tuple[keys.Role, ...] = ("gateway", "operator", "ledger")
        await until(lambda: it.listener.told >= {f"Bearer {it.key(role)}" for role in roles}, 60)


# --- adoption -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def children_guarded(fleet: Fleet) -> AsyncGenerator[None]:
    """With the admission policy `shoal-children`. The operator of these tests is whoever the kubeconfig names."""
    kubectl = fleet.plane.run_kubectl
    operator = kubectl("auth", "whoami", "-o=jsonpath={.status.userInfo.username}").strip()
    policy = CHILDREN.read_text().replace(f"system:serviceaccount:{NAMESPACE}:shoal-operator", operator)
    assert f"'{operator}'" in policy
    await asyncio.to_thread(kubectl, "apply", "-f", "-", stdin=policy)
    try:
        metadata = {"name": "probe", "namespace": fleet.namespace, "labels": ENGINE}
        probe: JsonObject = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _SPEC}
        # A policy takes a moment to act.
        await eventually(lambda: as_person(fleet, probe, "create", "--dry-run=server"), lambda said: REFUSED in said)
        yield
    finally:
        await asyncio.to_thread(kubectl, "delete", "-f", "-", stdin=policy)


CHILDREN = Path(__file__).parents[3] / "policies" / "admission" / "children.yaml"
REFUSED = "only Shoal's Deployments make such pods"


async def as_person(fleet: Fleet, obj: JsonObject, *command: str) -> str:
    """What kubectl says to somebody who may do anything."""
    who = ("--as=alice", "--as-group=system:masters")
    return await asyncio.to_thread(
        fleet.plane.run_kubectl, *command, *who, "-f", "-", stdin=json.dumps(obj), check=False
    )


async def adopted(it: Cluster) -> tuple[str, str]:
    """Somebody of the Model's namespace has a pod taken for a replica: made as one, or, once it runs, given the labels
    and the owner of one. Returns what they were told each time."""
    fleet, ns = it.fleet, it.fleet.namespace
    (replica,) = [o async for o in fleet.client.list(PODS, namespace=ns, label_selector=ownership.ENGINES)]
    copied = {key: replica["metadata"][key] for key in ("labels", "annotations", "ownerReferences")}
    # Of two pods a ReplicaSet ends the one that costs less.
    copied["annotations"] |= {"controller.kubernetes.io/pod-deletion-cost": "2147483647"}
    plain: JsonObject = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "mine", "namespace": ns}}
    fleet.kubelet.pod_ips = repeat(ROGUE_IP)
    made = await as_person(fleet, {**plain, "spec": _SPEC}, "create")
    assert "created" in made
    await eventually(
        lambda: fleet.client.get(PODS, "mine", ns), lambda pod: pod["status"].get("podIP") == ROGUE_IP, what="it runs"
    )
    forged = {**plain, "metadata": {"name": "forged", "namespace": ns, **copied}, "spec": _SPEC}
    at_once = await as_person(fleet, forged, "create")
    patch = json.dumps({"metadata": copied})
    later = await as_person(fleet, plain, "patch", "--type=merge", f"--patch={patch}")
    return at_once, later


async def test_nobody_in_the_models_namespace_has_a_pod_adopted(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(fleet, tmp_path, monkeypatch) as it, children_guarded(fleet):
        at_once, later = await adopted(it)
        assert REFUSED in at_once
        assert "may not be changed" in later
        await asyncio.sleep(3)  # a listener connects at once; after a refusal in a second
        assert it.listener.told == set()
        assert len(it.operator.world.pods.by("model", it.model_uid)) == 1


async def test_without_the_policy_such_a_pod_is_believed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain of owners is real then: nothing else stands between a namespace's user and its Models' traffic."""
    async with cluster(fleet, tmp_path, monkeypatch) as it:
        at_once, later = await adopted(it)
        assert "created" in at_once
        assert "patched" in later
        roles: tuple[keys.Role, ...] = ("gateway", "operator", "ledger")
        await until(lambda: it.listener.told >= {f"Bearer {it.key(role)}" for role in roles}, 60)
