"""Classes and requests that make no sense, or change under what runs: what the Model says, and what goes on."""

import asyncio

import pytest

from shoal.api.meta import JsonObject
from shoal.core import candidates
from shoal.core.placement import ClassSupply
from shoal.kube.client import KubeClient
from shoal.kube.resources import DEPLOYMENTS, GPUCLASSES, MODELS, Resource
from tests.e2e.operator.test_operator_fleet import engine_pods, never_more_than_there_is, stands, until_model, variant
from tests.support.controlplane import FACTS, Fleet, add_node
from tests.support.operators import condition, eventually, gpu_class, model, model_with, running_operator

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

UNKNOWN = FACTS | {"architecture": "NeverSeenForCausalLM", "kv": {"kind": "Unknown"}, "kvBytesPerToken": None}


async def placed(fleet: Fleet, name: str, reason: str) -> str:
    found = await eventually(
        lambda: fleet.client.get(MODELS, name, fleet.namespace),
        lambda m: condition(m, "Placed").get("reason") == reason,
        what=f"Placed with reason {reason}",
    )
    return condition(found, "Placed")["message"]


async def class_ready(fleet: Fleet, name: str, reason: str) -> str:
    found = await eventually(
        lambda: fleet.client.get(GPUCLASSES, name), lambda c: condition(c, "Ready").get("reason") == reason
    )
    return condition(found, "Ready")["message"]


async def test_an_unknown_architecture_asks_for_its_figure_and_takes_it(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": UNKNOWN})
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("new", fleet.namespace))
        assert await placed(fleet, "new", "SizeUnknown") == (
            "fits on no GPU class: what one token of NeverSeenForCausalLM takes in the KV cache is not known: say in "
            "`sizing.kvBytesPerToken` how many bytes it takes of each GPU (an engine that has run on it says so in its "
            "log)"
        )
        assert await fleet.all(DEPLOYMENTS, namespace=fleet.namespace) == []
        await fleet.apply(model("new", fleet.namespace, sizing={"kvBytesPerToken": 131072}))
        await model_with(fleet.client, fleet.namespace, "new", "Ready", "True")


async def test_what_no_gpu_of_the_class_can_do_is_told(fleet: Fleet) -> None:
    """A quantization that its GPUs lack, and more GPUs than any of its nodes has."""
    client, ns = fleet.client, fleet.namespace
    await add_node(client, "v100-0", {"nvidia.com/gpu.product": "V100"}, 4)
    old = gpu_class("v100", "V100", cost="0.30", memory="32Gi")
    old["spec"]["computeCapability"] = "7.0"
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(old)
        await fleet.apply(model("small", ns, variants=[{"class": "v100", "quantization": "FP8"}]))
        await fleet.apply(model("wide", ns, variants=[{"class": "l4", "tensor": 4}]))
        quantized = await placed(fleet, "small", "NoFit")
        assert quantized.startswith("fits on no GPU class: v100: ")
        assert "compute capability" in quantized
        assert quantized.endswith("this class has 7.0")
        assert await placed(fleet, "wide", "NoFit") == (
            "fits on no GPU class: l4: `tensor` is 4, and the largest node has 2 GPUs: a replica is on one node"
        )


async def test_classes_without_nodes_or_a_price_say_so_and_come_last(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await add_node(client, "gift-0", {"nvidia.com/gpu.product": "Gift"}, 1)
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(gpu_class("a-gift", "Gift"))
        await fleet.apply(gpu_class("b-empty", "Nowhere", cost="0.01"))
        assert await class_ready(fleet, "b-empty", "NoNodes") == "no node has the labels nvidia.com/gpu.product=Nowhere"
        assert await class_ready(fleet, "a-gift", "NodesFound") == (
            "1 nodes with 1 x nvidia.com/gpu; no hourlyCost: it is used after all classes that have one"
        )
        await fleet.apply(model("chat", ns))
        found = await model_with(client, ns, "chat", "Ready", "True")
        assert stands(found, l4=1), "neither the one that is first by name nor the cheapest, which has no room"
        both = [{"class": "a-gift"}, {"class": "b-empty"}]
        await fleet.apply(model("other", ns, variants=both))
        found = await model_with(client, ns, "other", "Ready", "True")
        assert stands(found, **{"a-gift": 1})
        assert "hourlyCost" not in variant(found, "a-gift")


async def test_a_class_that_is_edited_or_deleted_takes_nothing_from_what_runs(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, variants=[{"class": "l4"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        (before,) = await engine_pods(fleet)

        async def same_pod() -> bool:
            return [p["metadata"]["uid"] for p in await engine_pods(fleet)] == [before["metadata"]["uid"]]

        # The price is news for the status alone.
        await fleet.apply(gpu_class("l4", "L4", cost="0.55", memory="24Gi"))
        await until_model(fleet, "chat", lambda m: variant(m, "l4").get("hourlyCost") == "0.55")
        assert await same_pod()

        # The model is too large for what the class says now: it serves on, and it is told why it would not again.
        await fleet.apply(gpu_class("l4", "L4", cost="0.55", memory="12Gi"))
        message = await placed(fleet, "chat", "NoFit")
        assert "on 2 GPUs with 12 GiB each, weights" in message
        assert "1 on l4, not usable any more, stays meanwhile" in message
        assert await same_pod()

        await client.delete(GPUCLASSES, "l4")
        refused = await model_with(client, ns, "chat", "Accepted", "False", "ClassNotFound")
        assert condition(refused, "Accepted")["message"] == "spec.variants: there is no GPUClass 'l4'; there are: h100"
        assert condition(refused, "Available")["status"] == "True"
        assert await same_pod()


async def test_a_missing_secret_is_asked_for_with_the_keys_of_its_source(fleet: Fleet) -> None:
    source = {"uri": "s3://models/llama", "secretRef": {"name": "bucket"}}
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("chat", fleet.namespace, source=source))
        refused = await model_with(fleet.client, fleet.namespace, "chat", "Accepted", "False", "SecretNotFound")
    assert condition(refused, "Ready")["message"] == (
        f"spec.source.secretRef: there is no Secret {fleet.namespace}/bucket; create it with the keys "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )


async def test_gpus_of_a_pod_that_terminates_are_waited_for(fleet: Fleet) -> None:
    """Invariant 11: a terminating pod holds its GPUs, and who is to have them next says so."""
    client, ns = fleet.client, fleet.namespace
    only: list[JsonObject] = [{"class": "l4"}]
    async with running_operator(client, fleet.kubeconfig), never_more_than_there_is(fleet):
        for name in ("low-a", "low-b"):
            await fleet.apply(model(name, ns, variants=only, priority=0))
            await model_with(client, ns, name, "Ready", "True")
        fleet.kubelet.linger = 5
        await fleet.apply(model("high", ns, variants=only, priority=100))
        found = await until_model(fleet, "high", lambda m: bool(variant(m, "l4").get("waiting")))
        assert condition(found, "Placed")["reason"] == "DrainingOthers"
        assert condition(found, "Placed")["message"].startswith("waits for 1 GPU on l4 that ")
        await model_with(client, ns, "high", "Ready", "True", seconds=60)
        found = await until_model(fleet, "high", lambda m: stands(m, l4=1) and not variant(m, "l4").get("waiting"))
        assert condition(found, "Placed")["reason"] == "Placed"
        fleet.kubelet.linger = 0


async def test_a_model_that_goes_while_it_is_looked_at_leaves_its_gpus_to_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, ns = fleet.client, fleet.namespace
    only: list[JsonObject] = [{"class": "l4"}]
    goes_on, asked, honest = asyncio.Event(), asyncio.Event(), KubeClient.get_metadata
    goes_on.set()

    async def slow(self: KubeClient, resource: Resource, name: str, namespace: str | None = None) -> JsonObject:
        asked.set()
        await goes_on.wait()
        return await honest(self, resource, name, namespace)

    monkeypatch.setattr(KubeClient, "get_metadata", slow)
    fleet.plane.run_kubectl("create", "secret", "generic", "hub", f"-n={ns}", "--from-literal=token=t")
    source = {"uri": "hf://meta-llama/Llama-3.1-8B", "secretRef": {"name": "hub"}}
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("first", ns, source=source, variants=only, scaling={"minReplicas": 2}))
        await until_model(fleet, "first", lambda m: stands(m, l4=2) and condition(m, "Ready").get("status") == "True")
        goes_on.clear()
        asked.clear()
        # Something makes the operator look at it, and it is deleted meanwhile.
        fleet.plane.run_kubectl("annotate", f"-n={ns}", "models.shoal.dev/first", "example.com/touched=1")
        await asyncio.wait_for(asked.wait(), 30)
        await client.delete(MODELS, "first", ns)
        await eventually(
            lambda: client.get(GPUCLASSES, "l4"), lambda c: c["status"]["gpus"]["allocated"] == 0, seconds=120
        )
        goes_on.set()
        await fleet.apply(model("second", ns, variants=only, scaling={"minReplicas": 2}))
        await until_model(fleet, "second", lambda m: stands(m, l4=2) and condition(m, "Ready").get("status") == "True")


async def test_the_watch_over_promised_gpus_can_fail(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 11 with its protection off: a planner that takes no held GPU into account promises them twice."""
    honest = candidates.supplies

    def greedy(classes, nodes, held, releasing=None) -> tuple[ClassSupply, ...]:
        return honest(classes, nodes, {})

    monkeypatch.setattr("shoal.core.candidates.supplies", greedy)
    client, ns = fleet.client, fleet.namespace
    only: list[JsonObject] = [{"class": "l4"}]

    async def four_models_for_two_gpus() -> None:
        async with running_operator(client, fleet.kubeconfig), never_more_than_there_is(fleet):
            for name in ("a", "b"):
                await fleet.apply(model(name, ns, variants=only))
                await model_with(client, ns, name, "Ready", "True")
            for name in ("c", "d"):
                await fleet.apply(model(name, ns, variants=only))
            await eventually(lambda: engine_pods(fleet), lambda found: len(found) > 2)

    with pytest.raises(AssertionError, match=r"l4: [34] asked for, 2 there, 0 waiting"):
        await four_models_for_two_gpus()
