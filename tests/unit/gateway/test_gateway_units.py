"""Units beside tokens at the gateway: what a record has of them, and what a budget in money makes of them."""

import asyncio
import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from shoal.api.ledger import Prices, Rate
from shoal.core.fields.mediasize import MediaSize, media_size
from shoal.core.hold.limits import Limits
from shoal.core.rating.price import RateTable
from tests.support.gateway import GatewayUnderTest, gateway, tenant
from tests.support.pictures import data_url, made, png
from tests.support.recordings import TYPE, asked, wav
from tests.support.routes import target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine
from tests.support.waiting import until_async

CENT = 10**10
"""In 10^-12 of the currency."""
RAW_SOUND = wav(1.5)
SOUND = {"type": "input_audio", "input_audio": {"data": b64encode(RAW_SOUND).decode(), "format": "wav"}}
PICTURE = {"type": "image_url", "image_url": {"url": data_url("image/png", png(8, 6))}}


class Priced:
    """A ledger with one price: a document and an image cost a cent, a second of audio ten."""

    live = True

    def __init__(self) -> None:
        rate = Rate(model="*", input=0, cached=0, output=0, documents=CENT, images=CENT, audio_ms=CENT // 100)
        self.rate_table: RateTable | None = RateTable.of(Prices(list="p", currency="USD", rates=(rate,)))

    def total(self, tenant: str) -> None:
        return None


async def answer(request: EngineRequest) -> None:
    if request.path == "/v1/rerank":
        found = [{"score": 0.5, "index": at, "meta_info": {"prompt_tokens": 5}} for at in range(3)]
        await request.answer(200, json.dumps(found).encode())
    elif request.path == "/v1/audio/transcriptions":
        await request.answer(200, b'{"text":"a fox","usage":{"type":"duration","seconds":2}}')
    else:
        details = {"cached_tokens": 1, "image_tokens": 6}
        more = {"completion_tokens_details": {"reasoning_tokens": 1, "accepted_prediction_tokens": 2}}
        usage = {
            "prompt_tokens": 9,
            "total_tokens": 12,
            "completion_tokens": 3,
            "prompt_tokens_details": details,
            **more,
        }
        message = {"role": "assistant", "content": "a fox"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = {"id": request.body.get("rid"), "object": "chat.completion", "created": 1, "model": request.model}
        await request.answer(200, json.dumps({**body, "choices": choices, "usage": usage}).encode())


def chat(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "what is this?"}, *parts]
    return {"model": "llama", "messages": [{"role": "user", "content": content}]}


async def test_images_and_the_parts_of_tokens_that_the_engine_tells(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        assert (await it.post(chat(PICTURE, PICTURE))).status == 200
        assert (await it.post(chat())).status == 200
        plain, pictured = [record.data for record in await it.records(count=2)]
        if plain.images is not None:
            plain, pictured = pictured, plain
        assert (plain.images, pictured.images) == (None, 2)
        assert (pictured.image_tokens, pictured.audio_tokens, pictured.accepted_tokens) == (6, None, 2)
        assert (pictured.input_tokens, pictured.reasoning_tokens) == (9, 1)


async def test_the_seconds_of_all_sounds_of_a_chat_as_of_a_transcription(tmp_path: Path) -> None:
    of_url = {"type": "audio_url", "audio_url": {"url": data_url("audio/wav", wav(0.25))}}
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        assert (await it.post(chat(SOUND, of_url, PICTURE))).status == 200
        (heard,) = await it.records()
        assert (heard.data.audio_ms, heard.data.audio_source, heard.data.images) == (1_750, "measured", 1)
        assert (heard.data.input_tokens, heard.data.count_source) == (9, "final"), "its tokens are counted as before"
        assert (await it.post(chat(PICTURE))).status == 200
        silent = next(one.data for one in await it.records(count=2) if one.id != heard.id)
        assert (silent.audio_ms, silent.audio_source) == (None, None)


async def test_sounds_of_attempts_and_refused_requests_count_as_images_do(tmp_path: Path) -> None:
    """Of what is tried again the seconds are billed once, and of what no engine took never."""
    sent: list[EngineRequest] = []

    async def lose_the_first(request: EngineRequest) -> None:
        sent.append(request)
        if len(sent) == 1:
            request.writer.transport.abort()
        else:
            await answer(request)

    async with gateway(tmp_path, ScriptedEngine(lose_the_first), ScriptedEngine(lose_the_first)) as it:
        it.tenants["acme"] = tenant()
        it.model(limits=Limits(max_requests=0))
        assert (await it.post(chat(SOUND, PICTURE))).status == 200
        (final,), (attempt,) = await it.records(), await it.records("attempt")
        assert [(one.data.audio_ms, one.data.images) for one in (final, attempt)] == [(1_500, 1)] * 2
        assert [one.data.count_source for one in (final, attempt)] == ["final", "estimated"]
        it.pods.clear()
        it.changed()
        assert (await it.post(chat(SOUND, PICTURE))).status == 503
        refused = next(one.data for one in await it.records(count=2) if one.id != final.id)
        assert (refused.count_source, refused.audio_ms, refused.images) == ("none", 1_500, 1)
        units = "shoal_tenant_units_total"
        assert [it.metric(units, tenant="acme", unit=unit) for unit in ("images", "audio_seconds")] == [1, 1.5]


async def test_limits_count_a_sound_of_a_chat_once(tmp_path: Path) -> None:
    """By the tokens that the engine tells, unlike a transcription."""
    long = {"type": "audio_url", "audio_url": {"url": data_url("audio/wav", wav(40, rate=8_000))}}
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 4_000})
        it.changed()
        assert (await it.post({**chat(long), "max_tokens": 10})).status == 200
        await it.records()
        reply = await it.post({**chat(), "max_tokens": 10})
        left = int(reply.headers["x-ratelimit-remaining-tokens"])
        assert left > 4_000 - 12 - 10 - 100, "12 of the first one, and what is reserved for this one"


def spent(it: GatewayUnderTest) -> int:
    return it.app.demand.tenants.of("acme").own_use().spent


@pytest.mark.parametrize(
    ("path", "body", "cost"),
    [
        ("/v1/rerank", {"model": "llama", "query": "a fox", "documents": ["x", "y", "z"]}, 3 * CENT),
        ("/v1/chat/completions", chat(PICTURE, PICTURE), 2 * CENT),
        ("/v1/chat/completions", chat(SOUND, PICTURE), 16 * CENT),
        ("/v1/audio/transcriptions", asked(wav(1.5)), 15 * CENT),
    ],
)
async def test_a_budget_in_money_counts_units(tmp_path: Path, path: str, body: Any, cost: int) -> None:
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.app.quotas.ledger = Priced()
        amount = f"{(cost - 1) // CENT / 100:.2f}"
        it.tenants["acme"] = tenant(budget={"amount": amount, "currency": "USD"})
        it.changed()
        headers = {"content-type": TYPE.decode()} if isinstance(body, bytes) else {}
        refused = await it.post(body, path, headers=headers)
        assert (refused.status, (await refused.json())["error"]["code"]) == (429, "insufficient_quota")
        it.tenants["acme"] = tenant(budget={"amount": "9", "currency": "USD"})
        it.changed()
        assert (await it.post(body, path, headers=headers)).status == 200
        await it.records()
        assert spent(it) == cost


@pytest.mark.parametrize(
    ("path", "operation", "body", "units"),
    [
        ("/v1/rerank", "rerank", {"model": "llama", "query": "a fox", "documents": ["x", "y", "z"]}, (3, 0, 0)),
        ("/v1/chat/completions", "chat", chat(PICTURE, PICTURE), (0, 2, 0)),
        ("/v1/audio/transcriptions", "transcription", asked(wav(1.5)), (0, 0, 1.5)),
        ("/v1/chat/completions", "chat", chat(SOUND, PICTURE), (0, 1, 1.5)),
        ("/v1/chat/completions", "chat", chat(), (0, 0, 0)),
    ],
)
async def test_metrics_have_what_bills_count(
    tmp_path: Path, path: str, operation: str, body: Any, units: tuple[float, ...]
) -> None:
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.tenants["acme"] = tenant()
        it.changed()

        def seen(name: str, **labels: str) -> tuple[float | None, ...]:
            read = it.metrics.registry.get_sample_value
            return tuple(read(name, {**labels, "unit": unit}) for unit in ("documents", "images", "audio_seconds"))

        headers = {"content-type": TYPE.decode()} if isinstance(body, bytes) else {}
        assert (await it.post(body, path, headers=headers)).status == 200
        await it.records(count=1)
        of_model = {"gen_ai_request_model": "chat/llama", "gen_ai_operation_name": operation}
        async with asyncio.timeout(20):
            while it.metric("shoal_tenant_requests_total", tenant="acme", outcome="answered") < 1:
                await asyncio.sleep(0.005)
        # A Model that has none has no series.
        assert seen("shoal_gateway_units_total", **of_model) == (units if any(units) else (None, None, None))
        assert seen("shoal_tenant_units_total", tenant="acme") == units


PHOTO: dict[str, Any] = {
    "type": "image_url",
    "image_url": {"url": data_url("image/jpeg", made("JPEG", 800, 700, quality=30))},
}
PHOTO_TOKENS = 714


async def test_a_photo_fits_limits_by_its_pixels_and_not_by_its_base64(tmp_path: Path) -> None:
    """It was 429 for good: a quarter of the base64 is more tokens than any limit has."""
    assert len(PHOTO["image_url"]["url"]) > 10 * 4 * 4_000
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 4_000})
        it.changed()
        reply = await it.post(chat(PHOTO))
        assert reply.status == 200
        await it.records()
        reply = await it.post({**chat(*[PHOTO] * 4), "max_tokens": 1_500})
        assert reply.status == 429
        asked_for = PHOTO_TOKENS * 4 + 1_500
        found = re.search(r"asked for (\d+)", (await reply.json())["error"]["message"])
        assert found is not None
        assert asked_for <= int(found[1]) < asked_for + 200  # the text of the body


async def test_what_a_client_that_leaves_is_counted_for_is_what_the_photo_shows(tmp_path: Path) -> None:
    async def wait(request: EngineRequest) -> None:
        await request.gone.wait()

    engine = ScriptedEngine(wait)
    async with gateway(tmp_path, engine) as it:
        it.tenants["acme"] = tenant(budget={"tokens": 10**9})
        it.changed()
        post = asyncio.create_task(it.post({**chat(PHOTO), "stream": True}))
        await until_async(lambda: bool(engine.requests))
        post.cancel()
        (record,) = await it.records()
        assert record.data.count_source == "estimated"
        assert record.data.input_tokens is not None
        assert PHOTO_TOKENS <= record.data.input_tokens < PHOTO_TOKENS + 100
        assert it.app.demand.tenants.of("acme").own_use().booked < PHOTO_TOKENS + 100


async def test_a_mirror_without_counts_is_estimated_by_what_the_photo_shows(tmp_path: Path) -> None:
    async def count_nothing(request: EngineRequest) -> None:
        choices = [{"index": 0, "message": {"role": "assistant", "content": "a fox"}, "finish_reason": "stop"}]
        await request.answer(200, json.dumps({"model": request.model, "choices": choices}).encode())

    rule = {"targets": [target("llama")], "mirror": {**target("other"), "percent": 100}}
    async with two_models(tmp_path, ScriptedEngine(answer), ScriptedEngine(count_nothing), rule) as it:
        assert (await it.post({**chat(PHOTO), "model": "front"})).status == 200
        (copied,) = await it.records("attempt")
        assert copied.data.count_source == "estimated"
        assert copied.data.input_tokens is not None
        assert PHOTO_TOKENS <= copied.data.input_tokens < PHOTO_TOKENS + 100


async def test_rules_for_lengths_read_the_media_of_a_request_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []

    def counted(fields: dict[str, Any]) -> MediaSize:
        read.append(fields)
        return media_size(fields)

    monkeypatch.setattr("shoal.gateway.routechoice.media_size", counted)
    monkeypatch.setattr("shoal.gateway.preparation.media_size", counted)
    rules = [
        {"name": f"long-{at}", "matches": [{"promptTokens": {"atLeast": 10_000}}], "targets": [target("other")]}
        for at in range(8)
    ]
    async with two_models(
        tmp_path, ScriptedEngine(answer), ScriptedEngine(), *rules, {"targets": [target("llama")]}
    ) as it:
        assert (await it.post({**chat(PHOTO), "model": "front"})).status == 200
        assert len(read) == 2, "for the rules, and for the limits"
