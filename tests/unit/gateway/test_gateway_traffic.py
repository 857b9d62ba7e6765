"""What a gateway keeps of its last requests for advice, and whom it tells."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from shoal.api import keys, rights
from shoal.api.traffic import HEAD, TrafficPage, TrafficRow, rows_of
from shoal.core import facts
from shoal.core.advice.facts import after_answer, window_of
from shoal.core.lora.placement.rendezvous import digest
from shoal.gateway import trafficapi
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.ops import gateway_ops
from shoal.gateway.prepared import Prepared
from shoal.gateway.traffic import TrafficSample
from shoal.gateway.trafficapi import PEER_SECONDS, TrafficApi
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.metering.meter import Meter
from shoal.net.server import make_server
from tests.support.gateway import INSTALL_KEY, MODEL, GatewayUnderTest, gateway, replica, tenant
from tests.support.gateway_process import ask as ask_process
from tests.support.gateway_process import serving
from tests.support.rolereviews import RoleReviews
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until_async

PEOPLE = {"x-shoal-key": keys.derive(INSTALL_KEY, "logs", keys.DEMAND)}
PEER = {"authorization": f"Bearer {keys.derive(INSTALL_KEY, 'gateway', keys.DEMAND)}"}
SYSTEM = {"role": "system", "content": "You never speak of the marzipan affair. " * 20}


def pod(name: str, ip: str | None = "127.0.0.1") -> facts.Pod:
    return facts.Pod("shoal-system", name, f"uid-{name}", None, False, False, True, {}, None, ip=ip, was_ready=True)


@contextlib.asynccontextmanager
async def ops(it: GatewayUnderTest, api: TrafficApi) -> AsyncGenerator[int]:
    """Serves the operations port; yields it."""
    app = gateway_ops(
        CollectorRegistry(), dict[str, str], lambda: None, DemandPublisher(DemandState()).hub, it.ring, traffic=api
    )
    server = make_server(app, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.port
    finally:
        await api.page.close()
        server.should_exit = True
        await serving


async def read(
    it: GatewayUnderTest, port: int, headers: dict[str, str], status: int = 200, **query: str
) -> tuple[TrafficPage, str]:
    url = f"http://127.0.0.1:{port}/v1/traffic"
    async with it.session.get(url, params=query, headers=headers) as response:
        text = await response.text()
        assert response.status == status, text
        return TrafficPage.model_validate_json(text) if status == 200 else TrafficPage(), text


async def ask(it: GatewayUnderTest, *messages: dict[str, str], stream: bool = False, **more: Any) -> None:
    kept = len(it.app.traffic)
    body = {"model": "llama", "messages": list(messages), "stream": stream, **more}
    async with await it.post(body) as response:
        await response.read()
        assert response.status == 200
    await until_async(lambda: len(it.app.traffic) == kept + 1)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_conversation_is_recognised_without_its_text(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, ScriptedEngine()) as it,
        ops(it, TrafficApi(it.app.traffic, it.ring, "gateway-1")) as port,
    ):
        await ask(it, SYSTEM, user("Who knew of it?"))
        await ask(
            it,
            SYSTEM,
            user("Who knew of it?"),
            {"role": "assistant", "content": "abc"},
            user("Who else?"),
            stream=True,
        )
        page, text = await read(it, port, PEOPLE, namespace="chat", model="llama")
        assert "marzipan" not in text
        assert page.missing == ()
        (model,) = page.models
        assert (model.model, model.gateway, model.classes, model.requests) == (
            "chat/llama",
            "gateway-1",
            ("l4-24gb",),
            2,
        )
        window = window_of([model], since=0.0, until=1e12)
        first, later = window.requests
        assert (first.prompt, first.cached, first.answer) == (7, 4, 3)
        assert first.replica == digest("pod-1 boot-1")
        assert first.gpu_class == "l4-24gb"
        assert not first.stream
        assert later.stream
        assert later.at <= later.sent <= (later.first or 0.0) <= later.ended
        keys_of = [mark.key for mark in later.marks]
        assert first.marks[-1].key in keys_of
        assert after_answer(first.marks[-1].key) in keys_of


async def test_two_tenants_with_one_prompt_have_nothing_in_common(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, ScriptedEngine()) as it,
        ops(it, TrafficApi(it.app.traffic, it.ring, "gateway-1")) as port,
    ):
        it.tenants["globex"] = tenant("globex", "sk-globex")
        it.changed()
        await ask(it, SYSTEM, user("Who knew of it?"))
        body = {"model": "llama", "messages": [SYSTEM, user("Who knew of it?")]}
        async with await it.post(body, key="sk-globex") as response:
            assert response.status == 200
        await until_async(lambda: len(it.app.traffic) == 2)
        page, text = await read(it, port, PEOPLE)
        ours, theirs = window_of(page.models, since=0.0, until=1e12).requests
        assert not {mark.key for mark in ours.marks} & {mark.key for mark in theirs.marks}
        assert "acme" not in text
        assert "globex" not in text


async def test_nothing_is_kept_of_what_was_not_answered_nor_where_it_is_off(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(), traffic_requests=0) as it:
        async with await it.post({"model": "llama", "messages": [user("hello")]}) as response:
            assert response.status == 200
        await it.records()
        assert len(it.app.traffic) == 0
    async with gateway(tmp_path, ScriptedEngine()) as it:
        async with await it.post({"model": "llama", "messages": [user("hello")], "temperature": "warm"}) as response:
            assert response.status == 400
        assert len(it.app.traffic) == 0


async def test_one_gateway_answers_for_all_and_names_those_that_are_away(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        await ask(it, user("here"))
        other = TrafficApi(it.app.traffic, it.ring, "gateway-2")
        async with ops(it, other) as far:
            peers: list[facts.Pod] | None = [pod("gateway-2"), pod("gateway-3", None)]
            near = TrafficApi(it.app.traffic, it.ring, "gateway-1", lambda: peers, far)
            async with ops(it, near) as port:
                page, _ = await read(it, port, PEOPLE)
                assert [model.gateway for model in page.models] == ["gateway-1", "gateway-2"]
                assert [(each.gateway, each.reason) for each in page.missing] == [("gateway-3", "it has no address")]
                assert page.since == it.app.traffic.began > 0
                page, _ = await read(it, port, PEER)
                assert [model.gateway for model in page.models] == ["gateway-1"]
                peers = [pod("gateway-2", "127.0.0.99")]
                page, _ = await read(it, port, PEOPLE)
                assert [each.reason for each in page.missing] == ["it cannot be reached"]
                peers = None
                page, _ = await read(it, port, PEOPLE)
                assert "the other gateways are not known" in page.missing[0].reason


async def test_two_gateways_that_are_asked_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        await ask(it, user("here"))
        peers: list[facts.Pod] = []
        ports: list[int] = [0, 0]
        first = TrafficApi(it.app.traffic, it.ring, "gateway-1", lambda: peers)
        second = TrafficApi(it.app.traffic, it.ring, "gateway-2", lambda: peers)
        async with ops(it, first) as ports[0], ops(it, second) as ports[1]:
            first.page._calls._port, second.page._calls._port = ports[1], ports[0]  # pyright: ignore[reportPrivateUsage]
            peers.append(pod("the-other"))
            async with asyncio.timeout(PEER_SECONDS / 2):
                pages = await asyncio.gather(*(read(it, port, PEOPLE) for port in ports))
            for page, _ in pages:
                assert {model.gateway for model in page.models} == {"gateway-1", "gateway-2"}
                assert page.missing == ()


@contextlib.asynccontextmanager
async def slow_peer() -> AsyncGenerator[tuple[int, list[int], asyncio.Event]]:
    """A gateway that takes calls and answers none before it is told to go on: its port, its calls, and the word."""
    calls: list[int] = []
    go_on = asyncio.Event()

    async def called(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(len(calls))
        try:
            await go_on.wait()
        finally:
            writer.close()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    async with server:
        try:
            yield server.sockets[0].getsockname()[1], calls, go_on
        finally:
            go_on.set()


async def test_people_who_ask_at_once_are_all_answered_one_after_the_other(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it, slow_peer() as (far, calls, go_on):
        await ask(it, user("here"))
        near = TrafficApi(it.app.traffic, it.ring, "gateway-1", lambda: [pod("gateway-2")], far)
        async with ops(it, near) as port:
            asked = [asyncio.create_task(read(it, port, PEOPLE)) for _ in range(3)]
            await until_async(lambda: len(calls) == 1 and near.waiting == 2)
            go_on.set()
            for page, _ in await asyncio.gather(*asked):
                assert [model.gateway for model in page.models] == ["gateway-1"]
                assert [each.gateway for each in page.missing] == ["gateway-2"]


async def test_who_hangs_up_lets_the_next_have_its_turn(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it, slow_peer() as (far, calls, go_on):
        near = TrafficApi(it.app.traffic, it.ring, "gateway-1", lambda: [pod("gateway-2")], far)
        async with ops(it, near) as port:
            gone, waits = (asyncio.create_task(read(it, port, PEOPLE)) for _ in range(2))
            await until_async(lambda: len(calls) == 1 and near.waiting == 1)
            gone.cancel()
            await until_async(lambda: len(calls) == 2)
            go_on.set()
            await waits


async def test_callers_who_wait_are_bounded_in_number_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trafficapi, "MOST_WAITING", 1)
    async with gateway(tmp_path, ScriptedEngine()) as it, slow_peer() as (far, calls, _):
        near = TrafficApi(it.app.traffic, it.ring, "gateway-1", lambda: [pod("gateway-2")], far)
        async with ops(it, near) as port:
            first, second = (asyncio.create_task(read(it, port, PEOPLE)) for _ in range(2))
            await until_async(lambda: len(calls) == 1 and near.waiting == 1)
            _, text = await read(it, port, PEOPLE, 503)
            assert "others are asking for the same page: try again in a moment" in text
            second.cancel()
            await until_async(lambda: near.waiting == 0)
            monkeypatch.setattr(trafficapi, "WAIT_SECONDS", 0.01)
            await read(it, port, PEOPLE, 503)
            first.cancel()


async def test_who_may_read_it(tmp_path: Path) -> None:
    server = RoleReviews()
    callers = Callers(cast(KubeClient, server), rights.GATEWAY_AUDIENCE)
    async with (
        gateway(tmp_path, ScriptedEngine()) as it,
        ops(it, TrafficApi(it.app.traffic, it.ring, "gateway-1", callers=callers)) as port,
    ):

        def shown(account: str, namespace: str = "shoal-system") -> dict[str, str]:
            return {"x-shoal-key": server.issue(account, namespace, audience=rights.GATEWAY_AUDIENCE)}

        await ask(it, user("hello"))
        for nobody in ({}, {"authorization": "Bearer sk-test-acme"}, {"x-shoal-key": "a" * 64}):
            _, text = await read(it, port, nobody, 401)
            assert "a key for logs, or of a gateway, is needed" in json.loads(text)["message"]
        page, _ = await read(it, port, shown(rights.VIEWER))
        assert len(page.models) == 1
        _, text = await read(it, port, shown(rights.BILLING), 403)
        assert "may not get traffic.shoal.dev" in json.loads(text)["message"]
        server.bind("shoal-viewer", "team-a", rights.VIEWER, namespace="team-a")
        team = shown("shoal-viewer", "team-a")
        await read(it, port, team, 403)
        await read(it, port, team, 403, namespace="chat")
        page, _ = await read(it, port, team, namespace="team-a")
        assert page.models == ()


@pytest.mark.parametrize(
    "query",
    [{"since": "yesterday"}, {"since": "nan"}, {"requests": "0"}, {"requests": "1000000000"}, {"requests": "x"}],
)
async def test_a_query_that_is_wrong_is_refused(tmp_path: Path, query: dict[str, str]) -> None:
    async with (
        gateway(tmp_path, ScriptedEngine()) as it,
        ops(it, TrafficApi(it.app.traffic, it.ring, "gateway-1")) as port,
    ):
        _, text = await read(it, port, PEOPLE, 400, **query)
        assert next(iter(query)) in json.loads(text)["message"]


async def test_the_whole_gateway_serves_it(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine()) as process, aiohttp.ClientSession() as session:
        async with ask_process(session, process) as answer:
            assert answer.status == 200
        sample = process.gateway.traffic
        await until_async(lambda: len(sample) == 1)
        async with session.get(f"http://127.0.0.1:{process.ops.port}/v1/traffic", headers=PEOPLE) as answer:
            page = TrafficPage.model_validate_json(await answer.read())
        assert [(model.model, model.requests) for model in page.models] == [("chat/llama", 1)]
        assert page.since == sample.began


# --- the bound --------------------------------------------------------------------------------------------------------


def kept(sample: TrafficSample, model: str, number: int) -> None:
    """Adds an answered request."""
    served = MODEL if model == MODEL.key else MODEL.__class__(model, f"uid-{model}", model, (), None)
    identity: Any = type("Identity", (), {"tenant": "acme", "key_name": "prod", "external_id": None, "plan": None})()
    meter = Meter(f"id-{number}", "shoal", identity, served, endpoint="/", model_name=model, stream=False)
    meter.replica, meter.outcome = replica(), "answered"
    meter.count(b'{"prompt_tokens": %d, "completion_tokens": 1}' % (number + 1), "final")
    prepared = Prepared("/v1/chat/completions", model, False, False, False, served, None, 1, 1)
    sample.add(meter, prepared)


def prompts(sample: TrafficSample, model: str) -> list[int]:
    _, found = sample.newest(model, 0.0, 1000)
    return [TrafficRow(*HEAD.unpack_from(each)).prompt for each in found]


def test_a_busy_model_does_not_displace_the_others_requests() -> None:
    sample = TrafficSample(100, now=0.0)
    for number in range(10):
        kept(sample, "chat/quiet", number)
    for number in range(1000):
        kept(sample, "chat/llama", number)
    assert len(sample) == 100
    assert len(prompts(sample, "chat/quiet")) == 10
    assert prompts(sample, "chat/llama") == list(range(911, 1001))
    for number in range(1000):
        kept(sample, "chat/other", number)
    assert len(sample) == 100
    assert len(prompts(sample, "chat/quiet")) == 10
    assert len(prompts(sample, "chat/other")) >= 33


def test_what_was_dropped_is_not_taken_for_complete() -> None:
    sample = TrafficSample(10, now=0.0)
    for number in range(10):
        kept(sample, MODEL.key, number)
    since, found = sample.newest(MODEL.key, 0.0, 1000)
    assert (since, len(found)) == (0.0, 10)
    kept(sample, MODEL.key, 10)
    since, _ = sample.newest(MODEL.key, 0.0, 1000)
    assert since > 1e9
    # The same if fewer are read than there are.
    since, found = sample.newest(MODEL.key, 0.0, 3)
    assert since > 1e9
    assert len(found) == 3
    assert list(sample.models()) == [MODEL.key]
    assert sample.newest("chat/none", 0.0, 3) == (0.0, [])


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0, 10.0**9], ids=["a day ahead", "a day back", "far ahead"])
@pytest.mark.parametrize("lasts", [False, True], ids=["for a while", "for good"])
def test_a_clock_that_is_set_loses_nothing_of_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, jump: float, lasts: bool
) -> None:
    clock, off = time.time, [0.0]
    monkeypatch.setattr("shoal.gateway.traffic.time.time", lambda: clock() + off[0])
    sample = TrafficSample(100)
    for number in range(100):
        kept(sample, MODEL.key, number)
    off[0] = jump
    for number in range(100, 140):
        kept(sample, MODEL.key, number)
    if not lasts:
        off[0] = 0.0
    for number in range(140, 160):
        kept(sample, MODEL.key, number)
    now = clock() + off[0]
    since, found = sample.newest(MODEL.key, now - 3600, 1000)
    times = [TrafficRow(*HEAD.unpack_from(each)).admitted for each in found]
    assert len(found) == 100
    assert now - 60 < since <= times[0] <= times[-1] <= now + 1
    assert now - 60 < sample.began <= now + 1
    assert times == sorted(times)


def test_rows_that_are_not_in_the_layout_are_refused() -> None:
    page = TrafficPage.model_validate(
        {"models": [{"model": "chat/llama", "gateway": "g", "since": 0, "requests": 1, "rows": "AAAA"}]}
    )
    with pytest.raises(ValueError, match="the rows of gateway g end in the middle of one"):
        list(rows_of(page.models[0]))
    with pytest.raises(ValueError, match="are not base64"):
        list(rows_of(page.models[0].model_copy(update={"rows": "%%"})))
