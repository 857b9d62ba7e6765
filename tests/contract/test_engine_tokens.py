"""Text to tokens and back: an engine's HTTP process answers, and no scheduler hears of it."""

from typing import Any

import pytest

from tests.contract.conftest import Client
from tests.support.shapes import mismatch

USER = {"role": "user", "content": "hello"}


async def test_text_becomes_tokens_and_tokens_become_text(client: Client):
    one = await client.post("/v1/tokenize", {"prompt": "hello world"})
    assert one.status == 200
    assert mismatch(one.json, {"tokens": [int], "count": int, "max_model_len": int}) is None
    tokens = one.json["tokens"]
    assert one.json == {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}
    several = await client.post("/v1/tokenize", {"prompt": ["hello world", ""], "add_special_tokens": False})
    assert (several.json["tokens"], several.json["count"]) == ([tokens, []], [len(tokens), 0])
    assert (await client.post("/v1/detokenize", {"tokens": tokens})).json == {"text": "hello world"}
    lists = await client.post("/v1/detokenize", {"tokens": [tokens, tokens[:1]]})
    assert lists.json["text"][0] == "hello world"
    assert (await client.post("/v1/detokenize", {"tokens": []})).json == {"text": ""}
    special = {"tokens": [0, 1], "skip_special_tokens": False}
    assert (await client.post("/v1/detokenize", special)).json == {"text": "<|bos|><|eos|>"}
    assert (await client.post("/v1/detokenize", {**special, "skip_special_tokens": True})).json == {"text": ""}


async def test_messages_become_the_tokens_that_a_chat_has(client: Client):
    counted = await client.post("/v1/tokenize", {"messages": [USER]})
    chat = await client.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
    assert counted.json["count"] == chat.json["usage"]["prompt_tokens"]
    plain = await client.post("/v1/tokenize", {"messages": [USER], "add_generation_prompt": False})
    assert plain.json["count"] == counted.json["count"] - 1


async def test_nothing_of_it_is_counted(client: Client):
    """So a meter books nothing for it."""
    names = ("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_requests_total")
    before = [await client.metric(name) for name in names]
    await client.post("/v1/tokenize", {"prompt": "hello world"})
    await client.post("/v1/detokenize", {"tokens": [300]})
    assert [await client.metric(name) for name in names] == before


@pytest.mark.parametrize("wrong", [{}, {"prompt": "x", "messages": [USER]}, {"messages": []}, {"prompt": [1]}])
async def test_what_is_no_text_is_refused(client: Client, wrong: dict[str, Any]):
    assert (await client.post("/v1/tokenize", wrong)).status == 400


@pytest.mark.parametrize("tokens", [[-1], [2**40]])
async def test_ids_that_no_token_can_have_are_an_error_of_the_engine(client: Client, tokens: list[int]):
    """Why a gateway refuses them: a 5xx would look like the replica's fault."""
    assert (await client.post("/v1/detokenize", {"tokens": tokens})).status == 500
