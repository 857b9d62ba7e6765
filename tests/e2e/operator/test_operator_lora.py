"""LoRAAdapters of a pool, as a person and as agents see them: what is told, what is loaded where, what is written."""

import asyncio
import json
from itertools import repeat

import pytest

from shoal.api import reasons
from shoal.api.loraadapter import engine_name
from shoal.api.meta import API_VERSION, JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.resources import LORA_ADAPTERS, LORA_POOLS, TENANTS
from tests.support.addresses import pod_ip
from tests.support.controlplane import Fleet
from tests.support.lora_fleet import (
    adapter,
    adapter_with,
    found_at,
    pool,
    pool_agent,
    ready_for_adapters,
    revision_of,
    unreachable,
)
from tests.support.operators import (
    condition,
    eventually,
    model,
    model_with,
    running_operator,
    with_condition,
    writes_at_rest,
)
from tests.support.streams import until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
]

ENGINE_IP = pod_ip(3)


def name_of(fleet: Fleet, name: str, version: str = "v1") -> str:
    return engine_name(f"{fleet.namespace}/{name}", revision_of(f"s3://adapters/{name}/{version}"))


async def pool_with(fleet: Fleet, kind: str, status: str, reason: str | None = None, name: str = "pool") -> JsonObject:
    return await with_condition(fleet.client, LORA_POOLS, fleet.namespace, name, kind, status, reason)


async def test_adapters_become_available_are_loaded_switched_and_dropped(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    sources = ready_for_adapters(fleet)
    fleet.kubelet.pod_ips = repeat(ENGINE_IP)
    async with pool_agent(ENGINE_IP) as agent, running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("base", ns))
        await fleet.apply(pool(ns))
        await model_with(client, ns, "base", "Ready", "True")
        adapters = [adapter(ns, "support"), adapter(ns, "legal"), adapter(ns, "poet", residency="Warm")]
        await asyncio.gather(*(fleet.apply(one) for one in adapters))
        for name in ("support", "legal"):
            told = await adapter_with(client, ns, name, "Ready", "True", reasons.ON_DEMAND)
            assert condition(told, "Available")["status"] == "True"
            assert told["status"]["revision"] == revision_of(f"s3://adapters/{name}/v1")
            assert (told["status"]["rank"], told["status"]["servedNames"]) == (16, [name])
        await adapter_with(client, ns, "poet", "Ready", "True", reasons.RESIDENT)
        assert agent.holds == [name_of(fleet, "poet")]
        assert len(sources.batches) <= 2, "applied together, read together"
        await eventually(
            lambda: client.get(LORA_POOLS, "pool", ns),
            lambda p: (p.get("status") or {}).get("adapters") == {"total": 3, "available": 3, "failed": 0},
        )
        await pool_with(fleet, "Ready", "True", reasons.POOL_READY)

        # A newer revision is loaded beside the one that answers, and takes over once it is there.
        agent.loads = False
        await fleet.apply(adapter(ns, "poet", "s3://adapters/poet/v2", residency="Warm"))
        both = {name_of(fleet, "poet"), name_of(fleet, "poet", "v2")}
        await until(lambda: set(agent.holds) == both)
        told = await eventually(
            lambda: client.get(LORA_ADAPTERS, "poet", ns),
            lambda a: (a["status"].get("next") or {}).get("revision") == revision_of("s3://adapters/poet/v2"),
            what="the next revision",
        )
        assert told["status"]["revision"] == revision_of("s3://adapters/poet/v1")
        assert condition(told, "Ready")["reason"] == reasons.SWITCHING
        agent.loads = True
        agent.tell()
        told = await adapter_with(client, ns, "poet", "Ready", "True", reasons.RESIDENT)
        assert told["status"]["revision"] == revision_of("s3://adapters/poet/v2")
        assert "next" not in told["status"]
        await until(lambda: agent.holds == [name_of(fleet, "poet", "v2")])

        # An agent that was started anew is told again; one of a deleted adapter does not hold it.
        agent.start()
        told_before = len(agent.floors)
        await until(lambda: len(agent.floors) > told_before and agent.holds == [name_of(fleet, "poet", "v2")])
        await client.delete(LORA_ADAPTERS, "poet", ns)
        await until(lambda: agent.holds == [])

        # Every field has one writer.
        for resource, name, manager in (
            (LORA_ADAPTERS, "legal", "shoal-loraadapter"),
            (LORA_POOLS, "pool", "shoal-lorapool"),
        ):
            fields = (await client.get(resource, name, ns))["metadata"]["managedFields"]
            assert {m["manager"] for m in fields} == {"person", manager}


async def test_each_that_cannot_be_used_says_why_and_disturbs_nobody(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    sources = ready_for_adapters(fleet)
    bad = {name: f"s3://adapters/{name}/v1" for name in ("wide", "embeds", "alien", "away")}
    sources.known = {
        bad["wide"]: found_at(bad["wide"], rank=128),
        bad["embeds"]: found_at(bad["embeds"], modules={"q_proj": (4096, 4096), "embed_tokens": (16, 4096)}),
        bad["alien"]: found_at(bad["alien"], modules={"q_proj": (2048, 2048)}),
        bad["away"]: unreachable(bad["away"]),
    }
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("base", ns))
        await fleet.apply(pool(ns))
        await model_with(client, ns, "base", "Ready", "True", seconds=60)
        for name in (*bad, "fine"):
            await fleet.apply(adapter(ns, name))
        await fleet.apply(adapter(ns, "lost", pool="nowhere"))
        await asyncio.sleep(1.1)  # ages are told in seconds
        await fleet.apply(adapter(ns, "twin", servedNames=["fine"]))
        await fleet.apply(model("late", ns, servedNames=["fine", "late"]))
        for name, reason, words in (
            ("wide", reasons.RANK_TOO_HIGH, "128 > 64 of pool"),
            ("embeds", reasons.MODULES_NOT_IN_POOL, "embed_tokens"),
            ("alien", reasons.BASE_MISMATCH, "trained for another base"),
            ("away", reasons.SOURCE_UNREACHABLE, "no answer"),
            ("lost", reasons.POOL_NOT_FOUND, "there is no LoRAPool"),
        ):
            told = await adapter_with(client, ns, name, "Ready", "False", reason)
            assert words in condition(told, "Ready")["message"]
            assert condition(told, "Accepted")["reason"] == reason
            assert "revision" not in told["status"]
        await adapter_with(client, ns, "fine", "Available", "True")
        # Of the two adapters the older one would have it; a Model comes before both.
        twin = await eventually(
            lambda: client.get(LORA_ADAPTERS, "twin", ns),
            lambda a: f"belongs to Model {ns}/late" in condition(a, "Accepted")["message"],
            what="the Model's name",
        )
        assert "servedNames" not in twin["status"] or not twin["status"]["servedNames"]
        fine = await adapter_with(client, ns, "fine", "Accepted", "True", reasons.NAME_CLAIMED)
        assert f"Model {ns}/late; '{ns}/fine' always means this one" in condition(fine, "Accepted")["message"]
        late = await model_with(client, ns, "late", "Accepted", "True", reasons.VALID)
        assert late["status"]["servedNames"] == ["fine", "late"], "a Model comes before every adapter"
        listed = fleet.plane.run_kubectl("get", "lora", f"-n={ns}")
        assert "RankTooHigh" in listed
        await eventually(
            lambda: client.get(LORA_POOLS, "pool", ns),
            lambda p: (p.get("status") or {}).get("adapters") == {"total": 6, "available": 2, "failed": 3},
        )

        # A second pool of the same Model has nothing; the first one's adapters go on, until it is deleted.
        await fleet.apply(pool(ns, "second"))
        told = await pool_with(fleet, "Accepted", "False", reasons.POOL_CLAIMED, name="second")
        assert f"LoRAPool {ns}/pool" in condition(told, "Accepted")["message"]
        await client.delete(LORA_POOLS, "pool", ns)
        told = await adapter_with(client, ns, "fine", "Ready", "False", reasons.POOL_NOT_FOUND)
        assert told["status"]["revision"], "what was read is kept, should the pool come back"
        await pool_with(fleet, "Accepted", "True", name="second")


async def test_a_tenant_that_is_listed_and_does_not_grant_is_named_until_it_does(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    ready_for_adapters(fleet)
    who = f"acme-{ns}"[:63]
    granting: JsonObject = {
        "apiVersion": API_VERSION,
        "kind": "Tenant",
        "metadata": {"name": who},
        "spec": {"keys": [], "adapters": [{"namespace": ns, "names": ["shared", "none"]}]},
    }

    async def adapters_ready(reason: str) -> JsonObject:
        told = await eventually(
            lambda: client.get(TENANTS, who), lambda t: condition(t, "AdaptersReady").get("reason") == reason
        )
        return condition(told, "AdaptersReady")

    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("base", ns))
        await fleet.apply(pool(ns))
        await fleet.apply(adapter(ns, "shared", tenants=[who, "nobody"]))
        told = await adapter_with(client, ns, "shared", "Accepted", "True", reasons.NOT_GRANTED)
        assert condition(told, "Accepted")["message"].startswith(f"for {who}, nobody it does not exist")
        await fleet.apply(granting)
        await eventually(
            lambda: client.get(LORA_ADAPTERS, "shared", ns),
            lambda a: condition(a, "Accepted")["message"].startswith("for nobody it"),
            what="the other one only",
        )
        assert (await adapters_ready(reasons.ADAPTER_NOT_FOUND))["message"].startswith(
            f"no adapter that lists this tenant: {ns}/none; "
        )
        await client.merge_patch(LORA_ADAPTERS, "shared", ns, {"spec": {"tenants": [who]}}, manager="person")
        await client.merge_patch(TENANTS, who, None, {"spec": {"adapters": [{"namespace": ns}]}}, manager="person")
        await adapter_with(client, ns, "shared", "Accepted", "True", reasons.VALID)
        await adapters_ready(reasons.ACTIVE)
        await client.delete(LORA_ADAPTERS, "shared", ns)
        await adapters_ready(reasons.ADAPTER_NOT_FOUND)


async def test_a_restart_reads_nothing_again_and_a_resize_reads_nothing(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    sources = ready_for_adapters(fleet)
    sources.known = {"s3://adapters/wide/v1": found_at("s3://adapters/wide/v1", rank=128)}
    fleet.kubelet.pod_ips = repeat(ENGINE_IP)
    async with pool_agent(ENGINE_IP) as agent:
        async with running_operator(client, fleet.kubeconfig):
            await fleet.apply(model("base", ns))
            await fleet.apply(pool(ns))
            await model_with(client, ns, "base", "Ready", "True", seconds=60)
            for name in ("wide", "legal"):
                await fleet.apply(adapter(ns, name))
            await fleet.apply(adapter(ns, "kept", residency="Pinned"))
            await adapter_with(client, ns, "kept", "Ready", "True", reasons.RESIDENT)
            await adapter_with(client, ns, "legal", "Ready", "True")
            await adapter_with(client, ns, "wide", "Ready", "False", reasons.RANK_TOO_HIGH)
            await pool_with(fleet, "Ready", "True")
            await writes_at_rest(client)
        read, told = len(sources.batches), len(agent.floors)
        async with (
            await KubeClient.from_environment(kubeconfig=fleet.kubeconfig) as own,
            running_operator(own, fleet.kubeconfig),
        ):
            await until(lambda: len(agent.floors) > told, 60)
            assert agent.holds == [name_of(fleet, "kept")]
            await asyncio.sleep(4)
            written = {what: n for (_, what), n in own.writes.items() if what not in ("leases", "secrets")}
            assert not written, f"a restart writes nothing: {written}"
            assert len(sources.batches) == read, "and reads nothing again"

            fleet.kubelet.hold = True  # a roll that is over at once is seen by nobody
            await fleet.apply(pool(ns, slotsPerReplica=16))
            await pool_with(fleet, "Ready", "False", reasons.ROLLING)
            fleet.kubelet.hold = False
            await pool_with(fleet, "Ready", "True")
            assert len(sources.batches) == read, "how many adapters there may be is nothing to their files"
            await fleet.apply(pool(ns, slotsPerReplica=16, maxRank=128))
            await adapter_with(client, ns, "wide", "Ready", "True", reasons.ON_DEMAND)
            legal = json.dumps((await client.get(LORA_ADAPTERS, "legal", ns))["status"])
            assert revision_of("s3://adapters/legal/v1") in legal
