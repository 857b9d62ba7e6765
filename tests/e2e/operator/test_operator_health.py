"""GPUs that sicken, with a real scheduler: a replacement first, then the drain of that replica, and no other."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core.health import Unit
from shoal.core.health.requests import CordonRequest, write
from shoal.kube.resources import (
    DEPLOYMENTS,
    DEVICECLASSES,
    EVENTS,
    GPUCLASSES,
    NODES,
    PODS,
    RESOURCECLAIMS,
    RESOURCESLICES,
)
from tests.support.controlplane import Fleet, add_node
from tests.support.devices import class_of_devices, clear_devices, device_class, resource_slice
from tests.support.operators import eventually, model, model_with, running_operator, with_condition

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
LABEL = f"{names.QUARANTINE_PREFIX}h100"


async def says(fleet: Fleet, node: str, status: str) -> None:
    """A problem detector sets its condition."""
    found = await fleet.client.get(NODES, node)
    others = [c for c in found["status"]["conditions"] if c["type"] != "XIDErrors"]
    mine = {"type": "XIDErrors", "status": status, "reason": "Xid", "message": "Xid 79: GPU has fallen off the bus"}
    body: JsonObject = {"status": {"conditions": [*others, mine]}}
    await fleet.client.merge_patch(NODES, node, None, body, manager="npd", subresource="status")


async def replicas(fleet: Fleet) -> dict[str, str | None]:
    """Name of each engine pod that is not going -> its node."""
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    pods = await fleet.all(PODS, namespace=fleet.namespace, label_selector=selector)
    return {p["metadata"]["name"]: p["spec"].get("nodeName") for p in pods if "deletionTimestamp" not in p["metadata"]}


def quarantined(obj: JsonObject) -> list[JsonObject]:
    found: list[JsonObject] = (obj.get("status") or {}).get("quarantined") or []
    return found


async def of_class(fleet: Fleet, name: str, *expected: tuple[str, str]) -> list[JsonObject]:
    """Waits for (node, state)."""

    def holds(obj: JsonObject) -> bool:
        return [(each["node"], each["state"]) for each in quarantined(obj)] == list(expected)

    return quarantined(await eventually(lambda: fleet.client.get(GPUCLASSES, name), holds, what=str(expected)))


async def test_a_node_that_sickens_loses_its_replica_after_another_is_ready(fleet: Fleet) -> None:
    client = fleet.client
    await add_node(client, "h100-1", {"nvidia.com/gpu.product": "H100"}, 8)
    async with running_operator(client, str(fleet.plane.kubeconfig)):
        chat = model("chat", fleet.namespace, variants=[{"class": "h100"}], scaling={"minReplicas": 1})
        await fleet.apply(chat)
        await model_with(client, fleet.namespace, "chat", "Ready", "True")
        [(old, sick)] = (await replicas(fleet)).items()
        assert sick is not None
        well = "h100-1" if sick == "h100-0" else "h100-0"
        fleet.kubelet.hold = True  # a replacement that starts, and is not ready yet
        await says(fleet, sick, "True")
        [found] = await of_class(fleet, "h100", (sick, "Quarantined"))
        assert (found["reason"], found["by"]) == ("GPUFellOffBus", "Shoal")
        assert "until" not in found, "not while the signal lasts"
        both = await eventually(lambda: replicas(fleet), lambda now: len(now) == 2, what="a replacement")
        assert both[old] == sick, "the old one stays meanwhile"
        assert {node for name, node in both.items() if name != old} <= {well, None}
        fleet.kubelet.hold = False
        await eventually(lambda: replicas(fleet), lambda now: list(now.values()) == [well], what="the old one is gone")
        assert (await client.get(NODES, sick))["metadata"]["labels"][LABEL] == "GPUFellOffBus"
        said = await with_condition(client, GPUCLASSES, "", "h100", "GPUsHealthy", "False", "GPUsQuarantined")
        text = next(c["message"] for c in said["status"]["conditions"] if c["type"] == "GPUsHealthy")
        assert f"node {sick} is out of use (GPUFellOffBus: condition XIDErrors is True" in text
        events = [e async for e in client.list(EVENTS, namespace="default")]
        assert any(e["reason"] == "GPUsQuarantined" and sick in e["note"] for e in events)
        # The last node of the class sickens too: it goes on serving, and that is said.
        await says(fleet, well, "True")
        said = await with_condition(client, GPUCLASSES, "", "h100", "GPUsHealthy", "False", "QuarantineWithheld")
        text = next(c["message"] for c in said["status"]["conditions"] if c["type"] == "GPUsHealthy")
        assert f"node {well} stays in use, since no GPU of the class would be left" in text
        assert list((await replicas(fleet)).values()) == [well]
    # Another operator goes on with what the status says.
    await says(fleet, sick, "False")
    await says(fleet, well, "False")
    async with running_operator(client, str(fleet.plane.kubeconfig)):

        def ends(obj: JsonObject) -> bool:
            return [("until" in each, each["state"]) for each in quarantined(obj)] == [(True, "Quarantined")]

        await eventually(lambda: client.get(GPUCLASSES, "h100"), ends, what="an end, now that the signal is gone")
        # A person puts it back, against all rules.
        at = (await client.get(GPUCLASSES, "h100"))["status"]["quarantined"][0]["since"]
        await person(fleet, "h100", uncordon=[CordonRequest(Unit(sick), _later(at))])
        await of_class(fleet, "h100")
        await eventually(
            lambda: client.get(NODES, sick), lambda node: LABEL not in node["metadata"]["labels"], what="no label"
        )


async def person(
    fleet: Fleet, name: str, *, cordon: list[CordonRequest] | None = None, uncordon: list[CordonRequest] | None = None
) -> None:
    annotations: dict[str, Any] = {names.ANNOTATION_CORDON: write(cordon) if cordon else None}
    if uncordon is not None:
        annotations[names.ANNOTATION_UNCORDON] = write(uncordon)
    await fleet.client.merge_patch(GPUCLASSES, name, None, {"metadata": {"annotations": annotations}}, manager="test")


def _later(since: str) -> Any:
    return datetime.fromisoformat(since) + timedelta(seconds=1)


async def test_a_device_of_a_driver_that_a_person_takes_out_is_left_and_not_claimed_again(fleet: Fleet) -> None:
    client, node = fleet.client, "h100-0"
    await clear_devices(client)
    await client.apply(DEVICECLASSES, device_class(), manager="test")
    try:
        await client.apply(RESOURCESLICES, resource_slice(node, "gpu-0", "gpu-1", "gpu-2"), manager="driver")
        async with running_operator(client, str(fleet.plane.kubeconfig)):
            await fleet.apply(class_of_devices("devices"))
            chat = model("chat", fleet.namespace, variants=[{"class": "devices"}], scaling={"minReplicas": 1})
            await fleet.apply(chat)
            await model_with(client, fleet.namespace, "chat", "Ready", "True")
            [(old, _)] = (await replicas(fleet)).items()
            held = await claimed(fleet)
            [sick] = held.values()
            generation = await revisions(fleet)
            request = CordonRequest(Unit(node, f"gpu.test/{node}/{sick}"), datetime.now(UTC), "burn-in")
            await person(fleet, "devices", cordon=[request])
            [found] = await of_class(fleet, "devices", (node, "Quarantined"))
            assert (found["device"], found["by"], found["message"]) == (request.unit.device, "Person", "burn-in")

            def elsewhere(now: dict[str, str]) -> bool:
                return len(now) == 1 and old not in now and sick not in now.values()

            await eventually(lambda: claimed(fleet), elsewhere, what="a replica on another device, and only that one")
            assert await revisions(fleet) == generation, "nothing is rolled"

            def counted(obj: JsonObject) -> bool:
                gpus = obj["status"]["gpus"]
                return (gpus["allocatable"], gpus["free"]) == (2, 1)

            await eventually(lambda: client.get(GPUCLASSES, "devices"), counted, what="2 GPUs, 1 free")
            # More replicas than healthy devices: none takes the one that is out of use.
            await fleet.apply(
                model("chat", fleet.namespace, variants=[{"class": "devices"}], scaling={"minReplicas": 3})
            )
            await model_with(client, fleet.namespace, "chat", "Placed", "False", "NoCapacity")
            assert sick not in (await claimed(fleet)).values()
            await person(fleet, "devices")
            await eventually(lambda: claimed(fleet), lambda now: len(now) == 3, what="all three devices in use")
    finally:
        await clear_devices(client)


async def claimed(fleet: Fleet) -> dict[str, str]:
    """Pod -> the device that it has."""
    found: dict[str, str] = {}
    for claim in await fleet.all(RESOURCECLAIMS, namespace=fleet.namespace):
        results = ((claim.get("status") or {}).get("allocation") or {}).get("devices", {}).get("results") or []
        for user in (claim.get("status") or {}).get("reservedFor") or []:
            for result in results:
                found[user["name"]] = result["device"]
    return found


async def revisions(fleet: Fleet) -> list[str | None]:
    found = await fleet.all(DEPLOYMENTS, namespace=fleet.namespace)
    return [(d["metadata"].get("annotations") or {}).get("deployment.kubernetes.io/revision") for d in found]
