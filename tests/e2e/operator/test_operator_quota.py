"""Quotas of Kubernetes itself that hold replicas back, on a real API server with its admission and controllers."""

import pytest

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.kube.resources import DEPLOYMENTS, MODELS, PODS, Resource
from tests.support.controlplane import Fleet
from tests.support.operators import condition, eventually, model, model_with, running_operator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
RANGES = Resource("", "v1", "limitranges", "LimitRange")


def quota(namespace: str, gpus: int) -> JsonObject:
    hard = {"requests.nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus", "namespace": namespace},
        "spec": {"hard": hard},
    }  # fmt: skip


async def test_a_resource_quota_is_named_and_the_replica_comes_when_it_has_room(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await client.apply(QUOTAS, quota(ns, 1), manager="person")
    await eventually(lambda: client.get(QUOTAS, "gpus", ns), lambda q: bool((q.get("status") or {}).get("hard")))
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("first", ns, variants=[{"class": "h100"}]))
        await model_with(client, ns, "first", "Ready", "True")
        await fleet.apply(model("second", ns, variants=[{"class": "h100"}], priority=100))
        waits = await model_with(client, ns, "second", "Ready", "False", "ResourceQuotaExceeded")
        message = condition(waits, "Ready")["message"]
        assert message == (
            "ResourceQuota gpus has no room for a replica: requested requests.nvidia.com/gpu=1, used "
            "requests.nvidia.com/gpu=1, limited requests.nvidia.com/gpu=1"
        )
        assert condition(waits, "QuotaWait")["reason"] == "ResourceQuotaExceeded"
        assert not condition(waits, "Stalled"), "more quota ends it, nobody has to change the Model"
        await eventually(
            lambda: client.get(MODELS, "second", ns),
            lambda m: "takes no GPU until then" in condition(m, "Placed").get("message", ""),
            what="the next plan counts no GPU for it",
        )
        assert condition(await client.get(MODELS, "first", ns), "Ready")["status"] == "True", "it keeps its GPU"
        await client.apply(QUOTAS, quota(ns, 2), manager="person")
        # The Deployment controller tries again later and later; a change of the Deployment makes it try at once.
        [found] = [d for d in await fleet.all(DEPLOYMENTS, namespace=ns) if d["metadata"]["name"] == "second-h100"]
        body: JsonObject = {"metadata": {"annotations": {"example.com/look": "again"}}}
        await client.merge_patch(DEPLOYMENTS, found["metadata"]["name"], ns, body, manager="person")
        ready = await model_with(client, ns, "second", "Ready", "True", seconds=180)
        assert not condition(ready, "QuotaWait")
    await client.delete(QUOTAS, "gpus", ns)


async def test_a_limit_range_that_refuses_the_pods_is_named(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    limits = [{"type": "Container", "max": {"memory": "32Mi"}}]
    body: JsonObject = {
        "apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small", "namespace": ns},
        "spec": {"limits": limits},
    }  # fmt: skip
    await client.apply(RANGES, body, manager="person")
    async with running_operator(client, fleet.kubeconfig):
        # The Job that reads the source's metadata is a pod as well.
        await client.delete(RANGES, "small", ns)
        await fleet.apply(model("chat", ns, scaling={"minReplicas": 1, "maxReplicas": 1}, variants=[{"class": "h100"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        await client.apply(RANGES, body, manager="person")
        for pod in await fleet.all(PODS, namespace=ns, label_selector=f"{names.LABEL_COMPONENT}=engine"):
            await client.delete(PODS, pod["metadata"]["name"], ns)
        refused = await model_with(client, ns, "chat", "Ready", "False", "LimitRangeExceeded")
        assert "maximum memory usage per Container is 32Mi, but limit is" in condition(refused, "Ready")["message"]
        assert condition(refused, "QuotaWait")["status"] == "True"
    await client.delete(RANGES, "small", ns)


async def test_pods_carry_the_models_queue_and_it_is_said_that_no_kueue_looks_at_them(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        queued = model("chat", ns, variants=[{"class": "h100"}])
        queued["metadata"]["labels"] = {names.LABEL_QUEUE: "serving"}
        await fleet.apply(queued)
        ready = await model_with(client, ns, "chat", "Ready", "True")
        [pod] = await fleet.all(PODS, namespace=ns, label_selector=f"{names.LABEL_COMPONENT}=engine")
        assert pod["metadata"]["labels"][names.LABEL_QUEUE] == "serving"
        assert (condition(ready, "QuotaWait")["status"], condition(ready, "QuotaWait")["reason"]) == (
            "False",
            "QueueIgnored",
        )
