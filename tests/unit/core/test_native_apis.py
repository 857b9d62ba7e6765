"""What of Messages and Responses may go to an external target, for bodies and answers of any shape."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.anthropic import native as anthropic
from shoal.core.fields.mediasize import media_size
from shoal.core.nativeapi import NativeEvents
from shoal.core.responses import native as responses
from shoal.core.routing.affinity import conversation_of
from shoal.core.translation import Json, NotTranslatable, StreamFailure

NAMES = (
    "type", "content", "source", "file_id", "url", "input", "messages", "tools", "system", "output", "usage", "model",
    "input_tokens", "output_tokens", "sequence_number", "message", "response", "delta", "text", "include", "image_url",
    "status", "data",
)  # fmt: skip
WORDS = (
    "text", "image", "tool_result", "message", "custom", "web_search", "message_start", "message_delta", "message_stop",
    "content_block_delta", "response.completed", "response.output_text.delta", "error", "search_result", "base64",
    "document",
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS) | st.text()
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=6)
FAILURE = StreamFailure(502, "It broke.", "server_error", "broken", None, None, "r1")
REQUESTS = (anthropic.native_request, anthropic.native_count_request, responses.native_request)


@settings(max_examples=150, deadline=None)
@given(OBJECTS)
@pytest.mark.parametrize("request_of", REQUESTS)
def test_any_body_is_forwarded_or_refused(request_of: Callable[[Json], Json], body: Json) -> None:
    try:
        sent = request_of(body)
    except NotTranslatable:
        return
    assert "model" not in sent, "the target's own name is put there"
    if request_of is responses.native_request:
        assert sent["store"] is False


@settings(max_examples=150, deadline=None)
@given(OBJECTS)
@pytest.mark.parametrize("turns_of", [anthropic.native_turns, responses.native_turns])
def test_any_body_has_turns_that_can_be_counted(turns_of: Callable[[Json], list[Json]], body: Json) -> None:
    fields = {"messages": turns_of(body)}
    size = media_size(fields)
    assert size.text_bytes(1000) >= 0
    conversation_of(fields)


SEEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
A_SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
RESULT = {"type": "tool_result", "content": [SEEN]}
DOCUMENT = {"type": "document", "source": {"content": [SEEN]}}
CALL = {"type": "tool_use", "input": SEEN}


@pytest.mark.parametrize(
    ("turns_of", "body", "counted"),
    [
        (anthropic.native_turns, {"messages": [{"role": "user", "content": [SEEN, RESULT]}]}, (2, 0)),
        (anthropic.native_turns, {"messages": [{"content": [DOCUMENT]}]}, (1, 0)),
        (anthropic.native_turns, {"messages": [{"role": "assistant", "content": [CALL]}]}, (0, 0)),
        (responses.native_turns, {"input": [{"role": "user", "content": [PICTURE, A_SOUND]}]}, (1, 1)),
        (responses.native_turns, {"input": [{"type": "custom_tool_call_output", "output": [PICTURE]}]}, (1, 0)),
        (responses.native_turns, {"input": "data:image/png;base64,AAAA"}, (0, 0)),
    ],
)
def test_media_are_found_wherever_they_are(
    turns_of: Callable[[Json], list[Json]], body: Json, counted: tuple[int, int]
) -> None:
    size = media_size({"messages": turns_of(body)})
    assert (size.images, size.sounds) == counted


def test_all_turns_of_a_conversation_are_of_one_session() -> None:
    def session(turns_of: Callable[[Json], list[Json]], body: Json) -> str | None:
        return conversation_of({"messages": turns_of(body)})

    fox, answer = {"role": "user", "content": "A fox?"}, {"role": "assistant", "content": "Yes."}
    paid = [{"type": "text", "text": f"x-anthropic-billing-header: {number}\nBe brief."} for number in (1, 2)]
    first = session(anthropic.native_turns, {"system": paid[:1], "messages": [fox]})
    assert first == session(anthropic.native_turns, {"system": paid[1:], "messages": [fox, answer, fox]})
    assert first != session(anthropic.native_turns, {"system": paid[:1], "messages": [answer | {"role": "user"}]})
    parts = [{"type": "input_text", "text": "A fox?"}]
    first = session(responses.native_turns, {"instructions": "Be brief.", "input": "A fox?"})
    again = [{"role": "user", "content": parts}, answer, fox]
    assert first == session(responses.native_turns, {"instructions": "Be brief.", "input": again})
    assert first != session(responses.native_turns, {"instructions": "Be long.", "input": again})


@pytest.mark.parametrize("nested", [False, True])
def test_conversations_about_two_texts_are_two(nested: bool) -> None:
    def session(text: object) -> str | None:
        document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}
        about = {"type": "tool_result", "content": [document]} if nested else document
        content = [about, {"type": "text", "text": "Summarise this."}]
        return conversation_of(
            {"messages": anthropic.native_turns({"messages": [{"role": "user", "content": content}]})}
        )

    assert session("Of foxes.") == session("Of foxes.")
    assert session("Of foxes.") != session("Of hens.")
    assert session(["no text"]) == session(None)


@settings(max_examples=150, deadline=None)
@given(OBJECTS)
@pytest.mark.parametrize("answer_of", [anthropic.native_answer, responses.native_answer])
def test_any_answer_has_the_clients_name_and_counts_that_can_be(answer_of: Any, answer: Json) -> None:
    found = answer_of(answer, "front")
    assert found.body["model"] == "front"
    if found.usage is not None:
        assert found.usage["prompt_tokens"] >= 0
        assert found.usage["completion_tokens"] >= 0


@settings(max_examples=150, deadline=None)
@given(st.lists(OBJECTS, max_size=6))
@pytest.mark.parametrize("kind", [anthropic.NativeMessageEvents, responses.NativeResponseEvents])
def test_any_events_are_read(kind: Callable[[str], NativeEvents], events: list[Json]) -> None:
    reader = kind("front")
    for event in events:
        reader.take(event)
        usage = reader.usage
        assert usage is None or min(usage["prompt_tokens"], usage["completion_tokens"]) >= 0
    assert reader.error(FAILURE).startswith(b"event: error\n")


@pytest.mark.parametrize(
    ("numbers", "following"), [([], 0), ([0, 1], 2), ([7], 8), ([None, None], 2), ([2**63, "x"], 2), ([-4], 1)]
)
def test_the_error_of_a_response_has_the_number_after_the_last_one(numbers: list[Any], following: int) -> None:
    reader = responses.NativeResponseEvents("front")
    for number in numbers:
        reader.take({"type": "response.in_progress", "sequence_number": number})
    error = json.loads(reader.error(FAILURE).split(b"data: ")[1])
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "broken", following)


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, None, 5])
def test_a_type_that_is_no_text_is_refused(kind: Any) -> None:
    content = [{"type": kind}]
    with pytest.raises(NotTranslatable):
        anthropic.native_request({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(NotTranslatable):
        anthropic.native_request({"messages": [], "system": content})
    if kind is not None:
        with pytest.raises(NotTranslatable):
            anthropic.native_request({"messages": [], "tools": content})
        with pytest.raises(NotTranslatable):
            responses.native_request({"input": content})
    with pytest.raises(NotTranslatable):
        responses.native_request({"input": "x", "tools": content})
    source = [{"type": "image", "source": {"type": kind}}]
    with pytest.raises(NotTranslatable):
        anthropic.native_request({"messages": [{"role": "user", "content": source}]})


def test_what_nests_without_end_is_refused() -> None:
    content: Any = "end"
    for _ in range(200):
        content = [{"type": "tool_result", "content": content}]
    with pytest.raises(NotTranslatable, match="nested too deeply"):
        anthropic.native_request({"messages": [{"role": "user", "content": content}]})


def test_arguments_of_a_call_may_have_any_name() -> None:
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {"file_id": "of the client's own"}}
    body = {"messages": [{"role": "assistant", "content": [call]}]}
    assert anthropic.native_request(body) == body


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
FUNCTION = {"name": "read", "input_schema": {"type": "object"}}
IMAGES = {"type": "image_generation"}


def test_a_tool_that_runs_at_the_provider_is_left_out_beside_others() -> None:
    """Agents offer them to each model."""
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    assert anthropic.native_request({**asked, "tools": [SEARCH, FUNCTION]})["tools"] == [FUNCTION]
    for body in (
        {"tools": [SEARCH]},
        {"tools": [SEARCH, FUNCTION], "tool_choice": {"type": "tool", "name": "web_search"}},
    ):
        with pytest.raises(NotTranslatable):
            anthropic.native_request({**asked, **body})
    function = {"type": "function", "name": "read"}
    response = {"model": "m", "input": "hi"}
    assert responses.native_request({**response, "tools": [{"type": "web_search"}, IMAGES, function]})["tools"] == [
        function
    ]
    with pytest.raises(NotTranslatable):
        responses.native_request({**response, "tools": [{"type": "web_search"}, IMAGES]})
    for choice in (IMAGES, {"type": "allowed_tools", "mode": "required", "tools": [IMAGES, function]}):
        with pytest.raises(NotTranslatable) as refused:
            responses.native_request({**response, "tools": [function, IMAGES], "tool_choice": choice})
        assert refused.value.param == "tools[1].type"
