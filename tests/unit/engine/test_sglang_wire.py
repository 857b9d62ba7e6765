"""What SGLang says of the drafts of a request, and where it is asked to."""

import json
from typing import Any

import pytest

from shoal.engine.sglang.wire import WIRE
from shoal.engine.wire import AcceptedDrafts, EngineCall, SpeculatedAnswers

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = b'{"model":"ns/chat","rid":"r"}'


def call(path: str = CHAT, prompts: int = 1, choices: int = 1, adapter: str | None = None) -> EngineCall:
    return EngineCall(path, "ns/chat", adapter, "r", 1, speculated=SpeculatedAnswers(prompts, choices))


def details(correct: Any, proposed: Any = 9) -> dict[str, Any]:
    return {"spec_accept_rate": 0.5, "spec_num_correct_drafts": correct, "spec_num_proposed_drafts": proposed}


def read(data: bytes, prompts: int = 1, choices: int = 1) -> AcceptedDrafts | None:
    reads = WIRE.accepted_drafts(call(COMPLETIONS, prompts, choices))
    assert reads is not None
    return reads(data)


def whole(extension: Any, spaces: bool = False) -> bytes:
    body = {"id": "r", "choices": [{"text": 'ä "sglext":{} '}], "usage": {"prompt_tokens": 1}, "sglext": extension}
    return json.dumps(body, separators=(", ", ": ") if spaces else (",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        (call(), {"return_spec_tokens_details": True}),
        (call(adapter="a.1"), {"return_spec_tokens_details": True, "lora_path": "a.1"}),
        (call(COMPLETIONS, choices=3), {"return_spec_tokens_details": True}),
        (call(COMPLETIONS, prompts=2, choices=3), {"return_spec_tokens_details": True}),
        # SGLang would tell of the first prompt alone.
        (call(COMPLETIONS, prompts=2), {}),
        (call(COMPLETIONS, prompts=2, adapter="a.1"), {"lora_path": "a.1"}),
        (call("/v1/embeddings"), {}),
        (call()._replace(speculated=None), {}),
    ],
)
def test_it_is_asked_where_it_can_tell(asked: EngineCall, fields: dict[str, Any]) -> None:
    assert json.loads(WIRE.encode(BODY, asked)) == {**json.loads(BODY), **fields}
    assert (WIRE.accepted_drafts(asked) is not None) == ("return_spec_tokens_details" in fields)


@pytest.mark.parametrize("spaces", [False, True])
def test_a_whole_answer_is_given_back_without_it(spaces: bool) -> None:
    found = read(whole({"spec_tokens_details": details(4)}, spaces))
    assert found is not None
    without = json.loads(whole(None, spaces))
    del without["sglext"]
    assert (json.loads(found.rest), found.tokens) == (without, 4)


def test_it_may_be_the_first_member() -> None:
    found = read(b'{"sglext":{"spec_tokens_details":{}},"choices":[{"text":""}]}')
    assert found == AcceptedDrafts(b'{"choices":[{"text":""}]}', None)


def test_what_the_client_asked_for_stays() -> None:
    kept = {"cached_tokens_details": {"device": 3, "host": 0, "storage_backend": "ä}"}}
    found = read(whole({**kept, "spec_tokens_details": details(4)}))
    assert found is not None
    assert (json.loads(found.rest)["sglext"], found.tokens) == (kept, 4)
    assert read(whole(kept)) is None
    event = b'data: {"choices":[],"usage":null,"sglext":%s}'
    found = read(event % json.dumps({"spec_tokens_details": details(4), **kept}).encode())
    assert found is not None
    assert json.loads(found.rest.removeprefix(b"data: "))["sglext"] == kept


def test_an_event_that_has_nothing_else_is_gone() -> None:
    event = b'data: {"id":"r","choices":[%s],"usage":null,"sglext":{"spec_tokens_details":%s}}'
    told = json.dumps(details(0)).encode()
    assert read(event % (b"", told)) == AcceptedDrafts(b"", 0)
    with_choice = read(event % (b'{"index":0}', told))
    assert with_choice == AcceptedDrafts(b'data: {"id":"r","choices":[{"index":0}],"usage":null}', 0)


@pytest.mark.parametrize(
    ("told", "prompts", "choices", "tokens"),
    [
        ([details(1), details(2), details(0), details(4)], 2, 2, 7),
        ([details(1)], 1, 2, None),  # of the other answer nothing is known
        (details(1), 1, 2, None),
        ([details(1), None], 1, 2, None),
        (details(0, proposed=0), 1, 1, None),  # what SGLang writes for numbers that it does not know
        (details(None), 1, 1, None),
        (details(True), 1, 1, None),
        (details(-1), 1, 1, None),
        (details(10), 1, 1, None),
        (details(1.5), 1, 1, None),
        ([], 1, 1, None),
        (None, 1, 1, None),
        ("x", 1, 1, None),
    ],
)
def test_what_is_not_known_of_every_answer_is_unknown(
    told: Any, prompts: int, choices: int, tokens: int | None
) -> None:
    found = read(whole({"spec_tokens_details": told}), prompts, choices)
    assert found is not None
    assert found.tokens == tokens
    assert b"spec_" not in found.rest


@pytest.mark.parametrize(
    "broken", [b'{"sglext":{"spec_tokens_details":', b'{"sglext":null}', b'{"sglext": "x"}', b"{}"]
)
def test_what_is_none_is_left_alone(broken: bytes) -> None:
    assert read(broken) is None
