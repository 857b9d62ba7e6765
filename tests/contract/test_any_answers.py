"""Answers, usage, streams and errors that every engine gives, and where they differ, by the data of the engine."""

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Client
from tests.support.engines import API_KEY, CONTEXT, MODEL, SERVED

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = [COMPLETIONS, CHAT]
USER = [{"role": "user", "content": "hello"}]


def asked(path: str, **more: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"prompt": "the quick brown fox"} if path == COMPLETIONS else {"messages": USER}
    return {"model": SERVED, "max_tokens": 4, "ignore_eos": True, **content, **more}


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_has_its_tokens_and_the_reason_of_its_end(any_client: Client, path: str):
    answer = await any_client.post(path, asked(path))
    assert (answer.status, answer.content_type) == (200, "application/json")
    body = answer.json
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert len(choice["text"] if path == COMPLETIONS else choice["message"]["content"]) > 0
    usage = body["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert body["model"] == SERVED


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"continuous_usage_stats": True},
                {"include_usage": True, "continuous_usage_stats": True}],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
async def test_usage_in_a_stream_comes_as_it_was_asked_for(
    any_client: Client, path: str, options: dict[str, bool] | None
):
    given = options or {}
    more = {} if options is None else {"stream_options": options}
    answer = await any_client.post(path, asked(path, stream=True, **more))
    assert (answer.status, answer.content_type) == (200, "text/event-stream; charset=utf-8")
    *chunks, done = answer.events
    assert done == "[DONE]"
    closing = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(closing) == bool(given.get("include_usage"))
    for chunk in closing:
        assert chunk is chunks[-1]
        assert chunk["usage"]["completion_tokens"] == 4
        assert "cached_tokens" in chunk["usage"]["prompt_tokens_details"]
    each = [chunk["usage"] for chunk in chunks if chunk["choices"] and chunk.get("usage")]
    alone = any_client.words.differences.usage_without_include
    wanted = given.get("continuous_usage_stats", False) and (given.get("include_usage", False) or alone)
    assert bool(each) == wanted
    if wanted:
        assert each[-1]["completion_tokens"] == 4
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == ["length"]


async def test_several_choices_count_their_prompt_once(any_client: Client):
    answer = await any_client.post(COMPLETIONS, asked(COMPLETIONS, n=2, temperature=1))
    one = await any_client.post(COMPLETIONS, asked(COMPLETIONS))
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    assert answer.json["usage"]["completion_tokens"] == 8
    assert answer.json["usage"]["prompt_tokens"] == one.json["usage"]["prompt_tokens"]


async def test_cached_tokens_are_reported_in_the_engines_units(any_client: Client):
    unit = any_client.words.differences.cached_unit
    prompt = [300 + (i * 7) % 50 for i in range(100)]
    body = {"model": SERVED, "prompt": prompt, "max_tokens": 1}
    first = (await any_client.post(COMPLETIONS, body)).json["usage"]
    again = (await any_client.post(COMPLETIONS, body)).json["usage"]
    assert first["prompt_tokens"] == again["prompt_tokens"] == 100
    assert again["prompt_tokens_details"]["cached_tokens"] == 99 // unit * unit


async def test_a_salt_keeps_prefixes_apart(any_client: Client):
    prompt = [310 + (i * 11) % 40 for i in range(100)]
    body = {"model": SERVED, "prompt": prompt, "max_tokens": 1}
    await any_client.post(COMPLETIONS, body | {"cache_salt": "one"})
    other = (await any_client.post(COMPLETIONS, body | {"cache_salt": "two"})).json["usage"]
    same = (await any_client.post(COMPLETIONS, body | {"cache_salt": "one"})).json["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert same["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_stop_string_ends_an_answer_and_is_left_out(any_client: Client):
    whole = (await any_client.post(COMPLETIONS, asked(COMPLETIONS, max_tokens=40, temperature=0))).json["choices"][0]
    stop = whole["text"][5:8]
    body = asked(COMPLETIONS, max_tokens=40, temperature=0, stop=stop)
    choice = (await any_client.post(COMPLETIONS, body)).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole["text"][: whole["text"].index(stop)]


async def test_a_model_that_nobody_serves(any_client: Client):
    wanted = any_client.words.differences.unknown_model
    for more in ({}, {"stream": True}):
        answer = await any_client.post(COMPLETIONS, asked(COMPLETIONS) | {"model": "nobody"} | more)
        assert answer.status == wanted
    if wanted == 404:
        body = (await any_client.post(CHAT, asked(CHAT) | {"model": "nobody"})).json
        assert any_client.words.code(body) == 404
        assert "`nobody` does not exist" in any_client.words.message(body)


async def test_without_a_model_the_base_answers(any_client: Client):
    body = asked(COMPLETIONS)
    del body["model"]
    answer = await any_client.post(COMPLETIONS, body)
    assert answer.status == 200
    told = any_client.words.differences.answers_to
    assert answer.json["model"] == (SERVED if told == "the served name" else told)


async def test_fields_that_nobody_knows_are_ignored(any_client: Client):
    assert (await any_client.post(COMPLETIONS, asked(COMPLETIONS, foo=1))).status == 200


async def test_prompt_and_answer_together_beyond_the_context(any_client: Client):
    answer = await any_client.post(COMPLETIONS, {"prompt": [300] * 4090, "max_tokens": 100, "ignore_eos": True})
    assert answer.status == any_client.words.differences.beyond_context
    if answer.status == 200:
        assert answer.json["usage"]["total_tokens"] == CONTEXT


WRONG: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [300] * 5000}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 5000}),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    (COMPLETIONS, {"prompt": "x", "top_p": 2}),
    (COMPLETIONS, {"prompt": "x", "n": 0}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": "x", "model": 5}),
    (CHAT, {"messages": []}),
    (CHAT, {}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"messages": USER, "tool_choice": "required"}),
]


@pytest.mark.parametrize(("path", "body"), WRONG, ids=lambda value: str(value)[:30])
async def test_a_wrong_request_is_a_400_in_the_engines_shape(any_client: Client, path: str, body: dict[str, Any]):
    answer = await any_client.post(path, body)
    assert (answer.status, answer.content_type) == (400, "application/json")
    assert any_client.words.code(answer.json) == 400
    assert len(any_client.words.message(answer.json)) > 0


@pytest.mark.parametrize("raw", [b"{broken", b""], ids=["broken", "empty"])
async def test_a_body_that_is_no_json(any_client: Client, raw: bytes):
    answer = await any_client.call("POST", CHAT, raw=raw)
    assert (answer.status, any_client.words.code(answer.json)) == (400, 400)


async def test_a_key_is_wanted_and_another_one_is_refused(any_client: Client):
    for path in (COMPLETIONS, CHAT):
        for key in (None, "wrong"):
            answer = await any_client.call("POST", path, asked(path), key=key)
            assert (answer.status, answer.json) == (401, {"error": "Unauthorized"})
    for path in (any_client.words.load_path, any_client.words.unload_path):
        assert (await any_client.call("POST", path, {"lora_name": "x", "lora_path": "/x"}, key=None)).status == 401
    assert (await any_client.get("/v1/models", key=None)).status == 401
    for path in ("/metrics", any_client.words.differences.ready_path):
        assert (await any_client.get(path, key=None)).status == 200


async def test_an_engine_tells_its_model_and_its_longest_context(any_client: Client):
    (card,) = (await any_client.get("/v1/models")).json["data"]
    assert (card["id"], card["object"], card["parent"], card["max_model_len"]) == (SERVED, "model", None, CONTEXT)
    assert card["root"] in (SERVED, str(MODEL))


async def test_the_id_of_a_request_is_in_its_answer(any_client: Client):
    body = asked(COMPLETIONS, rid="mine")
    headers = {"authorization": f"Bearer {API_KEY}", "x-request-id": "mine"}
    async with any_client.session.post(any_client.engine.url + COMPLETIONS, json=body, headers=headers) as response:
        answer = await response.json()
    assert answer["id"] == any_client.words.differences.id_prefix + "mine"


async def test_one_id_twice_at_a_time(any_client: Client):
    headers = {"authorization": f"Bearer {API_KEY}", "x-request-id": "twice"}
    url, body = any_client.engine.url + COMPLETIONS, asked(COMPLETIONS, rid="twice")
    first = any_client.session.post(url, json=body | {"stream": True, "max_tokens": 3000}, headers=headers)
    async with first as stream:
        assert (await stream.content.readline()).startswith(b"data: {")
        async with any_client.session.post(url, json=body, headers=headers) as second:
            assert second.status == any_client.words.differences.same_id_twice
            await second.read()
        # The first goes on.
        assert stream.status == 200
        while not (line := await stream.content.readline()).startswith(b"data: {"):
            assert line == b"\n"


async def test_inference_at_an_open_path(any_client: Client):
    """Why vLLM needs a network policy beside its key."""
    answer = await any_client.call("POST", "/invocations", asked(COMPLETIONS), key=None)
    assert (answer.status == 200) == any_client.words.differences.open_inference


async def test_an_idle_connection_is_closed_after_five_seconds(any_client: Client):
    reader, writer = await asyncio.open_connection("127.0.0.1", any_client.engine.port)
    try:
        writer.write(f"GET {any_client.words.differences.ready_path} HTTP/1.1\r\nhost: engine\r\n\r\n".encode())
        async with asyncio.timeout(30):
            assert b"200" in await reader.readline()
        async with asyncio.timeout(30):
            await reader.read()  # returns at the end of the connection
    finally:
        writer.close()


async def test_a_client_can_keep_its_connection(any_client: Client):
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            headers = {"authorization": f"Bearer {API_KEY}"}
            async with session.post(
                any_client.engine.url + COMPLETIONS, json=asked(COMPLETIONS), headers=headers
            ) as found:
                assert found.status == 200
                await found.read()
