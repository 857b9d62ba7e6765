"""A request's life in SGLang: aborts by id, a full queue to the last field. The rest is in test_any_life.py."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Client
from tests.support.engines import (
    API_KEY,
    MAX_QUEUED,
    MAX_RUNNING,
    SERVED,
    Kind,
    running_engine,
)
from tests.support.shapes import Const, mismatch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"model": SERVED, "max_tokens": 3000, "ignore_eos": True}
FULL = {"object": "error", "message": "The request queue is full.", "param": None, "code": 503}


def long_request(path: str, content: str | list[str], **more: Any) -> dict[str, Any]:
    prompt = {"prompt": content} if path == COMPLETIONS else {"messages": [{"role": "user", "content": content}]}
    return LONG | prompt | more


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_client_that_leaves_a_stream_stops_it(client: Client, path: str):
    aborted = await client.metric("sglang:num_aborted_requests_total")
    headers = {"authorization": f"Bearer {API_KEY}"}
    body = long_request(path, "leave", stream=True)
    async with client.session.post(client.engine.url + path, json=body, headers=headers) as response:
        for _ in range(8):
            await response.content.readline()
        assert (await client.load())["num_running_reqs"] == 1
    await client.idle()
    assert await client.metric("sglang:num_aborted_requests_total") == aborted + 1


async def test_a_client_that_leaves_a_whole_answer_stops_it_a_little_later(client: Client):
    aborted = await client.metric("sglang:num_aborted_requests_total")
    task = client.background(COMPLETIONS, long_request(COMPLETIONS, "leave"))
    await client.until("running", lambda load: load["num_running_reqs"] == 1)
    task.cancel()
    await client.idle()
    assert await client.metric("sglang:num_aborted_requests_total") == aborted + 1


async def test_abort_by_id_ends_an_answer_as_abort(client: Client):
    whole = client.background(COMPLETIONS, long_request(COMPLETIONS, "one", rid="one"))
    stream = client.background(CHAT, long_request(CHAT, "two", rid="two", stream=True))
    await client.until("both run", lambda load: load["num_running_reqs"] == 2)
    assert (await client.admin("/abort_request", {"rid": "nobody"})).status == 200
    assert (await client.load())["num_running_reqs"] == 2
    for rid in ("one", "two"):
        assert (await client.admin("/abort_request", {"rid": rid})).status == 200
    choice = (await whole).json["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("abort", None)
    assert choice["text"]
    *_, end, done = (await stream).events
    assert (end["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


async def test_an_id_ends_all_that_begin_with_it_once_one_has_it(client: Client):
    whole = [client.background(COMPLETIONS, long_request(COMPLETIONS, rid, rid=rid)) for rid in ("same", "same.2")]
    await client.until("both run", lambda load: load["num_running_reqs"] == 2)
    for nothing in ({"rid": ""}, {}, {"rid": "sam"}):
        assert (await client.admin("/abort_request", nothing)).status == 200
    assert (await client.load())["num_running_reqs"] == 2, "neither an empty id nor one that nobody has"
    assert (await client.admin("/abort_request", {"rid": "same"})).status == 200
    for task in whole:
        assert (await task).json["choices"][0]["finish_reason"] == "abort"


async def test_prompts_in_a_list_have_an_id_each(client: Client):
    whole = client.background(COMPLETIONS, long_request(COMPLETIONS, ["one", "two"], rid="list"))
    await client.until("both run", lambda load: load["num_running_reqs"] == 2)
    await client.admin("/abort_request", {"rid": "list_1"})
    await client.until("one runs", lambda load: load["num_running_reqs"] == 1)
    await client.admin("/abort_request", {"rid": "list_0"})
    answer = (await whole).json
    assert answer["id"] == "list_0"
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
    single = client.background(COMPLETIONS, long_request(COMPLETIONS, ["one"], rid="single"))
    await client.until("it runs", lambda load: load["num_running_reqs"] == 1)
    await client.admin("/abort_request", {"rid": "single_0"})
    assert (await single).json["id"] == "single_0"


async def test_an_id_can_be_used_by_one_running_request_only(client: Client):
    client.background(COMPLETIONS, long_request(COMPLETIONS, "first", rid="twice"))
    await client.until("running", lambda load: load["num_running_reqs"] == 1)
    answer = await client.post(COMPLETIONS, {"prompt": "second", "rid": "twice"})
    assert (answer.status, answer.json["message"]) == (400, "Duplicate request ID detected: twice")
    await client.admin("/abort_request", {"rid": "twice"})


async def fill(client: Client, count: int) -> None:
    """Starts long requests one after another: several at once would overflow the short queue while they arrive."""
    for i in range(count):
        client.background(COMPLETIONS, long_request(COMPLETIONS, f"fill {i}", rid=f"fill-{i}"))
        await client.until("one more", lambda load, i=i: load["num_running_reqs"] + load["num_waiting_reqs"] > i)


async def test_a_full_queue_is_a_503_and_in_a_stream_an_event(client: Client):
    await fill(client, MAX_RUNNING + MAX_QUEUED)
    for path in (COMPLETIONS, CHAT):
        answer = await client.post(path, long_request(path, "too many"))
        assert (answer.status, answer.json) == (503, FULL | {"type": "503"})
        usage = {"stream_options": {"include_usage": True}}
        answer = await client.post(path, long_request(path, "too many", stream=True, **usage))
        assert (answer.status, answer.content_type) == (200, "text/event-stream; charset=utf-8")
        error, last, done = answer.events
        assert error == {"error": FULL | {"type": "SERVICE_UNAVAILABLE"}}
        assert last["usage"]["total_tokens"] == 0, "a refused request still gets its usage chunk, with nothing in it"
        assert done == "[DONE]"
    # One that is aborted while it waits has used nothing.
    await client.admin("/abort_request", {"rid": f"fill-{MAX_RUNNING}"})
    waiting = (await client.tasks[MAX_RUNNING]).json
    assert waiting["choices"][0]["finish_reason"] == "abort"
    assert waiting["usage"]["completion_tokens"] == 0
    await client.admin("/abort_request", {"abort_all": True})
    for task in client.tasks:
        assert (await task).status == 200


async def test_a_waiting_request_runs_when_another_ends(client: Client):
    await fill(client, MAX_RUNNING)
    await client.until("all run", lambda load: load["num_running_reqs"] == MAX_RUNNING)
    waiting = client.background(COMPLETIONS, {"prompt": "wait", "max_tokens": 2})
    await client.until("waits", lambda load: load["num_waiting_reqs"] == 1)
    await client.admin("/abort_request", {"rid": "fill-0"})
    assert (await waiting).json["usage"]["completion_tokens"] == 2
    await client.admin("/abort_request", {"abort_all": True})


async def test_counters_grow_by_what_usage_says(client: Client):
    names = [f"sglang:{name}_total" for name in ("prompt_tokens", "generation_tokens", "cached_tokens", "num_requests")]
    before = [await client.metric(name) for name in names]
    body = {"prompt": "count these tokens twice", "max_tokens": 5, "ignore_eos": True}
    usages = [(await client.post(COMPLETIONS, body)).json["usage"] for _ in range(2)]
    expected = [
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["completion_tokens"] for usage in usages),
        sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        2,
    ]
    assert [await client.metric(name) - b for name, b in zip(names, before, strict=True)] == expected


# --- engines of their own -------------------------------------------------------------------------------------------


async def test_sigterm_drains_and_still_takes_new_requests(kind: Kind, tmp_path: Path):
    more = ["--sim-drain-poll-seconds", "0.5"] if kind == "sim" else []
    with running_engine(kind, tmp_path, *more) as engine:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, headers={"authorization": f"Bearer {API_KEY}"}) as session:
            body = {"prompt": "finish me", "max_tokens": 400, "ignore_eos": True, "stream": True}
            async with session.post(engine.url + COMPLETIONS, json=body) as stream:
                await stream.content.readline()
                engine.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(30):
                    while engine.ready_state() != "503":
                        await asyncio.sleep(0.02)
                for path in ("/health", "/ping"):
                    async with session.get(engine.url + path) as answer:
                        assert answer.status == 503
                async with session.post(engine.url + COMPLETIONS, json={"prompt": "late", "max_tokens": 2}) as answer:
                    assert answer.status == 200
                rest = (await stream.content.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        end = json.loads(rest.split("\n\n")[-3].removeprefix("data: "))
        assert end["choices"][0]["finish_reason"] == "length"
        assert await asyncio.to_thread(engine.process.wait, 200) == 0


async def test_embeddings_need_an_engine_of_their_own(kind: Kind, tmp_path: Path):
    shape = {
        "data": [{"embedding": [float], "index": int, "object": Const("embedding")}],
        "model": str,
        "object": Const("list"),
        "usage": {
            "prompt_tokens": int,
            "total_tokens": int,
            "completion_tokens": Const(0),
            "prompt_tokens_details": None,
            "reasoning_tokens": Const(0),
            "completion_tokens_details": None,
        },
    }
    with running_engine(kind, tmp_path, "--is-embedding") as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            client = Client(engine, session)
            answer = await client.post("/v1/embeddings", {"model": SERVED, "input": ["hello", "hello world"]})
            assert answer.status == 200
            assert mismatch(answer.json, shape) is None
            assert [item["index"] for item in answer.json["data"]] == [0, 1]
            assert answer.json["usage"]["prompt_tokens"] == 5
            assert {len(item["embedding"]) for item in answer.json["data"]} == {64}
            again = await client.post("/v1/embeddings", {"model": SERVED, "input": "hello"})
            first, same = answer.json["data"][0]["embedding"], again.json["data"][0]["embedding"]
            assert same == pytest.approx(first, abs=1e-4)
            coded = await client.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"})
            assert isinstance(coded.json["data"][0]["embedding"], str)
            for wrong in ({"input": ""}, {"input": []}, {}, {"input": "x", "dimensions": 8}):
                assert (await client.post("/v1/embeddings", wrong)).status == 400
            assert (await client.get("/model_info")).json["is_generation"] is False
            # Whoever sends such an engine a chat kills it: a gateway must never do that.
            with pytest.raises(aiohttp.ClientError):
                await client.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
        await asyncio.to_thread(engine.process.wait, 200)
        assert engine.process.returncode != 0
