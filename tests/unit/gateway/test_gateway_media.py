"""Media by https through the whole gateway: an engine gets `data:` URLs, and nothing stays behind of what fails."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.api.ledger import Prices, Rate
from shoal.api.tenant import TenantLogging
from shoal.core.quota.month import PICO
from shoal.core.redaction.content import Content
from shoal.core.redaction.rules import compile_rules
from shoal.core.routing.canary import CanaryHalt
from shoal.requestlog.capture import Capture, CaptureBudget
from shoal.signals.totals import TotalsFollower
from tests.support import pictures
from tests.support.gateway import API_KEY, FACTS, GatewayUnderTest, gateway, replica, tenant
from tests.support.mediahost import HOST, INSIDE, PNG, Answer, Dns, MediaHost, fetcher, telling
from tests.support.routes import put, target
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

URL = f"https://{HOST}/a.png?signature=s3cret"
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
AT = "messages[0].content[1].image_url.url"


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return {"model": "llama", "messages": [{"role": "user", "content": content}], "max_tokens": 50, **more}


@dataclass
class World:
    it: GatewayUnderTest
    engine: ScriptedEngine
    host: MediaHost
    dns: Dns

    async def refused(self, body: Any, **kw: Any) -> tuple[int, dict[str, Any]]:
        """Nothing is held, recorded or sent after it."""
        before = len(self.engine.requests)
        response = await self.it.post(body, **kw)
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "s3cret" not in error["message"]
        assert len(self.engine.requests) == before
        await self.idle()
        return response.status, error

    async def idle(self) -> None:
        """Waits until the last of it is given back."""
        app = self.it.app
        async with asyncio.timeout(30):
            while app.in_flight or app.body_budget.held or app.media._slots._tenants:
                await asyncio.sleep(0.01)

    def account(self) -> Any:
        return self.it.app.quotas.usage.accounts["acme"].own_use()


@contextlib.asynccontextmanager
async def world(
    tmp_path: Path,
    answer: Answer | None = None,
    engine: ScriptedEngine | None = None,
    *,
    egress: bool = True,
    **more: Any,
) -> AsyncGenerator[World]:
    engine = engine or ScriptedEngine()
    fetching: dict[str, Any] = more.pop("fetching", {})
    async with (
        gateway(tmp_path, engine, media_egress=egress, **more) as it,
        MediaHost(answer or telling()).running() as host,
    ):
        dns = Dns({HOST: [host.at]})
        async with fetcher(dns, it.metrics.media, **fetching) as media:
            it.app.media = media
            it.model(facts=replace(FACTS, media_hosts=frozenset({HOST})))
            yield World(it, engine, host, dns)


def without_id(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "rid"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_gets_what_it_would_of_a_data_url(tmp_path: Path, stream: bool) -> None:
    async with world(tmp_path) as w:
        for urls in ((URL, DATA, URL), (DATA, DATA, DATA)):
            response = await w.it.post(chat(*urls, stream=stream))
            assert response.status == 200
            await response.read()
        first, second = w.engine.requests
        assert without_id(first.body) == without_id(second.body)
        assert [part["image_url"]["url"] for part in first.body["messages"][0]["content"][1:]] == [DATA] * 3
        assert HOST not in json.dumps(first.body)
        assert len(w.host.asked) == 2
        assert "authorization" not in w.host.asked[0].lower()
        assert w.it.metric("shoal_gateway_media_fetches_total", outcome="fetched") == 2
        assert len(await w.it.records(count=2)) == 2
        await w.idle()


async def test_a_sound_that_is_fetched_has_its_seconds_in_the_record(tmp_path: Path) -> None:
    async with world(tmp_path, telling(pictures.wav(1.5), "audio/wav")) as w:
        body = chat()
        body["messages"][0]["content"].append({"type": "audio_url", "audio_url": {"url": f"https://{HOST}/a.wav"}})
        assert (await w.it.post(body)).status == 200
        (record,) = await w.it.records()
        assert (record.data.audio_ms, record.data.audio_source) == (1_500, "measured")
        (opened,) = await w.it.records("open")
        assert opened.data.audio_ms == 1_500, "the record is opened when the sound is there"


async def test_a_request_with_fetched_images_goes_to_a_cheaper_fallback_of_its_route(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        it, cent = w.it, PICO // 100
        other = replace(it.models["chat/llama"], key="chat/other", uid="uid-other", claims=("other",), engine_name="o")
        it.models["chat/other"] = other
        it.pods["chat/llama-2"] = replica(2, model=other)
        it.ports["pod-2"] = it.ports["pod-1"]
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], budget={"amount": "99", "currency": "USD"})
        fallback = {
            "targets": [target("other")],
            "whenCostAbove": {"amount": "0.5", "currency": "USD"},
        }
        put(it, {"targets": [target("llama")], "fallback": fallback})
        it.hear(2)
        ledger = TotalsFollower("http://ledger:8500", lambda: ())
        rates = [Rate(model=key, input=at, cached=at, output=at, images=at) for key, at in
                 (("chat/llama", cent), ("chat/other", cent // 10))]  # fmt: skip
        ledger.priced(Prices(list="p", currency="USD", rates=tuple(rates)))
        it.app.quotas.ledger = ledger
        response = await it.post(chat(URL, model="front"))
        assert response.status == 200, await response.text()
        (sent,) = w.engine.requests
        assert (sent.body["model"], sent.body["messages"][0]["content"][1]["image_url"]["url"]) == ("o", DATA)
        (record,) = await it.records()
        assert (record.data.model, record.data.images) == ("chat/other", 1)
        await w.idle()
        own = w.account()
        assert (own.spent, own.reserved_spend, own.in_flight) == (11 * cent // 10, 0, 0), "ten tokens and the image"
        # A fallback that cannot do it: the request stays, and counts once.
        it.models["chat/other"] = replace(other, capabilities=frozenset({"embed"}))
        it.changed()
        response = await it.post(chat(URL, model="front"))
        assert response.status == 200, await response.text()
        *_, record = await it.records(count=2)
        assert record.data.model == "chat/llama"
        await w.idle()
        assert (w.account().spent, w.account().reserved_spend) == (121 * cent // 10, 0)
        # A fallback whose answer may be too long for the limits: the same. It is the one request at a time already.
        it.models["chat/other"] = other
        it.model(max_output_tokens=10, facts=replace(FACTS, media_hosts=frozenset({HOST})))
        limits = {"concurrentRequests": 1, "tokensPerMinute": 370}
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], limits=limits)
        it.changed()
        response = await it.post(chat(URL, model="front"))
        assert response.status == 200, await response.text()
        *_, record = await it.records(count=3)
        assert record.data.model == "chat/llama"


async def test_it_is_reserved_and_refused_as_the_same_with_a_data_url(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def waits(request: EngineRequest) -> None:
        await go.wait()
        await serve_normally(request)

    async with world(tmp_path, engine=ScriptedEngine(waits)) as w:
        w.it.tenants["acme"] = tenant(limits={"tokensPerMinute": 100_000})
        w.it.changed()
        reserved: list[int] = []
        sent: list[asyncio.Task[aiohttp.ClientResponse]] = []
        for url in (DATA, URL):
            sent.append(asyncio.create_task(w.it.post(chat(url))))
            async with asyncio.timeout(30):
                while len(w.engine.requests) < len(sent):
                    await asyncio.sleep(0.01)
            reserved.append(w.account().reserved_tokens - sum(reserved))
        assert reserved[0] == reserved[1] > len(DATA) // 4
        go.set()
        assert [(await each).status for each in sent] == [200, 200]
        await w.idle()
        assert (w.account().in_flight, w.account().reserved_tokens, w.account().requests) == (0, 0, 2)

        # One that is too large for the limit is refused by its media too, and leaves nothing.
        w.it.tenants["acme"] = tenant(limits={"tokensPerMinute": len(DATA) // 4})
        w.it.changed()
        for url in (DATA, URL):
            status, error = await w.refused(chat(url))
            assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert (w.account().in_flight, w.account().reserved_tokens) == (0, 0)


async def test_who_is_over_the_rate_makes_the_gateway_fetch_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, telling(status="404 Not Found")) as w:
        w.it.tenants["acme"] = tenant(limits={"requestsPerMinute": 2})
        w.it.changed()
        for _ in range(2):  # one that fails counts: else it could be tried without end
            status, error = await w.refused(chat(URL))
            assert (status, error["code"], error["param"]) == (400, "media_not_fetched", AT)
        assert (w.account().in_flight, w.account().reserved_tokens) == (0, 0)
        status, error = await w.refused(chat(URL))
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert len(w.host.asked) == 2
        w.it.tenants["acme"] = tenant(limits={"requestsPerMinute": 100})
        w.it.changed()
        await w.refused(chat(URL))
        assert len(w.host.asked) == 3
        assert w.it.metric("shoal_gateway_rejected_total", reason="media_not_fetched") == 3


@pytest.mark.parametrize("limits", [{}, {"requestsPerMinute": 100}], ids=["the route's", "both"])
async def test_under_a_route_with_limits_it_counts_once_and_is_settled(tmp_path: Path, limits: dict[str, int]) -> None:
    async with world(tmp_path) as w:
        of_route = {"requestsPerMinute": 1, "concurrentRequests": 1, "tokensPerMinute": 100_000}
        w.it.tenants["acme"] = tenant(limits=limits)
        put(w.it, {"targets": [target("llama")]}, limits=of_route)
        assert (await w.it.post(chat(URL, model="front"))).status == 200
        await w.idle()
        accounts = w.it.app.quotas.usage.accounts
        assert accounts.keys() == ({"acme"} if limits else set()) | {"acme@uid-chat-front"}
        for account in accounts.values():
            own = account.own_use()
            assert (own.requests, own.tokens, own.in_flight, own.reserved_tokens) == (1, 10, 0, 0)
        status, error = await w.refused(chat(URL, model="front"))
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert "ModelRoute chat/front" in error["message"]
        assert len(w.host.asked) == 1


@pytest.mark.parametrize("limits", [{}, {"requestsPerMinute": 100}], ids=["the route's", "both"])
@pytest.mark.parametrize("gets", [True, False], ids=["gets limits", "loses them"])
async def test_where_a_route_gets_or_loses_limits_meanwhile_what_was_counted_is_settled(
    tmp_path: Path, limits: dict[str, int], gets: bool
) -> None:
    before, after = ({}, {"concurrentRequests": 1}) if gets else ({"concurrentRequests": 1}, {})
    rule = {"targets": [target("llama")]}

    async def image(writer: asyncio.StreamWriter) -> None:
        put(w.it, rule, limits=after)
        await telling()(writer)

    async with world(tmp_path, image) as w:
        w.it.tenants["acme"] = tenant(limits=limits)
        put(w.it, rule, limits=before)
        assert (await w.it.post(chat(URL, model="front"))).status == 200
        await w.idle()
        uses = {name: account.own_use() for name, account in w.it.app.quotas.usage.accounts.items()}
        # Where the request was not counted at all before, its route counts it when it is whole.
        assert ("acme@uid-chat-front" in uses) is (not gets or not limits)
        assert all((use.requests, use.in_flight, use.reserved_tokens) == (1, 0, 0) for use in uses.values())


async def test_nothing_is_fetched_unless_key_fields_model_and_installation_allow_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        assert (await w.refused(chat(URL), key="sk-of-nobody"))[0] == 401
        assert (await w.refused(chat(URL, top_k=-5)))[1]["param"] == "top_k"
        assert (await w.refused(chat(URL, model="other")))[0] == 404
        assert (await w.refused(chat(URL, f"https://evil.com/{HOST}")))[1]["code"] == "url_not_allowed"
        assert (await w.refused(chat(URL, f"https://{HOST}:8443/")))[1]["code"] == "invalid_media_url"
        assert (await w.refused(chat(URL, "file:///etc/passwd")))[1]["code"] == "url_not_allowed"
        w.it.model(facts=FACTS)
        status, error = await w.refused(chat(URL))
        assert (status, error["code"], error["param"]) == (400, "url_not_allowed", AT)
        assert "`spec.media.allowedHosts`" in error["message"]
        assert (w.host.asked, w.dns.asked) == ([], [])
    async with world(tmp_path, egress=False) as w:
        status, error = await w.refused(chat(URL))
        assert (status, error["code"]) == (400, "url_not_allowed")
        assert "`gateway.media.egress`" in error["message"]
        assert (w.host.asked, w.dns.asked) == ([], [])
        assert (await w.it.post(chat(DATA))).status == 200


async def test_a_private_address_is_not_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.dns.names[HOST] = [replace_address(w.host)]
        status, error = await w.refused(chat(URL))
        assert (status, error["code"], error["param"]) == (400, "media_not_fetched", AT)
        assert "the address of its host is not allowed" in error["message"]
        assert INSIDE not in error["message"]
        assert w.it.metric("shoal_gateway_media_fetches_total", outcome="not_allowed") == 1


def replace_address(host: MediaHost) -> Any:
    return host.at._replace(host=INSIDE)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (pictures.png(8000, 8000), "too_much_work"),
        (pictures.png(20_000, 200), "media_not_supported"),
        (pictures.made("JPEG"), "media_not_supported"),
        (b"BM" + bytes(60), "media_not_supported"),
    ],
)
async def test_what_was_fetched_passes_the_checks_of_what_is_sent(tmp_path: Path, body: bytes, code: str) -> None:
    async with world(tmp_path, telling(body)) as w:
        fetched = await w.refused(chat(URL))
        sent = await w.refused(chat(pictures.data_url("image/png", body)))
        assert fetched == sent
        assert (fetched[0], fetched[1]["code"]) == (400, code)


async def test_body_and_media_together_have_the_bound_of_a_body(tmp_path: Path) -> None:
    # Four such files are read without their check: they are too large before.
    async with world(tmp_path, telling(bytes(90_000)), max_body_bytes=300_000) as w:
        status, error = await w.refused(chat(*[URL] * 4))
        assert (status, error["code"]) == (413, "request_too_large")
        status, error = await w.refused(chat(URL))
        assert error["code"] == "media_not_supported"


async def test_media_count_in_the_memory_of_bodies(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 300000\r\n\r\n" + bytes(150_000))
        await go.wait()
        writer.write(bytes(150_000))
        await writer.drain()

    async with world(tmp_path, half, max_held_body_bytes=600_000, max_body_bytes=500_000) as w:
        w.it.tenants["zeta"] = tenant("zeta", "sk-zeta")
        w.it.changed()
        first = asyncio.create_task(w.it.post(chat(URL)))
        async with asyncio.timeout(30):
            while w.it.app.body_budget.held < 200_000:
                await asyncio.sleep(0.01)
        second = asyncio.create_task(w.it.post(chat(URL), key="sk-zeta"))
        async with asyncio.timeout(30):
            while w.it.app.body_budget.held < 400_000:
                await asyncio.sleep(0.01)
        go.set()
        answers = [await (await each).json() for each in (first, second)]
        assert "overloaded" in [each["error"]["code"] for each in answers]
        await w.idle()


async def test_a_client_that_leaves_ends_its_fetch(tmp_path: Path) -> None:
    async def never(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 300000\r\n\r\n" + bytes(150_000))
        await never(writer)

    async with world(tmp_path, half) as w:
        w.it.tenants["acme"] = tenant(limits={"concurrentRequests": 1})
        w.it.changed()
        raw = json.dumps(chat(URL)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", w.it.server.port)
        writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        async with asyncio.timeout(30):
            while w.it.app.body_budget.held < 150_000:
                await asyncio.sleep(0.01)
        assert w.account().in_flight == 1
        writer.transport.abort()
        await w.idle()
        assert (w.account().in_flight, w.account().reserved_tokens) == (0, 0)
        assert w.it.metric("shoal_gateway_media_fetches_total", outcome="given_up") == 1
        assert w.it.metric("shoal_gateway_rejected_total", reason="disconnected") == 1
        assert (await w.it.post(chat(DATA))).status == 200


@pytest.mark.parametrize("becomes", ["weight 0", "gone", "halted", "deleted route"])
async def test_a_route_whose_choice_changes_meanwhile_chooses_again(tmp_path: Path, becomes: str) -> None:
    go = asyncio.Event()

    async def waits(writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await telling()(writer)

    async with world(tmp_path, waits) as w:
        it = w.it
        llama = it.models["chat/llama"]
        other = replace(llama, key="chat/other", uid="uid-other", claims=("other",), engine_name="o", facts=FACTS)
        it.models["chat/other"] = other
        it.pods["chat/llama-2"] = replica(2, model=other)
        it.ports["pod-2"] = it.ports["pod-1"]
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], limits={"concurrentRequests": 1})
        canary = {"canary": {"target": target("llama"), "percent": 100}} if becomes == "halted" else {}
        put(it, {"targets": [target("other")], **canary} if canary else {"targets": [target("llama")]})
        it.hear(2)
        post = asyncio.create_task(it.post(chat(URL, model="front")))
        async with asyncio.timeout(30):
            while not w.host.asked:
                await asyncio.sleep(0.01)
        if becomes == "halted":
            (rule,) = it.routes["chat/front"].rules
            assert rule.canary is not None
            it.app.canaries.heard({rule.canary.revision: CanaryHalt("Errors", 3, 20)})
        elif becomes == "deleted route":
            it.routes.clear()
        elif becomes == "gone":
            put(it, {"targets": [target("llama"), target("other")]})
            del it.models["chat/llama"]
        else:
            put(it, {"targets": [target("llama", 0), target("other")]})
        it.changed()
        go.set()
        response = await post
        if becomes == "deleted route":
            assert response.status == 404
            assert not w.engine.requests
        else:
            assert response.status == 200, await response.text()
            (sent,) = w.engine.requests
            assert (sent.body["model"], sent.body["messages"][0]["content"][1]["image_url"]["url"]) == ("o", DATA)
            (record,) = await it.records()
            assert (record.data.model, record.data.route) == ("chat/other", "chat/front")
            assert record.data.images == 1
        await w.idle()
        assert w.account().in_flight == 0


async def test_a_key_that_was_taken_back_meanwhile_sends_nothing(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def waits(writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await telling()(writer)

    async with world(tmp_path, waits) as w:
        for changed in (tenant(disabled=True), tenant(models=())):
            w.it.tenants["acme"] = tenant()
            w.it.changed()
            go.clear()
            asked = len(w.host.asked)
            sent = asyncio.create_task(w.refused(chat(URL)))
            async with asyncio.timeout(30):
                while len(w.host.asked) == asked:
                    await asyncio.sleep(0.01)
            w.it.tenants["acme"] = changed
            w.it.changed()
            go.set()
            assert (await sent)[0] in (401, 404)


async def test_the_request_log_has_type_and_size_and_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = pictures.made("PNG", 64, 64)
    async with world(tmp_path, telling(large)) as w:
        w.it.tenants["acme"] = tenant(logging={"mode": "Full"})
        w.it.changed()
        kept: list[Any] = []
        monkeypatch.setattr(w.it.app.logs.logger.writer, "put", kept.append)
        for url in (URL, pictures.data_url("image/png", large)):
            assert (await w.it.post(chat(url))).status == 200
        await w.idle()
        notes: list[str] = []
        for job in kept:
            assert b"s3cret" not in job.taken.request
            logged = Content(compile_rules(()), 1 << 20).request(json.loads(job.taken.request))
            notes.append(logged["messages"][0]["content"][1]["image_url"]["url"])
        assert notes[0].startswith("[image/png, ")
        assert notes[0].endswith(" bytes, not logged]")
        assert notes[0].partition(",")[0] == notes[1].partition(",")[0]


def test_a_capture_of_the_body_as_it_came_would_keep_the_url() -> None:
    fields = chat(DATA)
    for raw, kept in ((json.dumps(chat(URL)).encode(), True), (None, False)):
        capture = Capture(CaptureBudget(1 << 20), TenantLogging.model_validate({"mode": "Full"}), "", 1 << 16)
        capture.requested(raw, fields)
        assert (b"s3cret" in (capture.take().request or b"")) is kept
