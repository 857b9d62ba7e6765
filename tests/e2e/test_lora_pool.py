"""A pool on live replicas, as clients of its adapters see it: resized under load, taken away and brought back."""

import asyncio
import re
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
import openai
import pytest

from shoal.api.keys import hash_api_key
from shoal_dev.sim.signatures import signatures_in
from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

KEY = "sk-lora-pool-tests"
GROUP = "shoal.dev/v1alpha1"
ADAPTERS = {"counsel": "legal", "bard": "poet"}
"""Served name -> folder of its files."""


def own(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    namespace = {} if kind == "Tenant" else {"namespace": "demo"}
    return {"apiVersion": GROUP, "kind": kind, "metadata": {"name": name} | namespace, "spec": spec}


def pool(**spec: Any) -> dict[str, Any]:
    return own("LoRAPool", "tuned", modelRef={"name": "tuned"}, maxRank=8, **spec)


@pytest.fixture(scope="module", autouse=True)
def tuned(fleet: Fleet) -> Generator[None]:
    """A base on two replicas, a pool with two adapters, and a tenant that may use all of it."""
    fleet.until_alone()  # else a class that gets free meanwhile draws the replicas to it
    fleet.apply(pool(slotsPerReplica=4, cachedPerReplica=8))
    fleet.make_model("tuned", scaling={"minReplicas": 2, "maxReplicas": 2}, drainSeconds=60)
    tenant = own(
        "Tenant",
        "lora-pool-tests",
        keys=[{"name": "k", "sha256": hash_api_key(KEY)}],
        models=[{"namespace": "demo", "name": "tuned"}],
    )
    adapters = [
        own(
            "LoRAAdapter",
            name,
            poolRef={"name": "tuned"},
            source={"uri": f"file:///opt/shoal/adapters/{folder}"},
            residency="Warm",
            minCopies=2,
            tenants=["lora-pool-tests"],
        )
        for name, folder in ADAPTERS.items()
    ]
    fleet.apply(tenant, *adapters)
    try:
        until_pooled(fleet, 4)
        yield
    finally:
        fleet.kubectl("delete", "loraadapters.shoal.dev", *ADAPTERS, "-n", "demo", "--ignore-not-found")
        fleet.kubectl("delete", "lorapools.shoal.dev", "tuned", "-n", "demo", "--ignore-not-found")
        fleet.kubectl("delete", "tenants.shoal.dev", "lora-pool-tests")
        fleet.delete_model("tuned")


def conditions(fleet: Fleet, kind: str, name: str) -> dict[str, dict[str, Any]]:
    found = fleet.get(f"{kind}.shoal.dev", "-n", "demo", "--field-selector", f"metadata.name={name}")
    return {c["type"]: c for one in found for c in one.get("status", {}).get("conditions", [])}


def until_resident(fleet: Fleet) -> None:
    def reason(name: str) -> str:
        return conditions(fleet, "loraadapters", name).get("Ready", {}).get("reason", "")

    until(
        lambda: all(reason(name) == "Resident" for name in ADAPTERS),
        180,
        lambda: [conditions(fleet, "loraadapters", name) for name in ADAPTERS],
    )


def until_pooled(fleet: Fleet, slots: int) -> None:
    """Both replicas have the pool's arguments, and its adapters."""
    wanted = {f"--max-loras-per-batch={slots}"}
    until(lambda: len(now := engines(fleet)) == 2 and set(now.values()) == wanted, 240, lambda: engines(fleet))
    until(
        lambda: conditions(fleet, "lorapools", "tuned").get("Ready", {}).get("reason") == "PoolReady",
        120,
        lambda: conditions(fleet, "lorapools", "tuned"),
    )
    until_resident(fleet)


def engines(fleet: Fleet) -> dict[str, str]:
    """Uid of each engine pod that stays -> its --max-loras-per-batch."""
    found = fleet.get("pods", "-n", "demo", "-l", "shoal.dev/model=tuned,app.kubernetes.io/component=engine")
    return {
        p["metadata"]["uid"]: next(
            (a for a in p["spec"]["containers"][0]["args"] if a.startswith("--max-loras-per-batch")), ""
        )
        for p in found
        if "deletionTimestamp" not in p["metadata"]
    }


@dataclass
class Clients:
    """Clients of several models that ask again and again, and what they heard."""

    url: str
    models: tuple[str, ...]
    heard: dict[str, set[tuple[str, ...]]] = field(default_factory=dict[str, set[tuple[str, ...]]])
    """Model -> the signatures that its answers were made of."""
    answers: int = 0
    problems: list[str] = field(default_factory=list[str])
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        sdk = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, timeout=120, max_retries=0)
        async with sdk as client, asyncio.TaskGroup() as group:
            for model in self.models:
                group.create_task(self._again(client, model))

    async def _again(self, client: openai.AsyncOpenAI, model: str) -> None:
        while not self.enough.is_set():
            try:
                text = await ask(client, model)
            except (openai.APIError, httpx.HTTPError) as error:
                self.problems.append(f"{model}: {error}")
                await asyncio.sleep(1)
            else:
                self.answers += 1
                self.heard.setdefault(model, set()).add(tuple(sorted(set(signatures_in(text)))))


async def ask(client: openai.AsyncOpenAI, model: str) -> str:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Tell me something long."}], max_tokens=48
    )
    return answer.choices[0].message.content or ""


@contextmanager
def asking(fleet: Fleet, *models: str) -> Generator[Clients]:
    """One client of each model asks meanwhile, in a thread of their own."""
    clients = Clients(f"http://127.0.0.1:{fleet.lab.forward_port()}", models)
    thread = threading.Thread(target=lambda: asyncio.run(clients.run()))
    thread.start()
    try:
        yield clients
    finally:
        clients.enough.set()
        thread.join(timeout=180)
        assert not thread.is_alive()


@pytest.mark.long
def test_a_pool_is_resized_under_load_and_every_answer_is_of_the_right_weights(fleet: Fleet) -> None:
    before = engines(fleet)
    with asking(fleet, "demo/tuned", *ADAPTERS, *ADAPTERS) as clients:
        until(lambda: clients.answers > 10, 60, lambda: clients.problems)
        fleet.apply(pool(slotsPerReplica=6, cachedPerReplica=12))
        until_pooled(fleet, 6)
        assert not engines(fleet).keys() & before.keys()
        so_far = clients.answers
        until(lambda: clients.answers > so_far + 10, 60, lambda: clients.problems)

    assert clients.problems == []
    assert clients.heard["demo/tuned"] == {()}
    for name in ADAPTERS:
        # Before, meanwhile and after: one adapter's weights, and in every answer.
        (signature,) = clients.heard[name]
        assert len(signature) == 1
    assert clients.heard["counsel"] != clients.heard["bard"]


def test_a_pool_that_goes_takes_its_adapters_out_and_brings_them_back(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.lab.forward_port()}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=120, max_retries=0)

    def status(model: str) -> int:
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120
        )
        return answer.status_code

    with asking(fleet, "demo/tuned") as base:
        fleet.kubectl("delete", "lorapools.shoal.dev", "tuned", "-n", "demo")
        # Never the base in its place, from the moment on that the gateway has heard of it.
        until(lambda: status("counsel") >= 400, 60)
        until(
            lambda: conditions(fleet, "loraadapters", "counsel").get("Ready", {}).get("reason") == "PoolNotFound",
            60,
            lambda: conditions(fleet, "loraadapters", "counsel"),
        )
        assert "there is no LoRAPool demo/tuned" in conditions(fleet, "loraadapters", "counsel")["Ready"]["message"]
        until(lambda: set(engines(fleet).values()) == {""} and len(engines(fleet)) == 2, 240, lambda: engines(fleet))
        assert status("counsel") >= 400
        assert status("bard") >= 400
        assert not {"counsel", "bard"} & {m.id for m in client.models.list()}

        fleet.apply(pool(slotsPerReplica=4, cachedPerReplica=8))
        until_pooled(fleet, 4)
        until(lambda: status("counsel") == 200, 60)
    assert base.problems == []
    assert base.heard["demo/tuned"] == {()}


def extra(fleet: Fleet, argument: str) -> None:
    spec = f'{{"spec":{{"engine":{{"extraArgs":["{argument}"]}}}}}}'
    fleet.kubectl("patch", "models.shoal.dev", "tuned", "-n", "demo", "--type=merge", "-p", spec)


def test_an_argument_that_does_not_go_with_adapters_is_refused_at_once(fleet: Fleet) -> None:
    """By the chart's own policies: nobody has applied any."""
    before = engines(fleet)
    refusals = {
        "--attn-dp-size=2": "with parallelism.attentionData (--attn-dp-size) SGLang runs only adapters that are never",
        "--load-format=runai_streamer": "with this --load-format SGLang cannot read adapters: use auto",
    }
    for argument, words in refusals.items():
        with pytest.raises(click.ClickException, match=re.escape(f"LoRAPool tuned gives this Model adapters: {words}")):
            extra(fleet, argument)
    assert engines(fleet) == before


def test_an_argument_that_does_not_go_with_adapters_is_told_on_the_pool(fleet: Fleet) -> None:
    """One that may go with what the platform gives every engine, which admission does not see."""
    extra(fleet, "--moe-runner-backend=lora_triton")
    until(
        lambda: conditions(fleet, "lorapools", "tuned").get("Accepted", {}).get("reason") == "EngineRefuses",
        60,
        lambda: conditions(fleet, "lorapools", "tuned"),
    )
    message = conditions(fleet, "lorapools", "tuned")["Accepted"]["message"]
    assert "--moe-runner-backend=lora_triton needs another LoRA backend than SGLang's default: leave it out" in message
    extra(fleet, "--load-format=safetensors")
    until_pooled(fleet, 4)


def test_a_pool_at_zero_wakes_for_an_adapter_whose_own_weights_answer(fleet: Fleet) -> None:
    with asking(fleet, "counsel") as before:
        until(lambda: before.answers > 0, 60, lambda: before.problems)
    scaling = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 5, "stabilizationSeconds": 3}
    fleet.make_model("tuned", scaling=scaling, drainSeconds=60)
    try:
        until(lambda: not engines(fleet), 180, lambda: engines(fleet))
        assert conditions(fleet, "loraadapters", "counsel")["Available"]["status"] == "True"
        with asking(fleet, "counsel") as woken:
            until(lambda: woken.answers > 0, 120, lambda: (woken.problems, engines(fleet)))
        assert woken.problems == []
        assert woken.heard["counsel"] == before.heard["counsel"]
    finally:
        fleet.make_model("tuned", scaling={"minReplicas": 2, "maxReplicas": 2}, drainSeconds=60)
    until_pooled(fleet, 4)


def test_what_is_deleted_or_taken_from_a_tenant_is_refused_at_once_and_the_base_goes_on(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.lab.forward_port()}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=120, max_retries=0)

    def asked(model: str) -> int:
        try:
            client.completions.create(model=model, prompt="hi", max_tokens=2)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    others = '{"spec":{"tenants":["lora-pool-others"]}}'
    with asking(fleet, "demo/tuned") as base:
        for name, command in (
            ("counsel", ("patch", "loraadapters.shoal.dev", "counsel", "-n", "demo", "--type=merge", "-p", others)),
            ("bard", ("delete", "loraadapters.shoal.dev", "bard", "-n", "demo")),
        ):
            assert asked(name) == 200
            fleet.kubectl(*command)
            done = time.monotonic()
            until(lambda name=name: asked(name) == 404, 20)
            print(
                f"{command[0]} {name}: 404 at most {1000 * (time.monotonic() - done):.0f} ms after the command returned"
            )
        so_far = base.answers
        until(lambda: base.answers > so_far + 3, 60, lambda: base.problems)
    assert base.problems == []
