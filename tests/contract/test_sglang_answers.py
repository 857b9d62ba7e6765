"""Answers, streams and usage of SGLang to the last field; what every engine does is in test_any_answers.py."""

from typing import Any

import pytest

from tests.contract.conftest import Client
from tests.support.engines import SERVED
from tests.support.shapes import Const, Maybe, mismatch

USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
    "reasoning_tokens": Const(0),
    "completion_tokens_details": None,
}
NO_CACHE = {**USAGE, "prompt_tokens_details": None}
SHORT = {key: value for key, value in USAGE.items() if value is not None}
"""The last chunk of /v1/completions leaves out what is null."""
METADATA = {
    "weight_version": Const("default"),
    "weight_versions": [{"version": Const("default"), "start": Const(0), "end": int}],
}
END = {"finish_reason": Const("length"), "matched_stop": None, "logprobs": None}
OPEN = {"finish_reason": None, "matched_stop": None, "logprobs": None}
PATHS = ["/v1/completions", "/v1/chat/completions"]
OPTIONS: list[Any] = [
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    {"continuous_usage_stats": True},
    None,
]


def request(path: str, content: str = "hello", **more: Any) -> dict[str, Any]:
    """A request of either route. Greedy, so that both engines repeat themselves."""
    body: dict[str, Any] = {"model": SERVED, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    if path == "/v1/completions":
        return body | {"prompt": content}
    return body | {"messages": [{"role": "user", "content": content}]}


def head(kind: str, model: str = SERVED) -> dict[str, Any]:
    return {"id": str, "object": Const(kind), "created": int, "model": Const(model)}


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


async def test_completion(client: Client):
    answer = await client.post("/v1/completions", request("/v1/completions"))
    assert (answer.status, answer.content_type) == (200, "application/json")
    shape = {
        **head("text_completion"),
        "choices": [{"index": Const(0), "text": str, **END}],
        "usage": USAGE,
        "metadata": METADATA,
    }
    assert mismatch(answer.json, shape) is None
    assert answer.json["usage"]["completion_tokens"] == 6


async def test_chat_completion(client: Client):
    answer = await client.post("/v1/chat/completions", request("/v1/chat/completions"))
    assert (answer.status, answer.content_type) == (200, "application/json")
    message = {"role": Const("assistant"), "content": str, "reasoning_content": None}
    shape = {
        **head("chat.completion"),
        "choices": [{"index": Const(0), "message": message, **END}],
        "usage": USAGE,
        "metadata": METADATA,
    }
    assert mismatch(answer.json, shape) is None
    assert answer.json["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("options", OPTIONS, ids=["both", "include", "continuous", "neither"])
async def test_stream_of_completions(client: Client, options: dict[str, bool] | None):
    path = "/v1/completions"
    body = request(path, stream=True) | ({} if options is None else {"stream_options": options})
    answer = await client.post(path, body)
    assert (answer.status, answer.content_type) == (200, "text/event-stream; charset=utf-8")
    *chunks, done = answer.events
    assert done == "[DONE]"
    options = options or {}
    if options.get("include_usage"):
        last = chunks.pop()
        assert mismatch(last, {**head("text_completion"), "choices": Const([]), "usage": SHORT}) is None
        assert last["usage"]["completion_tokens"] == 6
    usage = NO_CACHE if options.get("continuous_usage_stats") else None
    for i, chunk in enumerate(chunks):
        choice = {"index": Const(0), "text": str, **(END if i == len(chunks) - 1 else OPEN)}
        assert mismatch(chunk, {**head("text_completion"), "choices": [choice], "usage": usage}) is None
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks] if usage else []
    assert counts == sorted(counts)
    assert counts[-1:] == ([6] if usage else [])
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("options", OPTIONS, ids=["both", "include", "continuous", "neither"])
async def test_stream_of_chat(client: Client, options: dict[str, bool] | None):
    path = "/v1/chat/completions"
    body = request(path, stream=True) | ({} if options is None else {"stream_options": options})
    answer = await client.post(path, body)
    assert (answer.status, answer.content_type) == (200, "text/event-stream; charset=utf-8")
    *chunks, done = answer.events
    assert done == "[DONE]"
    options = options or {}
    frame = head("chat.completion.chunk")
    if options.get("include_usage"):
        last = chunks.pop()
        assert mismatch(last, {**frame, "choices": Const([]), "usage": USAGE}) is None
        assert last["usage"]["completion_tokens"] == 6
    role, *content, end = chunks
    delta = {"reasoning_content": None, "role": Const("assistant"), "content": Const("")}
    assert mismatch(role, {**frame, "choices": [{"index": Const(0), "delta": delta, **OPEN}]}) is None
    # Chat reports cached tokens in every chunk with usage, completions in the last one only.
    usage = {"usage": USAGE} if options.get("continuous_usage_stats") else {}
    delta = {"reasoning_content": None, "content": str}
    for chunk in content:
        assert mismatch(chunk, {**frame, "choices": [{"index": Const(0), "delta": delta, **OPEN}], **usage}) is None
    delta = {"reasoning_content": None}
    assert mismatch(end, {**frame, "choices": [{"index": Const(0), "delta": delta, **END}]}) is None
    counts = [chunk["usage"]["completion_tokens"] for chunk in content] if usage else []
    assert counts == sorted(counts)
    assert counts[-1:] == ([6] if usage else [])


@pytest.mark.parametrize("path", PATHS)
async def test_a_repeated_prompt_is_cached_but_for_its_last_token(client: Client, path: str):
    await client.admin("/flush_cache", {})
    body = request(path, "a prompt that comes twice and is long enough to be worth it")
    first, second = [(await client.post(path, body)).json["usage"] for _ in range(2)]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1
    stream = await client.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    usage = stream.events[-2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.mark.parametrize("path", PATHS)
async def test_two_choices_count_the_prompt_once(client: Client, path: str):
    single = (await client.post(path, request(path))).json["usage"]
    answer = (await client.post(path, request(path, n=2))).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == single["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 12
    stream = await client.post(path, request(path, n=2, stream=True, stream_options={"include_usage": True}))
    *chunks, last, done = stream.events
    assert done == "[DONE]"
    assert last["usage"]["prompt_tokens"] == single["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == 12
    # Each choice has an id of its own, but in chat the choice that spoke last closes for both.
    said = [chunk for chunk in chunks if path == "/v1/completions" or not chunk["choices"][0]["finish_reason"]]
    ids = {(chunk["id"], choice["index"]) for chunk in said for choice in chunk["choices"]}
    assert len(ids) == len({identity for identity, _ in ids}) == 2
    assert {chunk["id"] for chunk in [*chunks, last] if chunk not in said} == {said[-1]["id"]}
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model_is_answered_under_its_own_name(client: Client, path: str):
    answer = await client.post(path, request(path) | {"model": "no-such-model"})
    assert (answer.status, answer.json["model"]) == (200, "no-such-model")
    body = request(path)
    del body["model"]
    assert (await client.post(path, body)).json["model"] == "default"


@pytest.mark.parametrize("path", PATHS)
async def test_the_request_id_becomes_the_id(client: Client, path: str):
    assert (await client.post(path, request(path, rid="chosen-1"))).json["id"] == "chosen-1"
    stream = await client.post(path, request(path, rid="chosen-2", stream=True, stream_options={"include_usage": True}))
    assert {event["id"] for event in stream.events if event != "[DONE]"} == {"chosen-2"}
    assert (await client.post(path, request(path, rid="chosen-3", n=2))).json["id"] != "chosen-3"


async def test_a_stop_string_ends_the_answer_before_it(client: Client):
    path = "/v1/completions"
    whole = (await client.post(path, request(path, "stop", max_tokens=16))).json["choices"][0]["text"]
    stop = whole[len(whole) // 2]
    choice = (await client.post(path, request(path, "stop", max_tokens=16, stop=stop))).json["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    assert choice["text"] == whole[: whole.index(stop)]
    stream = await client.post(path, request(path, "stop", max_tokens=16, stop=[stop], stream=True))
    assert stream.events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_chat_takes_tools_and_text_parts(client: Client):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    parts = [{"type": "text", "text": "hello"}]
    body = request("/v1/chat/completions", tools=[tool]) | {"messages": [{"role": "user", "content": parts}]}
    answer = await client.post("/v1/chat/completions", body)
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] == 6


async def test_native_generate(client: Client):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
    answer = (await client.post("/generate", body)).json
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert answer["meta_info"]["prompt_tokens"] == 2
    assert answer["meta_info"]["completion_tokens"] == 3
    *chunks, done = (await client.post("/generate", body | {"stream": True})).events
    assert done == "[DONE]"
    assert chunks[-1]["text"] == answer["text"], "every event repeats the whole text"
    assert mismatch(chunks[-1]["meta_info"]["cached_tokens"], Maybe(int)) is None
