"""Text to tokens and back in the forms that only SGLang takes; test_any_tokens.py has those of every engine."""

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


@pytest.mark.parametrize("wrong", [{}, {"prompt": "x", "messages": [USER]}, {"messages": []}, {"prompt": [1]}])
async def test_what_is_no_text_is_refused(client: Client, wrong: dict[str, Any]):
    assert (await client.post("/v1/tokenize", wrong)).status == 400
