"""What an engine counts itself beside what was recorded of requests, however they end: through every kind of engine,
a gateway, an agent and a ledger.

Printed at the end (`pytest -s`): the engine's tokens, billed ones, and the difference of each kind of end.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from shoal.api import keys, names
from shoal.core.routing.resolve import ServedModel
from shoal.engine.port import EngineClient, Loads
from shoal.engine.wires import wire_of
from shoal.kube.client import KubeClient
from shoal.ledger.parse import parse
from shoal.ledger.reconcile import watch
from shoal.ledger.reconcile.routes import Routes
from shoal.ledger.reconcile.watch import Reconciler
from shoal.ledger.store import LedgerStore
from shoal.metering.spoolreader import SpoolReader
from shoal.net.installkey import KeyRing
from shoal.net.stream import StreamPeer
from tests.contract.conftest import KINDS, Client
from tests.support import envoy
from tests.support.agentpod import Pod, make_quick
from tests.support.behaviour import WORDS
from tests.support.engines import ADMIN_KEY, MAX_RUNNING, SERVED, EngineProcess, Kind, running_engine
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.gateway import API_KEY, INSTALL_KEY, GatewayUnderTest, gateway, replica, tenant
from tests.support.gateway_process import FakeApiServer, kubeconfig
from tests.support.queryapi import asked
from tests.support.rolekeys import give
from tests.support.waiting import until_async

MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None)
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 8,
    "ignore_eos": True,
}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "Count to ten.", "max_tokens": 6, "ignore_eos": True}


class OneKey(KeyRing):
    """The engine of these tests has a key of its own, which no install key leads to."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


@dataclass(slots=True)
class Fleet:
    """One engine with its agent, a gateway before it, and a ledger that hears of both."""

    engine: EngineProcess
    front: GatewayUnderTest
    store: LedgerStore
    asking: EngineClient
    reconciler: Reconciler
    agent: StreamPeer
    tells_at_abort: bool
    """Whether the engine ends a request by its id and then says what it counted. Else its connection is closed, and
    what it counted until then is in no record."""
    shipped: int = 0
    report: list[str] = field(default_factory=list[str])

    async def ship(self) -> None:
        """What is in the gateway's spool, to the ledger."""
        await self.front.spool.flush()
        reader = SpoolReader(self.front.settings.spool_dir)
        try:
            rows = list(reader.after(self.shipped))
        finally:
            reader.close()
        if rows:
            self.shipped = rows[-1].seq
            bodies = [orjson.loads(row.record.model_dump_json(by_alias=True)) for row in rows]
            taken = await self.store.take([parse(body, 0) for body in bodies])
            assert taken.aside == 0

    async def row(self) -> dict[str, Any]:
        """Of this engine, as the ledger says it once it has heard what the engine says of itself now."""
        async with asyncio.timeout(60):
            while True:
                now = await self.asking.counters()
                answer = await self._ask()
                if answer and (answer["engineInput"], answer["engineOutput"]) == (
                    now.prompt_tokens,
                    now.generation_tokens,
                ):
                    return answer
                await asyncio.sleep(0.1)

    async def _ask(self) -> dict[str, Any] | None:
        routes = Routes(self.store, lambda: self.reconciler.coverage, lambda: time.time_ns() // 1_000_000)
        answer = await routes.unattributed(asked(names.UNATTRIBUTED_PATH, by="engine"))
        assert isinstance(answer.body, bytes)
        rows = orjson.loads(answer.body)["rows"]
        return rows[0] if rows else None

    async def hear_the_agent(self) -> None:
        """From now on the gateway has a stream to the agent, and may ask it."""
        self.front.fleet.streams.start()
        self.front.fleet.streams.set_peers([self.agent])
        await until_async(lambda: bool(self.front.fleet.streams.keys()))

    async def loads(self) -> Loads:
        """The engine's load now."""
        return await self.asking.loads()

    async def idle(self) -> None:
        async with asyncio.timeout(60):
            while (loads := await self.loads()).running or loads.waiting:
                await asyncio.sleep(0.05)

    async def counted(self) -> None:
        """Waits until the engine's counters stand still: it counts a moment after its last token."""
        async with asyncio.timeout(60):
            before = None
            while before != (now := await self.asking.counters()):
                before = now
                await asyncio.sleep(0.4)

    async def difference(self, what: str, act: Callable[[], Awaitable[None]]) -> dict[str, int]:
        """By how much each figure of the engine's row grew while `act` went on."""
        before = await self.row()
        await act()
        await self.idle()
        await self.counted()
        await self.ship()
        after = await self.row()
        fields = [name for name in after if name.endswith(("Input", "Output"))]
        grown = {name: after[name] - before[name] for name in fields}
        for of in ("Input", "Output"):
            assert after[f"billed{of}"] + after[f"unattributed{of}"] == after[f"engine{of}"]
        self.report.append(
            f"{self.engine.kind:7} {what:34} engine {grown['engineInput']:5} +{grown['engineOutput']:5}"
            f"  billed {grown['billedInput']:5} +{grown['billedOutput']:5}"
            f"  unattributed {grown['unattributedInput']:5} +{grown['unattributedOutput']:5}"
            f"  (of that not billed {grown['notBilledInput']:4} +{grown['notBilledOutput']:4})"
        )
        return grown


@pytest.fixture
async def fleet(any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    engine, words = any_client.engine, any_client.words
    wire = wire_of(words.name)
    assert wire is not None
    make_quick(monkeypatch)
    for name in ("BUSY_SECONDS", "IDLE_SECONDS", "COUNTERS_SECONDS"):
        # Often enough for a test. Each question takes time of the engine's one HTTP loop.
        monkeypatch.setattr(f"shoal.agent.observe.{name}", 0.2)
    monkeypatch.setattr(watch, "ROUND_SECONDS", 0.1)
    server = FakeApiServer()
    server.crds = True
    server.objects["gpuclasses"] = []
    (tmp_path / "run").mkdir()
    pod = Pod(tmp_path / "run", engine_url=engine.url, kind=words.kind)
    callers = {role: keys.derive(INSTALL_KEY, role, MODEL.uid) for role in ("ledger", "gateway")}
    pod.keys.write_text(json.dumps({"callers": callers, "engine": ENGINE_KEY, "admin": ADMIN_KEY}))
    pod.boot("boot-1")
    async with AsyncExitStack() as stack:
        await server.up()
        stack.push_async_callback(server.down)
        await stack.enter_async_context(pod.running())
        front = await stack.enter_async_context(gateway(tmp_path))
        front.models[SERVED] = MODEL
        front.tenants["acme"] = tenant(models=[SERVED])
        front.pods[f"{SERVED}-1"] = replica(1, MODEL, engine=words.name)
        front.ports["pod-1"] = engine.port
        front.app.key_ring = OneKey(tmp_path)
        front.changed()
        front.hear(1)
        await server.change(
            "models", {"metadata": {"name": "tiny", "namespace": SERVED.partition("/")[0], "uid": MODEL.uid}}
        )
        await server.change("pods", _pod())
        kube = await KubeClient.from_environment(kubeconfig=kubeconfig(tmp_path, server))
        await stack.enter_async_context(kube)
        store = LedgerStore(f"sqlite:///{tmp_path}/ledger.sqlite")
        store.start()
        stack.push_async_callback(store.stop)
        await until_async(lambda: store.error is None)
        (tmp_path / "ledger-keys").mkdir()
        give(tmp_path / "ledger-keys", INSTALL_KEY, "ledger")
        ring = KeyRing(tmp_path / "ledger-keys")
        ring.refresh()
        reconciler = Reconciler(kube, ring, store, agent_port=int(pod.url.rpartition(":")[2]))
        task = asyncio.create_task(reconciler.run())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        asking = words.kind.agent.connect(session, engine.url, api_key=ENGINE_KEY, admin_key=ADMIN_KEY).client
        peer = StreamPeer("pod-1", "tiny-1", "127.0.0.1", callers["gateway"], int(pod.url.rpartition(":")[2]))
        it = Fleet(engine, front, store, asking, reconciler, peer, wire.aborts)
        try:
            yield it
        finally:
            await front.fleet.streams.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if it.report:
                print("\n" + "\n".join(it.report))


def _pod() -> dict[str, Any]:
    labels = {
        names.LABEL_MODEL: "tiny",
        names.LABEL_MODEL_UID: MODEL.uid,
        names.LABEL_GPU_CLASS: "l4-24gb",
        names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }
    return {
        "metadata": {"name": "tiny-1", "namespace": SERVED.partition("/")[0], "uid": "pod-1", "labels": labels},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", "podIP": "127.0.0.1"},
    }


def nobody_knows(grown: dict[str, int]) -> None:
    """Of a request that was left: what it would have been billed is in no record, and the ledger says so."""
    assert grown["billedInput"] == grown["billedOutput"] == 0
    assert grown["engineInput"] == grown["unattributedInput"] > 0
    assert grown["estimatedInput"] == grown["notBilledInput"] > 0


async def test_what_was_answered_is_what_the_engine_counted(fleet: Fleet):
    async def ask(body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        response = await fleet.front.post(body, path)
        assert response.status == 200, await response.text()
        await response.read()

    whole = {
        "answers": lambda: ask(CHAT),
        "answers again, from its cache": lambda: ask(CHAT),
        "a stream": lambda: ask({**CHAT, "stream": True}),
        "a stream of completions": lambda: ask({**PROMPT, "stream": True}, "/v1/completions"),
        "two prompts": lambda: ask({**PROMPT, "prompt": ["a b c", "d e"]}, "/v1/completions"),
    }
    for what, act in whole.items():
        grown = await fleet.difference(what, act)
        assert grown["engineOutput"] > 0
        assert (grown["unattributedInput"], grown["unattributedOutput"]) == (0, 0), what

    async def refused() -> None:
        response = await fleet.front.post({"model": "tiny", "stream": True})
        assert response.status == 400
        await response.read()

    async def probed() -> None:
        async with fleet.front.session.get(fleet.engine.url + WORDS[fleet.engine.kind].health_path) as response:
            assert response.status == 200

    for what, act in {"a request that it refuses": refused, "a health check": probed}.items():
        assert not any((await fleet.difference(what, act)).values()), what


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_to_one_prompt_count_it_once_more_each(fleet: Fleet, stream: bool):
    async def ask() -> None:
        response = await fleet.front.post({**PROMPT, "n": 2, "stream": stream}, "/v1/completions")
        assert response.status == 200, await response.text()
        await response.read()

    grown = await fleet.difference(f"two answers{', stream' if stream else ''}", ask)
    # Engines count the prompt for each answer, and SGLang for the request that brings it into its cache, too.
    times = WORDS[fleet.engine.kind].differences.prompt_of_two
    assert grown["engineInput"] == times * grown["billedInput"]
    assert grown["engineOutput"] == grown["billedOutput"] == 12
    assert grown["unattributedOutput"] == 0


async def test_clients_that_leave(fleet: Fleet):
    front = fleet.front

    async def mid_stream() -> None:
        response = await front.post({**CHAT, "stream": True, "max_tokens": 3000})
        for _ in range(12):
            await response.content.readline()
        response.close()
        await front.records(count=1)

    grown = await fleet.difference("left in mid-stream", mid_stream)
    assert grown["billedInput"] == grown["engineInput"] > 0
    assert 0 < grown["billedOutput"] <= grown["engineOutput"]


@pytest.mark.parametrize("body", [CHAT, PROMPT, {**PROMPT, "prompt": ["a b c", "d e"]}])
async def test_clients_that_leave_while_a_whole_answer_is_made(fleet: Fleet, body: dict[str, Any]):
    several = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"

    async def while_it_is_answered() -> None:
        task = asyncio.create_task(fleet.front.post({**body, "max_tokens": 3000}, path))
        async with asyncio.timeout(60):
            while (await fleet.loads()).running != several:
                await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (record, *_) = await fleet.front.records()
        assert record.data.outcome == "cancelled"

    await fleet.hear_the_agent()
    grown = await fleet.difference("left while a whole answer was made", while_it_is_answered)
    assert grown["engineOutput"] < 3000 * several, "the engine did not compute to the end for nobody"
    if fleet.tells_at_abort:
        assert grown["billedInput"] == grown["engineInput"] > 0
        assert grown["billedOutput"] == grown["engineOutput"] > 0
        assert grown["estimatedInput"] == 0
    else:
        nobody_knows(grown)


async def test_clients_that_leave_a_proxy(fleet: Fleet):
    """An ingress closes its connection to the gateway when the client leaves: that is all that the gateway hears."""
    front = fleet.front
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with envoy.in_front_of(front.server.port) as proxy:
        url = f"{proxy}/v1/chat/completions"

        async def while_it_is_answered() -> None:
            body = {**CHAT, "max_tokens": 3000}
            async with aiohttp.ClientSession() as client:
                task = asyncio.create_task(client.post(url, json=body, headers=headers))
                async with asyncio.timeout(60):
                    while not (await fleet.loads()).running:
                        await asyncio.sleep(0.1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            (record,) = await front.records()
            assert record.data.outcome == "cancelled"
            if fleet.tells_at_abort:
                assert record.data.count_source == "final"
                assert record.data.output_tokens is not None
                assert 0 < record.data.output_tokens < 3000

        await fleet.hear_the_agent()
        grown = await fleet.difference("left a proxy while a whole answer was made", while_it_is_answered)
        assert grown["engineOutput"] < 3000, "the engine did not compute to the end for nobody"
        if fleet.tells_at_abort:
            assert grown["billedInput"] == grown["engineInput"] > 0
            assert grown["billedOutput"] == grown["engineOutput"] > 0
            assert grown["estimatedInput"] == 0
        else:
            nobody_knows(grown)
        # The proxy goes on for others.
        async with aiohttp.ClientSession() as client, client.post(url, json=CHAT, headers=headers) as response:
            assert response.status == 200, await response.text()


async def test_clients_that_leave_where_the_agent_is_away(fleet: Fleet):
    async def while_it_is_answered() -> None:
        task = asyncio.create_task(fleet.front.post({**CHAT, "max_tokens": 400}))
        async with asyncio.timeout(60):
            while not (await fleet.loads()).running:
                await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fleet.front.records()

    nobody_knows(await fleet.difference("the same, and the agent is away", while_it_is_answered))


@pytest.mark.parametrize("any_engine", KINDS, indirect=True)
async def test_requests_that_are_aborted(fleet: Fleet, any_client: Client):
    """vLLM has no endpoint that aborts."""
    front, client = fleet.front, any_client

    async def aborted(requests: int) -> None:
        """Each is sent again, and given up by the engine again."""
        tasks = [asyncio.create_task(front.post({**CHAT, "max_tokens": 3000})) for _ in range(requests)]
        async with asyncio.timeout(60):
            while not all(task.done() for task in tasks):
                loads = await fleet.loads()
                if loads.running and (loads.waiting or requests <= MAX_RUNNING):
                    await client.admin("/abort_request", {"abort_all": True})
                    requests = 0  # from now on at once
                await asyncio.sleep(0.02)
        assert [(await task).status for task in tasks] == [503] * len(tasks)

    grown = await fleet.difference("aborted while it ran", lambda: aborted(1))
    assert grown["billedInput"] == grown["billedOutput"] == 0
    assert grown["notBilledInput"] == grown["engineInput"] > 0
    assert grown["notBilledOutput"] == grown["engineOutput"]

    grown = await fleet.difference("one aborted in the queue", lambda: aborted(MAX_RUNNING + 1))
    # Of the one that waited the engine says a prompt in its answer, and counts none.
    assert grown["billedInput"] == grown["billedOutput"] == 0
    assert grown["notBilledOutput"] == grown["engineOutput"]
    assert grown["notBilledInput"] >= grown["engineInput"] > 0


@pytest.mark.parametrize("agent", ["asked", "away"])
async def test_a_client_that_leaves_while_it_waits_in_the_engine(fleet: Fleet, any_client: Client, agent: str):
    front = fleet.front
    if agent == "asked":
        await fleet.hear_the_agent()

    async def waiting() -> None:
        streams = [await front.post({**CHAT, "stream": True, "max_tokens": 3000}) for _ in range(MAX_RUNNING)]
        for stream in streams:
            await stream.content.readline()
        async with asyncio.timeout(60):
            while (await fleet.loads()).running != MAX_RUNNING:
                await asyncio.sleep(0.1)
        last = asyncio.create_task(front.post({**CHAT, "max_tokens": 3000}))
        async with asyncio.timeout(60):
            while (await fleet.loads()).waiting != 1:
                await asyncio.sleep(0.1)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        async with asyncio.timeout(60):
            while (await fleet.loads()).waiting:
                await asyncio.sleep(0.05)
        if fleet.tells_at_abort:
            await any_client.admin("/abort_request", {"abort_all": True})
            for stream in streams:
                await stream.read()
        else:
            for stream in streams:
                stream.close()
        await front.records(count=MAX_RUNNING + 1)

    grown = await fleet.difference(f"left while it waited, agent {agent}", waiting)
    # The engine took its prompt and never counted it: of our record nothing is billed.
    assert grown["engineInput"] == grown["billedInput"] > 0
    if fleet.tells_at_abort:
        assert grown["engineOutput"] == grown["billedOutput"]
    else:
        # The streams were left, too: tokens of the last step may not have been sent any more.
        assert 0 < grown["billedOutput"] <= grown["engineOutput"]
    assert grown["notBilledInput"] == grown["estimatedInput"] > 0


async def test_calls_around_the_gateways_are_unattributed(fleet: Fleet, any_client: Client):
    async def ask() -> None:
        answer = await any_client.post("/v1/completions", {"prompt": "around", "max_tokens": 5, "ignore_eos": True})
        assert answer.status == 200

    grown = await fleet.difference("a call around the gateways", ask)
    assert (grown["billedInput"], grown["billedOutput"]) == (0, 0)
    assert grown["unattributedInput"] == grown["engineInput"] > 0
    assert grown["unattributedOutput"] == 5


async def test_a_fresh_engine_has_counted_its_warm_up(any_kind: Kind, tmp_path: Path):
    words = WORDS[any_kind]
    with running_engine(any_kind, tmp_path) as engine:
        async with aiohttp.ClientSession() as session:
            asking = words.kind.agent.connect(session, engine.url, api_key=ENGINE_KEY, admin_key=ADMIN_KEY).client
            async with asyncio.timeout(60):
                while (counters := await asking.counters()).prompt_tokens is None:
                    await asyncio.sleep(0.05)
    prompt, generated = counters.prompt_tokens, counters.generation_tokens
    print(f"\n{any_kind:7} a fresh engine has counted {prompt} prompt + {generated} tokens")
    assert generated == words.differences.warm_up_tokens
    assert (0 < prompt <= 64) if generated else prompt == 0
