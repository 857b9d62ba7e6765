"""Text to tokens and back on every engine: its HTTP process answers, and no scheduler hears of it."""

import json
from typing import Any

import pytest

from shoal.core.fields.table import DETOKENIZE, TOKENIZE
from tests.contract.conftest import Answer, Client
from tests.support.engines import CONTEXT, SERVED

USER = {"role": "user", "content": "hello"}


async def tokens_of(client: Client, **body: Any) -> Answer:
    return await client.post(client.words.wire.paths[TOKENIZE], {"model": SERVED, **body})


async def text_of(client: Client, tokens: list[int]) -> Answer:
    return await client.post(client.words.wire.paths[DETOKENIZE], {"model": SERVED, "tokens": tokens})


async def test_text_becomes_tokens_and_tokens_become_text(any_client: Client):
    field = "prompt" if any_client.words.differences.detokenized_as == "`prompt`" else "text"
    one = await tokens_of(any_client, prompt="hello world")
    assert one.status == 200
    tokens = one.json["tokens"]
    assert (one.json["count"], one.json["max_model_len"]) == (len(tokens), CONTEXT)
    assert (await text_of(any_client, tokens)).json == {field: "hello world"}
    nothing = await tokens_of(any_client, prompt="", add_special_tokens=False)
    assert (nothing.json["tokens"], nothing.json["count"]) == ([], 0)
    assert (await text_of(any_client, [])).json == {field: ""}


async def test_messages_become_the_tokens_that_a_chat_has(any_client: Client):
    counted = await tokens_of(any_client, messages=[USER])
    chat = await any_client.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
    assert counted.json["count"] == chat.json["usage"]["prompt_tokens"]
    plain = await tokens_of(any_client, messages=[USER], add_generation_prompt=False)
    assert plain.json["count"] == counted.json["count"] - 1


async def test_an_answer_that_is_begun_is_continued(any_client: Client):
    """A gateway relies on it for Anthropic's API. Without the field SGLang takes the text for the user's."""
    begun = {"role": "assistant", "content": "hello there"}
    turns = [USER, begun]
    opened = (await tokens_of(any_client, messages=[USER])).json["tokens"]
    text = (await tokens_of(any_client, prompt="hello there", add_special_tokens=False)).json["tokens"]
    more: dict[str, Any] = {"continue_final_message": True}
    more |= json.loads(b'{"model":"%b"%b}' % (SERVED.encode(), any_client.words.wire.added(TOKENIZE, more) or b""))
    assert (await tokens_of(any_client, messages=turns, **more)).json["tokens"] == [*opened, *text]
    chat = await any_client.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1, **more})
    assert chat.json["usage"]["prompt_tokens"] == len(opened) + len(text)


async def test_nothing_of_it_is_counted(any_client: Client):
    """So a meter books nothing for it."""
    names = [any_client.words.counter(name) for name in ("prompt_tokens", "generation_tokens")]
    before = [await any_client.metric(name) for name in names]
    await tokens_of(any_client, prompt="hello world")
    await text_of(any_client, [300])
    assert [await any_client.metric(name) for name in names] == before


@pytest.mark.parametrize("wrong", [{}, {"prompt": [1]}, {"messages": "x"}, {"messages": []}])
async def test_what_is_no_text_is_refused(any_client: Client, wrong: dict[str, Any]):
    assert (await tokens_of(any_client, **wrong)).status == 400


@pytest.mark.parametrize("token", [-1, 2**40])
async def test_ids_that_no_token_can_have(any_client: Client, token: int):
    """Why a gateway refuses them: a 5xx would look like the replica's fault."""
    assert (await text_of(any_client, [token])).status == any_client.words.differences.no_token
    assert (await tokens_of(any_client, prompt="x")).status == 200
