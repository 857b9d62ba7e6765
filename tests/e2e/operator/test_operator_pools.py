"""A LoRAPool and its Model's replicas: it rolls them when it comes, changes and goes, and only then."""

from typing import Any

import pytest

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.kube.resources import DEPLOYMENTS, LORA_POOLS, MODELS, SECRETS
from tests.support.controlplane import FACTS, Fleet
from tests.support.operators import eventually, model, model_with, running_operator

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(240),
]

WIDTHS = {"layers": 32, "hidden": 4096, "query": 4096, "key": 1024, "feedForward": 14336}
# A roll that finds no room on its class may go on to another one: here it shall replace in place.
ONE_CLASS = [{"class": "l4"}]


def pool(fleet: Fleet, name: str = "pool", **spec: Any) -> JsonObject:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "LoRAPool",
        "metadata": {"name": name, "namespace": fleet.namespace},
        "spec": {"modelRef": {"name": "base"}, **spec},
    }


def engine_args(deployment: JsonObject) -> list[str]:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return next(c["args"] for c in containers if c["name"] == names.CONTAINER_ENGINE)


def gpus(found: JsonObject) -> int:
    """Of a replica, on the class in use."""
    variants = (found.get("status") or {}).get("variants", [])
    return next(v["gpusPerReplica"] for v in variants if v.get("desired"))


def engine_gpus(deployment: JsonObject) -> str:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return next(c["resources"]["limits"]["nvidia.com/gpu"] for c in containers if c["name"] == names.CONTAINER_ENGINE)


def seen(deployment: JsonObject) -> bool:
    """The Deployment controller has made what the Deployment says now."""
    return (deployment.get("status") or {}).get("observedGeneration") == deployment["metadata"]["generation"]


def revision(deployment: JsonObject) -> int:
    """Counts the templates that the Deployment had: what is not in the template does not roll it."""
    return int(deployment["metadata"]["annotations"]["deployment.kubernetes.io/revision"])


async def deployment(fleet: Fleet) -> JsonObject:
    (one,) = await fleet.all(DEPLOYMENTS, namespace=fleet.namespace)
    return one


async def test_a_pool_rolls_its_model_when_it_comes_changes_and_goes(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": FACTS | {"widths": WIDTHS}})
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("base", fleet.namespace, variants=ONE_CLASS))
        before = await model_with(fleet.client, fleet.namespace, "base", "Ready", "True", seconds=60)
        plain = await deployment(fleet)
        assert "--enable-lora" not in engine_args(plain)

        await fleet.apply(pool(fleet, maxRank=16))
        pooled = await eventually(lambda: deployment(fleet), lambda d: "--enable-lora" in engine_args(d), seconds=30)
        assert {"--max-lora-rank=16", "--max-loras-per-batch=8"} <= set(engine_args(pooled))
        # The places take so much that one GPU is not enough any more for a request of the whole context.
        assert gpus(before) == 1
        await eventually(lambda: fleet.client.get(MODELS, "base", fleet.namespace), lambda m: gpus(m) == 2, seconds=30)
        pooled = await eventually(lambda: deployment(fleet), lambda d: seen(d) and engine_gpus(d) == "2", seconds=30)

        # Who may join is nothing to the engines.
        await fleet.apply(pool(fleet, maxRank=16, allowedNamespaces={"from": "All"}))
        await fleet.apply(pool(fleet, maxRank=16, slotsPerReplica=4, allowedNamespaces={"from": "All"}))
        resized = await eventually(
            lambda: deployment(fleet), lambda d: "--max-loras-per-batch=4" in engine_args(d) and seen(d), seconds=30
        )
        assert revision(resized) == revision(pooled) + 1

        await fleet.client.delete(LORA_POOLS, "pool", fleet.namespace)
        gone = await eventually(lambda: deployment(fleet), lambda d: "--enable-lora" not in engine_args(d), seconds=30)
        assert gone["spec"]["template"] == plain["spec"]["template"]


async def test_of_two_pools_the_older_one_counts_until_it_goes(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": FACTS | {"widths": WIDTHS}})
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(pool(fleet, "older", maxRank=8))
        await eventually(lambda: fleet.client.get(LORA_POOLS, "older", fleet.namespace), bool)
        await fleet.apply(model("base", fleet.namespace, variants=ONE_CLASS))
        await model_with(fleet.client, fleet.namespace, "base", "Ready", "True", seconds=60)
        # Times of creation have a resolution of one second, and between equals the uid decides.
        await fleet.apply(pool(fleet, "younger", maxRank=32))
        both = [await fleet.client.get(LORA_POOLS, name, fleet.namespace) for name in ("older", "younger")]
        first = min(both, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["uid"]))
        second = next(p for p in both if p is not first)
        rank = f"--max-lora-rank={first['spec']['maxRank']}"
        await eventually(lambda: deployment(fleet), lambda d: rank in engine_args(d), seconds=30)

        await fleet.client.delete(LORA_POOLS, first["metadata"]["name"], fleet.namespace)
        rank = f"--max-lora-rank={second['spec']['maxRank']}"
        await eventually(lambda: deployment(fleet), lambda d: rank in engine_args(d), seconds=30)
        await fleet.client.delete(LORA_POOLS, second["metadata"]["name"], fleet.namespace)


async def test_a_pool_that_the_engine_refuses_rolls_nothing(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": FACTS | {"widths": WIDTHS}})
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(pool(fleet))
        refuses = model(
            "base", fleet.namespace, engine={"extraArgs": ["--load-format=runai_streamer"]}, variants=ONE_CLASS
        )
        await fleet.apply(refuses)
        await model_with(fleet.client, fleet.namespace, "base", "Ready", "True", seconds=60)
        assert "--enable-lora" not in engine_args(await deployment(fleet))

        mended = {"extraArgs": ["--load-format=safetensors"]}
        await fleet.apply(model("base", fleet.namespace, engine=mended, variants=ONE_CLASS))
        await eventually(lambda: deployment(fleet), lambda d: "--enable-lora" in engine_args(d), seconds=30)
        await fleet.client.delete(LORA_POOLS, "pool", fleet.namespace)


async def test_credentials_whose_secret_does_not_exist_are_told_on_the_pool_until_it_does(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": FACTS | {"widths": WIDTHS}})

    async def ready() -> JsonObject:
        found = await fleet.client.get(LORA_POOLS, "pool", fleet.namespace)
        conditions: list[JsonObject] = (found.get("status") or {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == "Ready"), {"reason": None})

    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("base", fleet.namespace, variants=ONE_CLASS))
        await fleet.apply(pool(fleet, credentials=[{"uriPrefix": "s3://adapters/", "secretRef": {"name": "s3-read"}}]))
        told = await eventually(ready, lambda c: c["reason"] == "SecretNotFound", seconds=30)
        assert (
            f"there is no Secret {fleet.namespace}/s3-read, so nothing is read from s3://adapters/" in told["message"]
        )
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3-read", "namespace": fleet.namespace}}
        await fleet.client.apply(SECRETS, secret, manager="person")
        await eventually(ready, lambda c: c["reason"] not in (None, "SecretNotFound"), seconds=60)
