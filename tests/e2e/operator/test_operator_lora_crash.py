"""The operator is killed before and after its k-th write about adapters: it always ends with the same statuses."""

import asyncio
import contextlib
import json

import pytest

from shoal.api import reasons
from shoal.api.meta import JsonObject
from shoal.kube.resources import JOBS, LORA_ADAPTERS, LORA_POOLS
from shoal.runtime.operator import OperatorProcess
from tests.support.controlplane import Fleet
from tests.support.lora_fleet import adapter, adapter_with, found_at, pool, ready_for_adapters
from tests.support.mortal import Killed, MortalClient
from tests.support.operators import (
    CONFIG,
    NAMESPACE,
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

_MOST_WRITES = 20
_WIDE = "s3://adapters/wide/v1"


async def _done(fleet: Fleet) -> None:
    await adapter_with(fleet.client, fleet.namespace, "fine", "Ready", "True", reasons.ON_DEMAND)
    await adapter_with(fleet.client, fleet.namespace, "wide", "Ready", "False", reasons.RANK_TOO_HIGH)
    await eventually(
        lambda: fleet.client.get(LORA_POOLS, "pool", fleet.namespace),
        lambda p: (p.get("status") or {}).get("adapters") == {"total": 2, "available": 1, "failed": 1},
    )


async def _statuses(fleet: Fleet) -> str:
    found = [*await fleet.all(LORA_ADAPTERS, namespace=fleet.namespace), await _pool(fleet)]
    for one in found:
        for condition in one.get("status", {}).get("conditions", []):
            condition.pop("lastTransitionTime")
    told = [(o["metadata"]["name"], o.get("status")) for o in found]
    return json.dumps(told, indent=1, sort_keys=True)


async def _pool(fleet: Fleet) -> JsonObject:
    return await fleet.client.get(LORA_POOLS, "pool", fleet.namespace)


async def _apply(fleet: Fleet) -> None:
    for name in ("fine", "wide"):
        await fleet.apply(adapter(fleet.namespace, name))


async def _begin_again(fleet: Fleet) -> None:
    """Without adapters and Jobs, and counted so."""
    for name in ("fine", "wide"):
        await fleet.client.delete(LORA_ADAPTERS, name, fleet.namespace)
    for job in await fleet.all(JOBS, namespace=fleet.namespace):
        if job["metadata"]["name"].startswith("adapter-facts-"):
            await fleet.client.delete(JOBS, job["metadata"]["name"], fleet.namespace)


async def _run_until_dead_or_done(fleet: Fleet, die_at: int, *, after: bool) -> bool:
    """Returns whether the operator died."""
    client = await MortalClient.from_environment(kubeconfig=fleet.kubeconfig)
    client.die_at, client.after = die_at, after
    async with client:
        operator = OperatorProcess(client, CONFIG, NAMESPACE, identity="test", kubeconfig=fleet.kubeconfig)
        task, done = asyncio.create_task(operator.run()), asyncio.create_task(_done(fleet))
        await asyncio.wait([task, done], return_when=asyncio.FIRST_COMPLETED)
        died = task.done()
        for one in (task, done):
            one.cancel()
        with contextlib.suppress(BaseExceptionGroup, asyncio.CancelledError, Killed):
            await task
        with contextlib.suppress(asyncio.CancelledError):
            await done
        return died


async def test_killed_at_every_write_it_tells_adapters_the_same(fleet: Fleet) -> None:
    sources = ready_for_adapters(fleet)
    sources.known = {_WIDE: found_at(_WIDE, rank=128)}
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("base", fleet.namespace))
        await fleet.apply(pool(fleet.namespace))
        await model_with(fleet.client, fleet.namespace, "base", "Ready", "True", seconds=60)
        await _apply(fleet)
        await _done(fleet)
        undisturbed = await settled(lambda: _statuses(fleet))

    deaths = 0
    for after in (False, True):
        for k in range(1, _MOST_WRITES):
            await _begin_again(fleet)
            await _apply(fleet)
            died = await _run_until_dead_or_done(fleet, k, after=after)
            if died:
                deaths += 1
                if deaths == 1:
                    # The check can fail: without another operator, what the dead one left is not the same.
                    assert await _statuses(fleet) != undisturbed
            async with running_operator(fleet.client, fleet.kubeconfig):
                what = f"killed {'after' if after else 'before'} write {k}"
                await ends_as(lambda: _statuses(fleet), undisturbed, what)
            if not died:
                break
        else:
            pytest.fail(f"the operator wrote {_MOST_WRITES} times and was not done")
    # The Job, and the two adapters' statuses, on their way and at their end.
    assert deaths >= 2 * 3
