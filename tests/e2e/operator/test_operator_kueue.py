"""Models whose pods take the quota of a queue, by the real Kueue. Pods are bound by the real scheduler."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.main import main
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
from shoal.kube.resources import DEPLOYMENTS, LEASES, MODELS, PODS, PROVISIONINGREQUESTS
from tests.e2e.operator.test_operator_quota import QUOTAS, quota
from tests.e2e.operator.test_operator_rbac import NAMESPACE, service_account_kubeconfig
from tests.support.charts import rendered
from tests.support.controlplane import Fleet
from tests.support.kueue import (
    CHECK_CONFIGS,
    CHECKS,
    CLUSTER_QUEUES,
    FLAVORS,
    PRIORITIES,
    QUEUES,
    cluster_queue,
    flavor,
    local_queue,
    nodes_asked_for,
    running_kueue,
)
from tests.support.operators import condition, eventually, model, model_with, running_operator

pytestmark = [pytest.mark.kueue, pytest.mark.timeout(600)]


@pytest.fixture
async def queued(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet with a queue for one GPU."""
    with logged(fleet, tmp_path):
        await eventually(lambda: served(fleet), bool, what="Kueue's webhooks")
        await fleet.client.apply(CLUSTER_QUEUES, cluster_queue(1), manager="person")
        await fleet.client.apply(QUEUES, local_queue(fleet.namespace), manager="person")
        yield fleet
        await end(fleet)


@contextmanager
def logged(fleet: Fleet, folder: Path) -> Generator[Path]:
    with running_kueue(fleet.plane, folder, fleet.namespace) as log:
        try:
            yield log
        finally:
            print(log.read_text()[-8000:])  # shown when the test fails


async def served(fleet: Fleet) -> bool:
    """Kueue's webhook answers for its own kinds."""
    applied = await asyncio.to_thread(
        fleet.plane.run_kubectl, "apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(flavor()), check=False
    )
    return "serverside-applied" in applied


async def end(fleet: Fleet) -> None:
    """While Kueue runs: it takes its finalizers off."""
    await end_models(fleet)
    await fleet.client.delete(QUEUES, "serving", fleet.namespace)
    await fleet.client.delete(CLUSTER_QUEUES, "all")
    await fleet.client.delete(FLAVORS, "gpus")


async def end_models(fleet: Fleet) -> None:
    for name in [m["metadata"]["name"] for m in await fleet.all(MODELS, namespace=fleet.namespace)]:
        await fleet.client.delete(MODELS, name, fleet.namespace)
    await eventually(lambda: engines(fleet), lambda left: not left, seconds=120, what="pods that go")


async def engines(fleet: Fleet, of: str = "") -> list[JsonObject]:
    selector = f"{names.LABEL_COMPONENT}=engine" + (f",{names.LABEL_MODEL}={of}" if of else "")
    return await fleet.all(PODS, namespace=fleet.namespace, label_selector=selector)


def of_queue(name: str, namespace: str, *, priority_class: str = "", **spec: Any) -> JsonObject:
    found = model(name, namespace, variants=[{"class": "h100"}], **spec)
    found["metadata"]["labels"] = {names.LABEL_QUEUE: "serving"}
    if priority_class:
        found["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = priority_class
    return found


@asynccontextmanager
async def operator_of_the_chart(fleet: Fleet, folder: Path) -> AsyncGenerator[None]:
    """An operator with the chart's role, and no right more."""
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    roles = [o for o in rendered({}) if o["kind"] in kinds]
    fleet.plane.run_kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(roles))
    kubeconfig = service_account_kubeconfig(fleet, folder / "kubeconfig")
    with suppress(NotFound):
        await fleet.client.delete(LEASES, names.LEASE_NAME, NAMESPACE)
    async with await KubeClient.from_environment(kubeconfig=kubeconfig) as own, running_operator(own, kubeconfig):
        yield


async def test_a_replica_waits_for_its_queue_with_the_charts_role_and_starts_when_it_has_room(
    queued: Fleet, tmp_path: Path
) -> None:
    client, ns = queued.client, queued.namespace
    async with operator_of_the_chart(queued, tmp_path):
        await queued.apply(of_queue("first", ns))
        first = await model_with(client, ns, "first", "Ready", "True")
        assert condition(first, "QuotaWait")["reason"] == "Admitted"
        # Free GPUs there are; quota there is none. A higher priority in Shoal's eyes takes nothing from the first.
        await queued.apply(of_queue("second", ns, priority=100))
        waits = await model_with(client, ns, "second", "Ready", "False", "QuotaWait")
        assert condition(waits, "QuotaWait")["status"] == "True"
        assert f"waits for quota of queue {ns}/serving" in condition(waits, "Ready")["message"]
        assert not condition(waits, "Stalled")
        told = await eventually(
            lambda: client.get(MODELS, "second", ns),
            lambda m: "insufficient" in condition(m, "Ready").get("message", ""),
            what="Kueue's own words",
        )
        assert "nvidia.com/gpu" in condition(told, "Ready")["message"]
        [gated] = await engines(queued, "second")
        assert "kueue.x-k8s.io/admission" in [gate["name"] for gate in gated["spec"]["schedulingGates"]]
        assert condition(await client.get(MODELS, "first", ns), "Ready")["status"] == "True"
        await client.delete(MODELS, "first", ns)
        await model_with(client, ns, "second", "Ready", "True")


async def test_a_rollout_without_quota_for_one_replica_more_goes_in_place(queued: Fleet) -> None:
    client, ns = queued.client, queued.namespace
    async with running_operator(client, queued.kubeconfig):
        await queued.apply(of_queue("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        [old] = await engines(queued)
        await queued.apply(of_queue("chat", ns, pod={"env": [{"name": "A", "value": "b"}]}))
        await eventually(
            lambda: engines(queued),
            lambda pods: len(pods) == 1 and pods[0]["metadata"]["uid"] != old["metadata"]["uid"],
            what="the new revision",
        )
        await model_with(client, ns, "chat", "Ready", "True")


async def test_what_kueue_evicts_drains_and_waits_again(queued: Fleet) -> None:
    client, ns = queued.client, queued.namespace
    for name, number in (("low", 1), ("high", 10)):
        body: JsonObject = {
            "apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "WorkloadPriorityClass", "metadata": {"name": name},
            "value": number,
        }  # fmt: skip
        await client.apply(PRIORITIES, body, manager="person")
    async with running_operator(client, queued.kubeconfig):
        await queued.apply(of_queue("first", ns, priority_class="low"))
        await model_with(client, ns, "first", "Ready", "True")
        await queued.apply(of_queue("second", ns, priority_class="high"))
        await model_with(client, ns, "second", "Ready", "True")
        lost = await model_with(client, ns, "first", "Ready", "False", "QuotaWait")
        assert [v["class"] for v in lost["status"]["variants"] if v["desired"]] == ["h100"], "no class is given up"
        await client.delete(MODELS, "second", ns)
        await model_with(client, ns, "first", "Ready", "True")


async def test_of_two_quotas_each_is_named_and_the_one_that_forbids_the_pod_first(queued: Fleet) -> None:
    """Kueue sees only pods that the namespace's ResourceQuota let in."""
    client, ns = queued.client, queued.namespace
    await client.apply(QUOTAS, quota(ns, 1), manager="person")
    await eventually(lambda: client.get(QUOTAS, "gpus", ns), lambda q: bool((q.get("status") or {}).get("hard")))
    async with running_operator(client, queued.kubeconfig):
        # Both have room for one replica, and for no second one.
        await queued.apply(of_queue("chat", ns, scaling={"minReplicas": 2, "maxReplicas": 2}))
        await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: condition(m, "QuotaWait").get("reason") == "ResourceQuotaExceeded" and ready(m) == 1,
            seconds=120,
            what="the ResourceQuota, beside a replica that serves",
        )
        # With room in the ResourceQuota alone, the pod is let in and waits for the queue.
        await client.apply(QUOTAS, quota(ns, 2), manager="person")
        await look_again(queued, "chat-h100")
        waits = await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: condition(m, "QuotaWait").get("reason") == "QuotaWait",
            seconds=180,
            what="the queue",
        )
        assert condition(waits, "QuotaWait")["status"] == "True"
        assert f"waits for quota of queue {ns}/serving" in condition(waits, "QuotaWait")["message"]
        assert ready(waits) == 1, "the first replica is not taken for the second"
        # One more Model is kept out by the ResourceQuota again, while the other pod waits for its turn.
        await queued.apply(of_queue("second", ns))
        refused = await model_with(client, ns, "second", "Ready", "False", "ResourceQuotaExceeded", seconds=120)
        assert "ResourceQuota gpus has no room" in condition(refused, "QuotaWait")["message"]
        assert "queue" not in condition(refused, "QuotaWait")["message"], "no Kueue has seen a pod of it"
        assert not condition(refused, "Stalled"), "more quota ends it"
        # Room in both, and all serve.
        await client.apply(CLUSTER_QUEUES, cluster_queue(3), manager="person")
        await client.apply(QUOTAS, quota(ns, 3), manager="person")
        await look_again(queued, "second-h100")
        for name, replicas in (("chat", 2), ("second", 1)):
            served = await eventually(
                lambda name=name: client.get(MODELS, name, ns),
                lambda m, replicas=replicas: ready(m) == replicas,
                seconds=180,
                what=f"all replicas of {name}",
            )
            assert condition(served, "QuotaWait")["reason"] == "Admitted"
    await client.delete(QUOTAS, "gpus", ns)


def ready(model: JsonObject) -> int:
    return (model.get("status") or {}).get("replicas", {}).get("ready", 0)


async def look_again(fleet: Fleet, deployment: str) -> None:
    """The Deployment controller tries again later and later; a change of the Deployment makes it try at once."""
    body: JsonObject = {"metadata": {"annotations": {"example.com/look": "again"}}}
    await fleet.client.merge_patch(DEPLOYMENTS, deployment, fleet.namespace, body, manager="person")


# --- nodes that Kueue asks for --------------------------------------------------------------------------------------


@pytest.fixture
async def asking(queued: Fleet, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """The queue asks for nodes by ProvisioningRequests; the parameter says how often it repeats one that fails. Tests
    stand for Cluster Autoscaler: they write what it would answer."""
    config, check = nodes_asked_for(request.param)
    await queued.client.apply(CHECK_CONFIGS, config, manager="person")
    await queued.client.apply(CHECKS, check, manager="person")
    queue = cluster_queue(1)
    queue["spec"]["admissionChecks"] = ["nodes"]
    await eventually(
        lambda: queued.client.get(CHECKS, "nodes"), lambda c: condition(c, "Active").get("status") == "True"
    )
    await queued.client.apply(CLUSTER_QUEUES, queue, manager="person")
    yield queued
    await end_models(queued)
    await queued.client.apply(CLUSTER_QUEUES, cluster_queue(1), manager="person")
    await queued.client.delete(CHECKS, "nodes")
    await queued.client.delete(CHECK_CONFIGS, "nodes")


async def asked(fleet: Fleet, number: int) -> JsonObject:
    """The request for the only replica, the one of so manyth attempt."""

    async def find() -> list[JsonObject]:
        return await fleet.all(PROVISIONINGREQUESTS, namespace=fleet.namespace)

    ends = f"-nodes-{number}"
    found = await eventually(
        find, lambda all: any(r["metadata"]["name"].endswith(ends) for r in all), seconds=120, what=ends
    )
    return next(r for r in found if r["metadata"]["name"].endswith(ends))


async def answer(fleet: Fleet, request: JsonObject, kind: str, message: str, *, status: str = "True") -> None:
    """What Cluster Autoscaler writes."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def said(kind: str, status: str, message: str) -> JsonObject:
        return {"type": kind, "status": status, "reason": kind, "message": message, "lastTransitionTime": now}

    conditions = [said("Accepted", "True", "accepted"), said(kind, status, message)]
    await fleet.client.merge_patch(
        PROVISIONINGREQUESTS, request["metadata"]["name"], fleet.namespace, {"status": {"conditions": conditions}},
        manager="cluster-autoscaler", subresource="status",
    )  # fmt: skip


async def until_said(fleet: Fleet, reason: str, *parts: str) -> JsonObject:
    """The Model, once its condition QuotaWait has the reason and all parts in its message."""

    def told(model: JsonObject) -> bool:
        waits = condition(model, "QuotaWait")
        return waits.get("reason") == reason and all(part in waits["message"] for part in parts)

    return await eventually(
        lambda: fleet.client.get(MODELS, "chat", fleet.namespace), told, seconds=120, what=f"{reason}: {parts}"
    )


async def why(fleet: Fleet) -> JsonObject:
    """The first cause that `shoal why` names while a gateway is ready, without which no request is taken at all."""
    labels = {names.LABEL_COMPONENT: names.COMPONENT_GATEWAY, names.LABEL_PART_OF: "shoal"}
    gateway: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gateway", "namespace": NAMESPACE, "labels": labels},
        "spec": {"nodeName": "cpu-0", "containers": [{"name": "gateway", "image": "shoal"}]},
    }
    await fleet.client.create(PODS, gateway)
    await eventually(
        lambda: fleet.client.get(PODS, "gateway", NAMESPACE), lambda p: condition(p, "Ready").get("status") == "True"
    )
    command = ["why", "model/chat", "-n", fleet.namespace, "-o", "json", "--kubeconfig", fleet.kubeconfig]
    command += ["--operator-namespace", NAMESPACE]
    done = await asyncio.to_thread(CliRunner(catch_exceptions=False).invoke, main, command)
    await fleet.client.delete(PODS, "gateway", NAMESPACE)
    return json.loads(done.stdout)["causes"][0]


@pytest.mark.parametrize("asking", [1], indirect=True)
async def test_a_replica_waits_for_the_nodes_that_kueue_asks_for_and_runs_when_they_are_there(
    asking: Fleet, tmp_path: Path
) -> None:
    client, ns = asking.client, asking.namespace
    async with operator_of_the_chart(asking, tmp_path):
        await asking.apply(of_queue("chat", ns))
        request = await asked(asking, 1)
        name = f"{ns}/{request['metadata']['name']}"
        assert request["spec"]["provisioningClassName"] == "queued-provisioning.example.com"
        assert [each["count"] for each in request["spec"]["podSets"]] == [1], "one request for each replica"
        waits = await until_said(asking, "AdmissionCheckPending", name, "no autoscaler has answered it yet")
        assert condition(waits, "QuotaWait")["status"] == "True"
        assert condition(waits, "Ready")["reason"] == "AdmissionCheckPending"
        assert not condition(waits, "Stalled")
        await answer(asking, request, "Provisioned", "ETA: 20 min, position 3", status="False")
        await until_said(asking, "AdmissionCheckPending", name, "not provisioned yet, ETA: 20 min, position 3")
        first = await why(asking)
        assert first["reason"] == "AdmissionCheckPending"
        assert f"admission check nodes: ProvisioningRequest {ns}/" in first["message"]
        assert [v["class"] for v in waits["status"]["variants"] if v["desired"]] == ["h100"], "no class is given up"
        await answer(asking, request, "Provisioned", "Provisioning Request was successfully provisioned.")
        ready = await model_with(client, ns, "chat", "Ready", "True")
        assert condition(ready, "QuotaWait")["reason"] == "Admitted"
        [pod] = await engines(asking, "chat")
        annotations = pod["metadata"]["annotations"]
        assert annotations["autoscaling.x-k8s.io/consume-provisioning-request"] == request["metadata"]["name"]


@pytest.mark.parametrize("asking", [1], indirect=True)
async def test_a_request_for_nodes_that_expires_or_fails_is_told_is_repeated_and_ends_with_what_to_do(
    asking: Fleet,
) -> None:
    client, ns = asking.client, asking.namespace
    async with running_operator(client, asking.kubeconfig):
        await asking.apply(of_queue("chat", ns))
        await answer(asking, await asked(asking, 1), "BookingExpired", "nobody came for the nodes in 10 min")
        second = await asked(asking, 2)
        await until_said(asking, "AdmissionCheckPending", second["metadata"]["name"])
        await answer(asking, second, "Failed", "no stock in zone a")
        gone = await until_said(asking, "AdmissionRejected", second["metadata"]["name"], "Failed, no stock in zone a")
        assert condition(gone, "Stalled")["status"] == "True", "nobody tries again by himself"
        assert "delete the pod to ask again" in condition(gone, "QuotaWait")["message"]
        first = await why(asking)
        assert first["reason"] == "AdmissionRejected"
        assert "delete the pod to ask again" in first["do"]
        # And that helps.
        [pod] = await engines(asking, "chat")
        await client.delete(PODS, pod["metadata"]["name"], ns)
        again = await eventually(
            lambda: asking.all(PROVISIONINGREQUESTS, namespace=ns),
            lambda found: any(r["metadata"]["uid"] != second["metadata"]["uid"] and not r.get("status") for r in found),
            seconds=120,
            what="a new request",
        )
        new = next(r for r in again if not r.get("status"))
        await answer(asking, new, "Provisioned", "Provisioning Request was successfully provisioned.")
        await model_with(client, ns, "chat", "Ready", "True")


async def test_kueue_that_goes_away_is_said_and_the_replica_starts_when_it_is_back(
    fleet: Fleet, tmp_path: Path
) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        with logged(fleet, tmp_path / "one"):
            await eventually(lambda: served(fleet), bool, what="Kueue's webhooks")
            await client.apply(CLUSTER_QUEUES, cluster_queue(1), manager="person")
            await fleet.apply(of_queue("chat", ns))  # its LocalQueue does not exist yet
            missing = await model_with(client, ns, "chat", "Ready", "False", "QuotaWait")
            assert condition(missing, "QuotaWait")["status"] == "True"
        # Kueue has gone: nobody admits the pod, and nothing is given up for it.
        await client.apply(QUEUES, local_queue(ns), manager="person")
        await asyncio.sleep(0)
        waits = await model_with(client, ns, "chat", "Ready", "False", "QuotaWait")
        assert [v["class"] for v in waits["status"]["variants"] if v["desired"]] == ["h100"]
        with logged(fleet, tmp_path / "two"):
            await model_with(client, ns, "chat", "Ready", "True")
            await end(fleet)
