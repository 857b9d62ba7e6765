"""Weights that node caches fetch in advance, on a real API server: the Jobs, where they run, and the status."""

import pytest

from shoal.api import names
from shoal.api.config import Cache
from shoal.api.meta import JsonObject
from shoal.kube.resources import JOBS, MODELS
from tests.support.controlplane import Fleet
from tests.support.operators import CONFIG, eventually, model, model_with, running_operator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def prefetched(obj: JsonObject) -> dict[str, tuple[int, int]]:
    found = (obj.get("status") or {}).get("prefetch") or []
    return {each["class"]: (each["nodes"], each.get("ready", 0)) for each in found}


async def test_caches_are_asked_on_nodes_of_each_class_and_the_status_says_which_have_the_weights(
    fleet: Fleet,
) -> None:
    client, ns = fleet.client, fleet.namespace
    config = CONFIG.model_copy(update={"cache": Cache(enabled=True)})
    asked: JsonObject = {"nodes": 1, "classes": ["h100", "l4"]}
    source = {"uri": "hf://owner/repo"}
    said = dict(fleet.kubelet.said[1]["facts"]) | {"source": source["uri"]}
    fleet.kubelet.said = (0, {"facts": said})
    async with running_operator(client, fleet.kubeconfig, config=config):
        await fleet.apply(model("chat", ns, source=source, variants=[{"class": "h100"}], prefetch=asked))
        jobs = await eventually(
            lambda: fleet.all(JOBS, namespace=ns, label_selector=f"{names.LABEL_COMPONENT}=prefetch"),
            lambda found: len(found) == 2,
            what="a Job for each class",
        )
        nodes = sorted(job["metadata"]["annotations"][names.ANNOTATION_NODE] for job in jobs)
        assert nodes == ["h100-0", "l4-0"]
        for job in jobs:
            spec = job["spec"]["template"]["spec"]
            assert "nvidia.com/gpu" not in str(spec["containers"][0]["resources"])
            assert {"name": "SHOAL_STAGE_CACHE", "value": names.CACHE_DIR} in spec["containers"][0]["env"]
        await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: prefetched(m) == {"h100": (1, 1), "l4": (1, 1)},
            what="both nodes have the weights",
        )
        await fleet.apply(model("chat", ns, source=source, variants=[{"class": "h100"}]))
        await eventually(lambda: client.get(MODELS, "chat", ns), lambda m: not prefetched(m))


async def test_a_source_that_no_cache_fetches_is_said(fleet: Fleet) -> None:
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("chat", fleet.namespace, variants=[{"class": "h100"}], prefetch={"nodes": 2}))
        await model_with(fleet.client, fleet.namespace, "chat", "Ready", "True")
        chat = await eventually(
            lambda: fleet.client.get(MODELS, "chat", fleet.namespace), lambda m: bool(prefetched(m))
        )
        assert "the node cache is off" in chat["status"]["prefetch"][0]["message"]
