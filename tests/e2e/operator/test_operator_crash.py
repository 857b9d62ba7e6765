"""The operator is killed before and after its k-th write, for every k: it always ends with the same objects."""

import asyncio
import contextlib
import json
import re

import pytest

from shoal.api.config import Cache
from shoal.api.meta import JsonObject
from shoal.kube.resources import (
    DEPLOYMENTS,
    JOBS,
    MODELS,
    NETWORKPOLICIES,
    PDBS,
    PERSISTENTVOLUMECLAIMS,
    PERSISTENTVOLUMES,
    PODS,
    SECRETS,
)
from shoal.runtime.operator import OperatorProcess
from tests.support.controlplane import Fleet
from tests.support.mortal import Killed, MortalClient
from tests.support.operators import (
    CONFIG,
    NAMESPACE,
    condition,
    ends_as,
    eventually,
    model,
    model_with,
    running_operator,
    settled,
)

pytestmark = [
    pytest.mark.lab,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

_CHILDREN = (DEPLOYMENTS, PDBS, NETWORKPOLICIES, SECRETS, JOBS)
_SHARES = (PERSISTENTVOLUMECLAIMS, PERSISTENTVOLUMES)
"""They are the namespace's: with its last Model they go."""
_MOST_WRITES = 50
_CONFIG = CONFIG.model_copy(update={"cache": Cache(enabled=True)})
_SOURCE = {"uri": "hf://org/model"}


async def _run_until_dead_or_ready(fleet: Fleet, die_at: int, *, after: bool) -> bool:
    """Returns whether the operator died."""
    client = await MortalClient.from_environment(kubeconfig=fleet.kubeconfig)
    client.die_at, client.after = die_at, after
    async with client:
        # The same identity each time: a restarted container keeps its pod's name and need not wait for its own lease.
        operator = OperatorProcess(client, _CONFIG, NAMESPACE, identity="test", kubeconfig=fleet.kubeconfig)
        task = asyncio.create_task(operator.run())
        ready = asyncio.create_task(model_with(fleet.client, fleet.namespace, "chat", "Ready", "True"))
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        died = task.done()
        for one in (task, ready):
            one.cancel()
        with contextlib.suppress(BaseExceptionGroup, asyncio.CancelledError, Killed):
            await task
        with contextlib.suppress(asyncio.CancelledError):
            await ready
        return died


async def _objects(fleet: Fleet) -> str:
    """All that was made, without what differs from one creation to the next."""
    ns = fleet.namespace
    found = [await fleet.client.get(MODELS, "chat", ns)]
    for resource in _CHILDREN:
        found += await fleet.all(resource, namespace=ns)
    found += await fleet.all(PERSISTENTVOLUMECLAIMS, namespace=ns) + await fleet.all(PERSISTENTVOLUMES)
    uid = found[0]["metadata"]["uid"]
    kept: list[JsonObject] = []
    for obj in found:
        metadata = obj["metadata"]
        managers = sorted({(e["manager"], e.get("subresource", "")) for e in metadata["managedFields"]})
        status = obj.get("status", {}) if obj["kind"] == "Model" else {}
        for one in status.get("conditions", []):
            one.pop("lastTransitionTime")
        for one in (status, *status.get("variants", [])):
            one.pop("coldStartSeconds", None)  # measured
        for one in ("uid", "resourceVersion"):
            (obj.get("spec") or {}).get("claimRef", {}).pop(one, None)
        one = {
            "kind": obj["kind"],
            "name": metadata["name"],
            "labels": metadata.get("labels"),
            "owners": metadata.get("ownerReferences"),
            "managers": managers,
            "spec": obj.get("spec"),
            "data": sorted(obj.get("data", {})),
            "status": status,
        }
        kept.append(json.loads(json.dumps(one).replace(metadata["uid"], "OWN")))
    # The hook's token is made of the Model's uid.
    return re.sub(r'"[0-9a-f]{64}"', '"TOKEN"', json.dumps(kept, indent=1, sort_keys=True).replace(uid, "UID"))


async def _begin_again(fleet: Fleet) -> None:
    await fleet.client.delete(MODELS, "chat", fleet.namespace)
    for resource in (*_CHILDREN, PODS):  # with a pod that has read the source nothing would be read again
        await eventually(lambda r=resource: fleet.all(r, namespace=fleet.namespace), lambda left: not left)
    for resource in _SHARES:
        for obj in await fleet.all(resource):
            await fleet.client.delete(resource, obj["metadata"]["name"], obj["metadata"].get("namespace"))
        await eventually(lambda r=resource: fleet.all(r), lambda left: not left)


async def test_killed_at_every_write_it_converges_to_the_same_objects(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controllers.artifacts.KEEP_SECONDS", 3600)  # the Job is one of the objects
    ns = fleet.namespace
    engine, scaling = {"parallelism": {"tensor": 2}}, {"minReplicas": 1}  # else its silent engine is told in the end
    wanted = model("chat", ns, variants=[{"class": "h100"}], engine=engine, scaling=scaling, source=_SOURCE)
    async with running_operator(fleet.client, fleet.kubeconfig, config=_CONFIG):
        await fleet.apply(wanted)
        await model_with(fleet.client, ns, "chat", "Ready", "True")
        undisturbed = await settled(lambda: _objects(fleet))
    assert condition(await fleet.client.get(MODELS, "chat", ns), "Stalled") == {}

    deaths = 0
    for after in (False, True):
        for k in range(1, _MOST_WRITES):
            await _begin_again(fleet)
            await fleet.apply(wanted)
            died = await _run_until_dead_or_ready(fleet, k, after=after)
            if died:
                deaths += 1
                if deaths == 1:
                    # The check can fail: without another operator, what the dead one left is not the same.
                    assert await _objects(fleet) != undisturbed
            async with running_operator(fleet.client, fleet.kubeconfig, config=_CONFIG):
                what = f"killed {'after' if after else 'before'} write {k}"
                await ends_as(lambda: _objects(fleet), undisturbed, what)
            if not died:
                break
        else:
            pytest.fail(f"the operator wrote {_MOST_WRITES} times and was not done")
    # Status at first sight, the Job, the cache's volume and claim, key Secret, two policies, Deployment, scale,
    # and the statuses on the way to Ready.
    assert deaths >= 2 * 11
