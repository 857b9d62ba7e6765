"""A namespace that is deleted with a Model in it: what Shoal made there does not keep it."""

from typing import Any

import pytest

from shoal.api.meta import JsonObject
from shoal.kube.errors import NotFound
from shoal.kube.resources import DEPLOYMENTS, JOBS, MODELS, NAMESPACES, PODS, SECRETS
from tests.support.controlplane import Fleet
from tests.support.operators import eventually, model, model_with, running_operator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

TRACKING = "batch.kubernetes.io/job-tracking"
"""The Job controller's own, which takes it off."""


async def test_a_namespace_goes_with_a_model_whose_claim_is_missing(fleet: Fleet) -> None:
    """Kubernetes deletes the pods of a namespace first, and nothing else before they are gone. While one remains it
    waits for half of the longest grace period before it looks again."""
    client, ns = fleet.client, f"{fleet.namespace}-claim"
    namespace: JsonObject = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ns}}
    await client.apply(NAMESPACES, namespace, manager="test")

    async def found() -> JsonObject | None:
        try:
            return await client.get(NAMESPACES, ns)
        except NotFound:
            return None

    async def left() -> dict[str, Any]:
        kinds = (MODELS, JOBS, PODS, SECRETS, DEPLOYMENTS)
        return {kind.plural: await fleet.all(kind, namespace=ns) for kind in kinds}

    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, source={"uri": "pvc://nowhere/model"}))
        await model_with(client, ns, "chat", "Stalled", "True")
        made = await left()
        assert made["jobs"], "something reads the source, or waits to"
        (pod,) = made["pods"]
        assert "nodeName" not in pod["spec"]
        assert pod["spec"]["terminationGracePeriodSeconds"] <= 5
        finalizers = {key for each in made.values() for o in each for key in o["metadata"].get("finalizers", ())}
        assert finalizers <= {TRACKING}
        await client.delete(NAMESPACES, ns)
        await eventually(found, lambda namespace: namespace is None, what="the namespace is gone")
        assert {kind: len(objects) for kind, objects in (await left()).items()} == dict.fromkeys(made, 0)
