"""The request log as a tenant meets it: what is in it, and what must not be."""

import asyncio
import gc
import json
import os
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from shoal.core.redaction.rules import Rules
from shoal.requestlog.api import LogsApi
from shoal.requestlog.entry import user_hash
from shoal.requestlog.logkeys import LogKeys
from tests.support.gateway import API_KEY
from tests.support.pictures import data_url, png
from tests.support.requestlog import CANARY, echo, entries, logged, raw_bytes
from tests.support.routes import put, target
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

IMAGE = data_url("image/png", png(2, 2) + bytes(675_000))


async def test_full_logs_prompt_parameters_answer_and_what_came_of_it(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        await it.ask("what is up?", user="u-1", temperature=0.5, logit_bias={"1": 2})
        (entry,) = await it.written()
    assert entry["request"] == {"temperature": 0.5, "messages": [{"role": "user", "content": "what is up?"}]}
    assert entry["answer"] == [{"index": 0, "content": "what is up?", "finish_reason": "stop"}]
    said = {name: entry[name] for name in ("tenant", "keyName", "user", "model", "outcome", "status", "inputTokens")}
    assert said == {
        "tenant": "acme",
        "keyName": "prod",
        "user": "u-1",
        "model": "chat/llama",
        "outcome": "answered",
        "status": 200,
        "inputTokens": 1,
    }
    assert API_KEY not in json.dumps(entry)


async def test_an_entry_has_the_route_that_the_request_went_to_and_is_found_by_it(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        put(it.it, {"targets": [target("llama")]})
        await it.ask("by route", model="front")
        await it.ask("by name")
        first, second = await it.written()
        assert (first["route"], first["model"], first["modelRequested"]) == ("chat/front", "chat/llama", "front")
        assert "route" not in second
        found = await it.page(route="chat/front")
        assert [entry["id"] for entry in found["data"]] == [first["id"]]
        assert (await it.page(route="chat/llama"))["data"] == []


async def test_a_stream_is_logged_as_one_text_with_its_tool_calls(tmp_path: Path):
    async def calls(request: EngineRequest) -> None:
        await request.begin_stream()
        for delta in (
            {"reasoning_content": "let me "},
            {"reasoning_content": "see", "content": "I "},
            {"content": "call"},
            {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "pay", "arguments": '{"to":"al'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": 'ice@example.org"}'}}]},
        ):
            await request.chunk(request._event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]))
        await request.chunk(request._event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]))
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with logged(tmp_path, ScriptedEngine(calls)) as it:
        it.tenant(mode="Full", redact=[{"name": "mail", "builtin": "Email"}])
        await it.ask("hi", stream=True)
        (entry,) = await it.written()
    call = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"to":"[mail]"}'}}
    assert entry["answer"] == [
        {
            "index": 0,
            "reasoning_content": "let me see",
            "content": "I call",
            "tool_calls": [call],
            "finish_reason": "tool_calls",
        }
    ]
    assert entry["redacted"] == {"mail": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_to_be_redacted_is_on_no_disk_in_prompt_nor_answer(tmp_path: Path, stream: bool):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant(mode="Full", redact=[{"name": "mail", "builtin": "Email"}, {"name": "ticket", "pattern": "T-[0-9]+"}])
        answer = await it.ask(f"I am alice@example.org, {CANARY}, T-4711", stream=stream, user="alice@example.org")
        assert stream or CANARY.encode() in answer  # the client's own answer is untouched
        (entry,) = await it.written()
        raw = raw_bytes(tmp_path)
    assert entry["request"]["messages"][0]["content"] == "I am [mail], [Secret], [ticket]"
    assert entry["answer"][0]["content"] == "I am [mail], [Secret], [ticket]"
    assert entry["user"] == "[mail]"
    for secret in (b"alice@example.org", CANARY.encode(), b"T-4711"):
        assert secret not in raw


@pytest.mark.parametrize(
    ("path", "body", "logged_as"),
    [
        (
            "/v1/rerank",
            {"query": "who is alice@example.org", "documents": ["x", f"{CANARY} bob@example.org"], "top_n": 1},
            {"query": "who is [mail]", "documents": ["x", "[Secret] [mail]"], "top_n": 1},
        ),
        ("/v1/score", {"query": "alice@example.org", "items": [CANARY]}, {"query": "[mail]", "items": ["[Secret]"]}),
        (
            "/v1/score",
            {"query": [5, 6], "items": [[7], [8]], "label_token_ids": [9]},
            {"query": "[2 token ids]", "items": "[2 token ids]"},
        ),
        ("/v1/classify", {"input": ["alice@example.org"]}, {"input": ["[mail]"]}),
        ("/v1/tokenize", {"prompt": CANARY}, {"prompt": "[Secret]"}),
        ("/v1/detokenize", {"tokens": [5, 6, 7]}, {"tokens": "[3 token ids]"}),
    ],
)
async def test_what_is_scored_or_tokenized_is_redacted_and_its_answer_is_not_kept(
    tmp_path: Path, path: str, body: dict[str, Any], logged_as: dict[str, Any]
):
    """A ranked list repeats the documents, and a detokenized text is one that no rule has seen."""

    async def repeat(request: EngineRequest) -> None:
        documents = request.body.get("documents", [])
        results: Any = [{"score": 0.5, "index": n, "document": text} for n, text in enumerate(documents)]
        scores = [[0.5]] * len(request.body.get("items", []))
        data = [{"index": 0}] * len(request.body.get("input", []))
        told = {"text": CANARY, "scores": scores, "data": data, "usage": {"prompt_tokens": 1}}
        await request.answer(200, json.dumps(results or told).encode())

    async with logged(tmp_path, ScriptedEngine(repeat)) as it:
        it.tenant(mode="Full", redact=[{"name": "mail", "builtin": "Email"}])
        response = await it.it.post({"model": "llama", **body}, path)
        assert response.status == 200
        (entry,) = await it.written()
        raw = raw_bytes(tmp_path)
    assert entry["request"] == logged_as
    assert "answer" not in entry
    for secret in (b"example.org", CANARY.encode()):
        assert secret not in raw


@pytest.mark.parametrize("mode", ["Off", "Metadata"])
async def test_without_full_no_word_of_prompt_or_answer_is_kept_or_written(tmp_path: Path, mode: str):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant("globex", mode=mode)
        it.tenant("acme", mode="Full")
        for stream in (False, True):
            await it.ask("the canary sings", name="globex", stream=stream)
        await it.ask("something else", name="acme")
        found = await it.written("globex")
        assert len(await it.written("acme")) == 1
        raw = raw_bytes(tmp_path)
    assert b"canary sings" not in raw
    assert len(found) == (0 if mode == "Off" else 2)
    for entry in found:
        assert entry["outcome"] == "answered"
        assert not {"request", "answer"} & set(entry)
    assert (b"tenant=globex" in raw) == (mode == "Metadata")


async def test_a_tenant_that_switches_it_off_means_requests_under_way_too(tmp_path: Path):
    reached, go = asyncio.Event(), asyncio.Event()

    async def slow(request: EngineRequest) -> None:
        reached.set()
        await go.wait()
        await serve_normally(request)

    async with logged(tmp_path, ScriptedEngine(slow)) as it:
        asked = asyncio.create_task(it.ask("the canary sings"))
        await reached.wait()
        it.tenant(mode="Off")
        go.set()
        await asked
        assert await it.written() == []
        assert it.book.budget.held == 0


async def test_rules_that_are_refused_cost_the_content_and_not_the_entry(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant(mode="Full", redact=[{"name": "hunter2", "pattern": "hunter2"}])
        await it.ask("my word is hunter2", user="hunter2")
        (entry,) = await it.written()
        assert "user" not in entry
        assert entry["userHash"] == user_hash("acme", "hunter2")
        assert entry["leftOut"] == ["request", "answer"]
        assert not {"request", "answer"} & set(entry)
        assert it.book.writer.stats.without_content == 1
        assert b"hunter2" not in raw_bytes(it.root)
        it.tenant(mode="Full", redact=[{"name": "word", "pattern": "hunter2"}])
        await it.ask("my word is hunter2")
        assert (await it.written())[1]["request"]["messages"][0]["content"] == "my word is [word]"


async def test_how_a_request_ended_stands_in_its_entry(tmp_path: Path):
    async def breaks(request: EngineRequest) -> None:
        if request.body.get("seed") == 400:
            await request.answer(400, b'{"object":"error","message":"no: the canary sings","code":400}')
            return
        await request.begin_stream()
        await request.chunk(request.delta("half", 1))
        request.writer.close()

    async with logged(tmp_path, ScriptedEngine(breaks)) as it:
        body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        response = await it.it.post(body)
        assert b"replica_lost" in await response.read()
        response = await it.it.post({**body, "seed": 400}, headers={"x-request-id": "mine"})
        assert response.status == 400
        lost, refused = await it.written()
    assert (lost["outcome"], lost["error"], lost["answer"][0]["content"]) == ("failed", "replica_lost", "half")
    assert (refused["outcome"], refused["status"], refused["clientRequestId"]) == ("rejected", 400, "mine")
    assert "canary" not in json.dumps(refused)


async def test_a_large_request_is_cut_and_its_pictures_are_notes(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo), log_entry_bytes=8192) as it:
        await it.ask([{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "see"}])
        await it.ask("x " * 100_000)
        picture, long = await it.written()
        assert it.book.budget.held == 0
    parts = picture["request"]["messages"][0]["content"]
    assert parts[0]["image_url"]["url"].startswith("[image/png, 675")
    assert parts[1] == {"type": "text", "text": "see"}
    assert len(json.dumps(long)) < 4 * 8192
    assert long["cut"] == ["request", "answer"] or long["leftOut"] == ["answer"]
    assert long["request"]["messages"][0]["content"].endswith("[cut]")


async def test_when_memory_is_full_entries_are_dropped_and_counted_and_requests_served(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo), log_queue_bytes=4096) as it:
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        stuck = it.book.writer._call(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30) and None)
        for number in range(20):
            await it.ask(f"request {number}")  # asserts that it is served
        dropped = it.book.writer.stats.dropped["memory"]
        assert dropped > 0
        assert it.book.budget.held <= 4096
        release.set()
        await asyncio.wrap_future(stuck)
        assert len(await it.written()) == 20 - dropped
        assert it.book.budget.held == 0
        await it.ask("again")
        assert len(await it.written()) == 21 - dropped


async def test_a_disk_that_refuses_drops_entries_and_serving_goes_on(tmp_path: Path):
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    async with logged(tmp_path, ScriptedEngine(echo), log_dir=blocked) as it:
        for _ in range(3):
            await it.ask("hello", stream=True)
        await asyncio.wrap_future(it.book.writer.close_files())
        assert it.book.writer.stats.dropped["disk"] == 3
        assert it.book.writer.stats.error


async def test_encrypted_logs_show_nothing_on_disk_and_all_to_their_tenant(tmp_path: Path):
    key_dir = tmp_path / "log-keys"
    key_dir.mkdir()
    (key_dir / "current").write_bytes(os.urandom(32))
    async with logged(tmp_path, ScriptedEngine(echo), log_key_dir=key_dir) as it:
        await it.ask("the canary sings")
        page = await it.page()
    assert page["data"][0]["request"]["messages"][0]["content"] == "the canary sings"
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert b"canary" not in on_disk
    assert len(entries(tmp_path / "logs", "acme", LogKeys(key_dir))) == 1


# --- GET /v1/logs ---------------------------------------------------------------------------------------------------


async def test_a_tenant_reads_its_own_entries_and_nobody_elses(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant("globex", mode="Full")
        await it.ask("from acme")
        await it.ask("from globex", name="globex")
        page = await it.page("globex")
        assert [entry["tenant"] for entry in page["data"]] == ["globex"]
        assert page["missing"] == []
        # No parameter leads to another's.
        refused = await it.page("globex", 400, tenant="acme")
        assert refused["error"]["message"] == (
            "`tenant` is not known; there are from, to, user, model, route, limit, cursor."
        )
        response = await it.it.session.get(f"{it.it.url}/v1/logs", headers={"authorization": "Bearer sk-none"})
        assert response.status == 401
        response = await it.it.session.post(f"{it.it.url}/v1/logs", headers={"authorization": "Bearer sk-test-acme"})
        assert response.status == 405


async def test_pages_filters_and_times(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        for number in range(5):
            await it.ask(f"text {number}", user=f"u-{number % 2}")
        first = await it.page(limit=2)
        second = await it.page(limit=2, cursor=first["next_cursor"])
        third = await it.page(limit=2, cursor=second["next_cursor"])
        texts = [e["request"]["messages"][0]["content"] for page in (first, second, third) for e in page["data"]]
        assert texts == [f"text {number}" for number in (4, 3, 2, 1, 0)]
        assert not third["has_more"]
        assert "next_cursor" not in third
        assert len((await it.page(user="u-0"))["data"]) == 3
        assert len((await it.page(model="llama"))["data"]) == 5
        assert len((await it.page(model="chat/other"))["data"]) == 0
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        assert (await it.page(query={"from": later}))["data"] == []
        assert len((await it.page(query={"to": later}))["data"]) == 5


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"limit": "0"}, "`limit` must be a number from 1 to 1000."),
        ({"limit": "many"}, "`limit` must be a number from 1 to 1000."),
        ({"from": "yesterday"}, "`from` must be a time such as 2026-11-22T06:00:00Z (UTC where no zone is given)."),
        ({"from": "2026-11-22", "to": "2026-11-21"}, "`from` must be before `to`."),
        ({"cursor": "!!"}, "`cursor` must be the `next_cursor` of the page before."),
        ({"users": "u"}, "`users` is not known; there are from, to, user, model, route, limit, cursor."),
    ],
)
async def test_what_is_asked_wrongly_is_said(tmp_path: Path, query: dict[str, str], message: str):
    async with logged(tmp_path) as it:
        answer = await it.page(status=400, query=query)
        assert answer["error"]["message"] == message
        assert answer["error"]["code"] == "invalid_parameter"


# --- the process ----------------------------------------------------------------------------------------------------


async def test_metrics_name_no_tenant(tmp_path: Path):
    from prometheus_client import CollectorRegistry, generate_latest

    from shoal.requestlog.logmetrics import RequestLogMetrics

    async with logged(tmp_path) as it:
        await it.ask("hello")
        await it.written()
        registry = CollectorRegistry()
        registry.register(RequestLogMetrics(it.book))
        text = generate_latest(registry).decode()
    assert "shoal_gateway_request_log_entries_total 1.0" in text
    assert 'shoal_gateway_request_log_dropped_total{reason="memory"} 0.0' in text
    assert "acme" not in text


async def test_a_tenant_without_a_log_costs_no_thread_and_no_folder(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant(mode="Off")
        await it.ask("hello")
        assert it.book.writer._thread is None
        assert it.book.budget.held == 0
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("mode", ["Full", "Metadata"])
async def test_a_logged_request_leaves_nothing_for_the_garbage_collector(tmp_path: Path, mode: str):
    def of_the_log() -> int:
        return sum(str(type(thing).__module__).startswith("shoal.requestlog") for thing in gc.get_objects())

    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant(mode=mode)
        gc.collect()
        gc.disable()
        try:
            await it.ask("hello", stream=True)
            await it.written()
            before = of_the_log()
            for _ in range(5):
                await it.ask("hello", stream=True)
            await it.written()
            assert of_the_log() - before < 5
        finally:
            gc.enable()


async def test_a_clock_that_is_set_deletes_nothing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        await it.ask("hello")
        await it.written()
        days = {"acme": 7}
        real = datetime

        class Later(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return real.now(tz) + timedelta(days=400)

        monkeypatch.setattr("shoal.requestlog.logger.datetime", Later)
        it.book._clock -= 400 * 86400
        it.book._sweep(days)
        assert len(await it.written()) == 1
        it.book._sweep(days)  # an hour later it still says so
        assert await it.written() == []


# --- the tests above can fail ---------------------------------------------------------------------------------------


async def test_without_redaction_the_canary_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rules, "text", lambda _self, text, *_args, **_more: text)
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        await it.ask(f"I am {CANARY}")
        await it.written()
        assert CANARY.encode() in raw_bytes(tmp_path)


async def test_without_the_look_at_whose_the_key_is_anothers_entries_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = LogsApi.page
    monkeypatch.setattr(LogsApi, "page", lambda self, _tenant, query: page(self, "acme", query))
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant("globex", mode="Full")
        await it.ask("from acme")
        assert [entry["tenant"] for entry in (await it.page("globex"))["data"]] == ["acme"]
