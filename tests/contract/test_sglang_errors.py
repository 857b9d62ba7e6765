"""What a request can get wrong, and in which words SGLang says so; statuses of every engine: test_any_answers.py."""

from typing import Any

import pytest

from tests.contract.conftest import Client
from tests.support.engines import SERVED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}


def error(message: str, kind: str = "BadRequestError", code: int = 400) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


WORDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"messages": []}, error("Messages cannot be empty.")),
    (CHAT, {"messages": [USER], "max_tokens": -1}, error("max_new_tokens must be at least 0, got -1.")),
    (CHAT, {"messages": [USER], "top_p": 2}, error("top_p must be in (0, 1], got 2.0.")),
    (
        CHAT,
        {"messages": [USER], "temperature": -1},
        error("temperature must be a non-negative finite number, got -1.0."),
    ),
    (
        CHAT,
        {"messages": [USER], "tool_choice": "required"},
        error("Tools cannot be empty if tool choice is set to required."),
    ),
    (
        CHAT,
        {"messages": [USER], "max_tokens": 9000},
        error(
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total "
            "of 9005 tokens: 5 tokens from the input messages and 9000 tokens for the completion. Please reduce the "
            "number of tokens in the input messages or the completion to fit within the limit."
        ),
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x " * 6000}]},
        error("The input (12004 tokens) is longer than the model's context length (4096 tokens)."),
    ),
    (
        COMPLETIONS,
        {"prompt": "x " * 6000},
        error("The input (12000 tokens) is longer than the model's context length (4096 tokens)."),
    ),
    (
        COMPLETIONS,
        {"prompt": "x " * 6000, "stream": True},
        error("The input (12000 tokens) is longer than the model's context length (4096 tokens)."),
    ),
    (COMPLETIONS, {"prompt": ""}, error("Prompt cannot be empty")),
    (COMPLETIONS, {"prompt": []}, error("Prompt cannot be empty")),
    (
        COMPLETIONS,
        {"prompt": "x", "model": f"{SERVED}:adapter"},
        error(
            "LoRA adapter 'adapter' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        ),
    ),
    (
        "/v1/embeddings",
        {"input": "hello"},
        error(
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` when "
            "launching the server or try another model."
        ),
    ),
    (
        "/generate",
        {"sampling_params": {}},
        {"error": {"message": "Either text, input_ids or input_embeds should be provided."}},
    ),
]

INVALID: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "'loc': ('body', 'messages'), 'msg': 'Field required'"),
    (CHAT, {"messages": "x"}, "Input should be a valid list"),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "'role' must be one of 'system', 'assistant', 'tool'"),
    (CHAT, {"messages": [USER], "temperature": "a"}, "Input should be a valid number"),
    (COMPLETIONS, {}, "'loc': ('body', 'prompt')"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be positive"),
    (COMPLETIONS, {"prompt": "x", "model": 5}, "Input should be a valid string"),
]


@pytest.mark.parametrize(("path", "body", "expected"), WORDED, ids=lambda value: str(value)[:30])
async def test_refused_with_these_very_words(client: Client, path: str, body: dict[str, Any], expected: dict[str, Any]):
    answer = await client.post(path, body)
    assert (answer.status, answer.content_type) == (400, "application/json")
    assert answer.json == expected


@pytest.mark.parametrize(("path", "body", "part"), INVALID, ids=lambda value: str(value)[:30])
async def test_a_body_that_does_not_fit_is_a_400_never_a_422(
    client: Client, path: str, body: dict[str, Any], part: str
):
    answer = await client.post(path, body)
    assert answer.status == 400
    assert answer.json | {"message": ""} == error("", "Bad Request")
    assert "validation error" in answer.json["message"]
    assert part in answer.json["message"]


async def test_a_list_makes_chat_fail_and_completions_refuse(client: Client):
    answer = await client.call("POST", CHAT, raw=b"[]")
    assert (answer.status, answer.body) == (500, b"Internal Server Error")
    assert (await client.call("POST", COMPLETIONS, raw=b"[]")).status == 400


async def test_loads_of_an_unknown_section_fail(client: Client):
    assert (await client.get("/v1/loads?include=nonsense")).status == 500
