"""Answers, usage, streams and errors that every engine gives, and where they differ, by the data of the engine."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Client
from tests.support.engines import API_KEY, CONTEXT, MODEL, SERVED

ENDPOINTS_OF_OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/classify": {"input": "x"},
}
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
    assert body["object"] == ("text_completion" if path == COMPLETIONS else "chat.completion")
    assert isinstance(body["id"], str)
    assert isinstance(body["created"], int)
    if path == CHAT:
        assert choice["message"]["role"] == "assistant"


async def test_the_model_defines_how_many_tokens_a_prompt_has(any_client: Client):
    """Its own tokenizer and chat template do, so a count made before the request holds."""
    counts = [7, 3, 6]
    bodies = [
        (COMPLETIONS, asked(COMPLETIONS, prompt="hello world, how are you")),
        (COMPLETIONS, asked(COMPLETIONS, prompt=[40, 41, 42])),
        (CHAT, asked(CHAT)),
    ]
    found = [(await any_client.post(path, body)).json["usage"]["prompt_tokens"] for path, body in bodies]
    assert found == counts


async def test_the_text_of_a_message_may_come_in_parts(any_client: Client):
    parts = [{"type": "text", "text": "hello"}]
    whole = await any_client.post(CHAT, asked(CHAT, temperature=0))
    answer = await any_client.post(CHAT, asked(CHAT, temperature=0, messages=[{"role": "user", "content": parts}]))
    assert answer.json["usage"]["prompt_tokens"] == whole.json["usage"]["prompt_tokens"]
    assert answer.json["choices"][0]["message"]["content"] == whole.json["choices"][0]["message"]["content"]


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


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_says_what_a_whole_answer_says(any_client: Client, path: str):
    whole = (await any_client.post(path, asked(path, temperature=0, max_tokens=12))).json["choices"][0]
    stream = await any_client.post(path, asked(path, temperature=0, max_tokens=12, stream=True))
    assert text_of(stream.events) == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])
    *chunks, _ = stream.events
    # What the relay takes for granted: one id, one model, and in a chat the role before the text.
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {SERVED}
    assert {chunk["object"] for chunk in chunks} == {
        "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
    }
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("path", PATHS)
async def test_several_choices_count_their_prompt_once(any_client: Client, path: str):
    answer = await any_client.post(path, asked(path, n=2, temperature=1))
    one = await any_client.post(path, asked(path))
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    assert answer.json["usage"]["completion_tokens"] == 8
    assert answer.json["usage"]["prompt_tokens"] == one.json["usage"]["prompt_tokens"]
    body = asked(path, n=2, temperature=1, stream=True, stream_options={"include_usage": True})
    *chunks, last, done = (await any_client.post(path, body)).events
    assert done == "[DONE]"
    assert last["usage"]["prompt_tokens"] == one.json["usage"]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == 8
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]


async def test_several_choices_of_the_most_likely_tokens(any_client: Client):
    answer = await any_client.post(COMPLETIONS, asked(COMPLETIONS, n=2, temperature=0))
    assert answer.status == any_client.words.differences.greedy_choices


async def test_several_prompts_are_answered_in_order_and_counted_together(any_client: Client):
    prompts = ["hello", "hello world"]
    answer = (await any_client.post(COMPLETIONS, asked(COMPLETIONS, prompt=prompts, temperature=0))).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    alone = [(await any_client.post(COMPLETIONS, asked(COMPLETIONS, prompt=p, temperature=0))).json for p in prompts]
    assert [choice["text"] for choice in answer["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"]["completion_tokens"] == 8


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
    stream = await any_client.post(COMPLETIONS, body | {"stop": [stop], "stream": True})
    assert text_of(stream.events) == choice["text"]
    assert stream.events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_completion_without_a_limit_has_16_tokens(any_client: Client):
    body = {"prompt": "no limit", "ignore_eos": True}
    assert (await any_client.post(COMPLETIONS, body)).json["usage"]["completion_tokens"] == 16


async def test_a_chat_takes_both_names_of_the_limit(any_client: Client):
    answer = await any_client.post(CHAT, asked(CHAT, max_tokens=3))
    assert answer.json["usage"]["completion_tokens"] == 3
    answer = await any_client.post(CHAT, asked(CHAT, max_tokens=3, max_completion_tokens=2))
    assert answer.json["usage"]["completion_tokens"] == 2
    answer = await any_client.post(CHAT, asked(CHAT, max_tokens=0))
    assert answer.status == any_client.words.differences.chat_of_nothing
    if answer.status == 200:
        assert answer.json["usage"]["completion_tokens"] == 0


async def test_a_chat_with_tools_where_nothing_parses_calls(any_client: Client):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    answer = await any_client.post(CHAT, asked(CHAT, tools=[tool]))
    assert answer.status == any_client.words.differences.tools_unparsed


async def test_echo_repeats_the_prompt(any_client: Client):
    answer = await any_client.post(COMPLETIONS, asked(COMPLETIONS, prompt="hello there", echo=True))
    assert answer.json["choices"][0]["text"].startswith("hello there")


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
    (CHAT, {"messages": USER, "max_tokens": -1}),
    (CHAT, {"messages": USER, "max_tokens": 9000}),
    (CHAT, {"messages": USER, "temperature": "a"}),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 6000}]}),
    (COMPLETIONS, {"prompt": [300] * 5000, "stream": True}),
    (COMPLETIONS, {"prompt": []}),
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


async def test_a_body_of_another_type_or_shape(any_client: Client):
    """Nothing of it may end an engine or look like a replica's fault, but for the row of the table."""
    answer = await any_client.call("POST", CHAT, raw=b"{}", content_type="text/plain")
    assert (answer.status, any_client.words.code(answer.json)) == (400, 400)
    assert "Only 'application/json' is allowed" in any_client.words.message(answer.json)
    assert (await any_client.call("POST", COMPLETIONS, raw=b"[]")).status == 400
    assert (await any_client.call("POST", CHAT, raw=b"[]")).status == any_client.words.differences.chat_of_a_list


@pytest.mark.parametrize("path", ENDPOINTS_OF_OTHERS)
async def test_what_the_model_is_not_for_is_refused_and_harms_nobody(any_client: Client, path: str):
    wire = any_client.words.wire
    answer = await any_client.post(wire.paths[path], ENDPOINTS_OF_OTHERS[path])
    assert answer.status == any_client.words.differences.other_endpoint
    assert (await any_client.post(COMPLETIONS, asked(COMPLETIONS))).status == 200


async def test_a_path_that_is_not_there(any_client: Client):
    assert (await any_client.get("/v1/nope", key=None)).status == 401
    answer = await any_client.get("/v1/nope")
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
    answer = await any_client.get(CHAT)
    assert (answer.status, answer.json) == (405, {"detail": "Method Not Allowed"})


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
    chat = asked(CHAT, rid="mine", stream=True)
    async with any_client.session.post(any_client.engine.url + CHAT, json=chat, headers=headers) as response:
        text = (await response.read()).decode()
    ids = {json.loads(event[6:])["id"] for event in text.split("\n\n") if event and event != "data: [DONE]"}
    assert ids == {any_client.words.differences.chat_id_prefix + "mine"}


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
