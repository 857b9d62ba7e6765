"""Anthropic's Messages API as chat completions, and back."""

from typing import Any

import orjson
import pytest

from shoal.core.anthropic.answer import error, message
from shoal.core.anthropic.native import native_request
from shoal.core.anthropic.request import chat_request, count_request
from shoal.core.anthropic.stream import MessageEvents
from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import CHAT, TOKENIZE
from shoal.core.translation import NotTranslatable

ASKED = {"model": "llama", "max_tokens": 64}
TOOL = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}


def test_what_a_coding_agent_sends_is_a_valid_chat_completion() -> None:
    body = ASKED | {
        "system": [
            {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Read notes.txt and list.txt."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Two calls.", "signature": "x"},
                    {"type": "text", "text": "I read them."},
                    {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "notes.txt"}},
                    {"type": "tool_use", "id": "t2", "name": "read", "input": {"path": "list.txt"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "print(1)"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "no file"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u1"},
        "stop_sequences": ["END"],
        "temperature": 1,
        "top_k": 40,
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "xhigh"},
    }  # fmt: skip
    chat = chat_request(body)
    assert check(chat, CHAT, Facts(), 1000) is None
    assert chat == {
        "model": "llama",
        "max_tokens": 64,
        "temperature": 1,
        "top_k": 40,
        "stream": True,
        "stop": ["END"],
        "user": "u1",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "xhigh",
        "tools": [
            {
                "type": "function",
                "function": {"name": "read", "description": "Reads a file.", "parameters": TOOL["input_schema"]},
            }
        ],
        "messages": [
            {"role": "system", "content": "You write code.\nBe brief."},
            {"role": "user", "content": "Read notes.txt and list.txt."},
            {
                "role": "assistant",
                "content": "I read them.",
                "reasoning_content": "Two calls.",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path":"notes.txt"}'}},
                    {"id": "t2", "type": "function", "function": {"name": "read", "arguments": '{"path":"list.txt"}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "print(1)"},
            {"role": "tool", "tool_call_id": "t2", "content": "Error: no file"},
            {"role": "user", "content": "Go on."},
        ],
    }


def test_an_image_is_sent_as_data() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
    chat = chat_request(
        ASKED
        | {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}
            ]
        }
    )
    assert chat["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
        {"type": "text", "text": "?"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "read"}, {"type": "function", "function": {"name": "read"}}),
    ],
)
def test_which_tool_must_be_called(choice: dict[str, Any], expected: object) -> None:
    body = ASKED | {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": choice}
    chat = chat_request(body)
    assert chat["tool_choice"] == expected
    assert check(chat, CHAT, Facts(), 1000) is None


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"stream_options": {}}, "stream_options", "`stream_options` is not supported."),
        ({"max_tokens": None}, "max_tokens", "You must provide `max_tokens`."),
        ({"messages": "hi"}, "messages", "`messages` must be a list."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", 'must be "user" or "assistant"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
            'blocks of type "document" are not supported',
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
            'tools of type "web_search_20250305" run at Anthropic, not here',
        ),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tools[0].type",
            'tools of type "web_search_20250305" run at Anthropic, not here',
        ),
        (
            {"system": [{"type": "text", "text": "x", "citations": {"enabled": True}}]},
            "system[0].citations",
            "answers here have no citations",
        ),
        ({"tool_choice": {"type": "x"}, "tools": [TOOL]}, "tool_choice.type", "must be"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]", "must be an object"),
    ],
)
def test_what_cannot_be_translated_is_named(more: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(NotTranslatable) as refused:
        chat_request(ASKED | {"messages": [{"role": "user", "content": "x"}]} | more)
    assert refused.value.param == param
    assert text in str(refused.value)


def test_a_whole_answer() -> None:
    completion = {
        "model": "llama",
        "choices": [
            {
                "message": {
                    "role": "assistant",
                    "content": "I read it.",
                    "reasoning_content": "A file.",
                    "tool_calls": [{"id": "t1", "function": {"name": "read", "arguments": '{"path": "notes.txt"}'}}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 60}},
    }
    assert message(completion, "r1") == {
        "id": "r1",
        "type": "message",
        "role": "assistant",
        "model": "llama",
        "content": [
            {"type": "thinking", "thinking": "A file.", "signature": ""},
            {"type": "text", "text": "I read it."},
            {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "notes.txt"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 60,
            "output_tokens": 9,
        },
    }


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "stop", "matched_stop": 128009}, "end_turn", None),
        ({"finish_reason": "stop", "matched_stop": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "length"}, "max_tokens", None),
    ],
)
def test_why_it_stopped(choice: dict[str, Any], reason: str, sequence: str | None) -> None:
    found = message({"choices": [choice | {"message": {"content": "x"}}]}, "r1")
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def events(data: bytes) -> list[dict[str, Any]]:
    found = [block.split(b"\n") for block in data.split(b"\n\n") if block]
    for kind, line in found:
        assert kind.removeprefix(b"event: ").decode() == orjson.loads(line.removeprefix(b"data: "))["type"]
    return [orjson.loads(line.removeprefix(b"data: ")) for _, line in found]


def test_a_stream_opens_and_closes_its_blocks() -> None:
    stream = MessageEvents("r1", "llama")

    def delta(**said: Any) -> bytes:
        return stream.chunk({"choices": [{"delta": said}], "usage": {"prompt_tokens": 100, "completion_tokens": 1}})

    def call(index: int, **function: Any) -> dict[str, Any]:
        named = {"id": f"t{index}"} if "name" in function else {}
        return {"index": index, "function": function} | named

    got = delta(role="assistant", content="")
    got += delta(reasoning_content="Hm.")
    got += delta(content="I ")
    got += delta(content="read.")
    got += delta(tool_calls=[call(0, name="read", arguments="")])
    got += delta(tool_calls=[call(0, arguments='{"a":')])
    got += delta(tool_calls=[call(0, arguments="1}")])
    got += delta(tool_calls=[call(1, name="read", arguments="{}")])
    got += stream.chunk({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    details = {"cached_tokens": 60}
    got += stream.chunk(
        {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 9, "prompt_tokens_details": details}}
    )
    got += stream.end()
    seen = events(got)
    assert [e["type"].removeprefix("content_") for e in seen] == [
        "message_start",
        "block_start", "block_delta", "block_stop",
        "block_start", "block_delta", "block_delta", "block_stop",
        "block_start", "block_delta", "block_delta", "block_stop",
        "block_start", "block_delta", "block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert seen[0]["message"]["usage"]["input_tokens"] == 100
    assert [e["index"] for e in seen if e["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert [e["content_block"]["type"] for e in seen if e["type"] == "content_block_start"] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    assert seen[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert seen[-2]["usage"]["input_tokens"] == 40
    assert seen[-2]["usage"]["cache_read_input_tokens"] == 60


def test_a_forced_call_of_which_the_engine_says_that_it_stopped_is_a_call() -> None:
    """vLLM, where `tool_choice` names a tool."""
    call = {"id": "t0", "index": 0, "function": {"name": "read", "arguments": "{}"}}
    whole = message({"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "stop"}]}, "r1")
    assert whole["stop_reason"] == "tool_use"
    stream = MessageEvents("r1", "llama")
    got = stream.chunk({"choices": [{"delta": {"tool_calls": [call]}}]})
    got += stream.chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    assert events(got + stream.end())[-2]["delta"]["stop_reason"] == "tool_use"


def test_the_start_of_a_stream_has_the_length_of_the_prompt() -> None:
    """SGLang's first chunk has a role and no counts."""
    stream = MessageEvents("r1", "llama")
    assert stream.chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) == b""
    got = stream.chunk({"choices": [{"delta": {"content": "Hi"}}], "usage": {"prompt_tokens": 100}})
    start, *_ = events(got)
    assert (start["type"], start["message"]["usage"]["input_tokens"]) == ("message_start", 100)
    silent = MessageEvents("r2", "llama")
    assert [each["type"] for each in events(silent.end())] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("content", "told"), [(None, "Error"), ("no file", "Error: no file"), ("Error: no file", "Error: no file")]
)
def test_a_tool_that_failed_says_so(content: str | None, told: str) -> None:
    """The result of a call is a text in a chat."""
    block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    chat = chat_request(ASKED | {"messages": [{"role": "user", "content": [block]}]})
    assert chat["messages"] == [{"role": "tool", "tool_call_id": "t", "content": told}]


BEGUN = {"role": "assistant", "content": [{"type": "text", "text": '{"name":'}]}


def test_a_last_message_of_the_assistants_is_continued() -> None:
    """Engines end the message otherwise, or take it for the user's (SGLang)."""
    question = {"role": "user", "content": "x"}
    chat = chat_request(ASKED | {"messages": [question, BEGUN]})
    assert check(chat, CHAT, Facts(), 1000) is None
    assert chat["messages"] == [question, {"role": "assistant", "content": '{"name":'}]
    assert (chat["continue_final_message"], chat["chat_template_kwargs"]) == (True, {"enable_thinking": False})
    counted = count_request({"model": "llama", "messages": [question, BEGUN]})
    assert check(counted, TOKENIZE, Facts(), 1000) is None
    assert counted["continue_final_message"] is True
    # One engine wants it to be true beside the field, the other false: each has its own default.
    assert "add_generation_prompt" not in counted


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_last_message_begins_nothing(content: object) -> None:
    question = {"role": "user", "content": "x"}
    body = ASKED | {"messages": [question, {"role": "assistant", "content": content}]}
    assert chat_request(body) == chat_request(ASKED | {"messages": [question]})


def test_what_the_assistant_said_before_is_not_continued() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]}
    for messages in ([BEGUN, {"role": "user", "content": "x"}], [call]):
        assert "continue_final_message" not in chat_request(ASKED | {"messages": messages})


def test_members_that_say_nothing_here_are_passed_over() -> None:
    """Coding agents send them: without an effect they work on, with a 400 they would not."""
    tool = {"input_examples": [{"path": "a"}], "defer_loading": True, "eager_input_streaming": True}
    said = [{"type": "text", "text": "Hm.", "citations": [{"type": "page_location"}]}]
    plain = {"role": "assistant", "content": "Hm."}
    body = ASKED | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, plain, BEGUN]}
    more = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "citations": {"enabled": False}}]},
            {"role": "assistant", "content": said},
            BEGUN,
        ],
        "output_config": {"task_budget": {"type": "tokens", "total": 9}},
        "metadata": {"team": "a"},
    }
    assert chat_request(body | {"tools": [TOOL | tool]} | more) == chat_request(body | {"tools": [TOOL]})
    thinking = {"type": "adaptive"}
    assert chat_request(body | {"thinking": thinking | {"display": "omitted"}}) == chat_request(
        body | {"thinking": thinking}
    )


def test_fields_that_say_nothing_here_are_taken() -> None:
    body = {"model": "llama", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    more = {"cache_control": {"type": "ephemeral"}, "a_field_of_tomorrow": None}
    assert chat_request(body | more) == chat_request(body)
    assert native_request(body | more)["cache_control"] == {"type": "ephemeral"}


def test_errors_have_the_shape_of_that_api() -> None:
    assert error(429, "Slow down.", "r1") == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "Slow down."},
        "request_id": "r1",
    }
    assert error(502, "x", "r1")["error"]["type"] == "api_error"
    assert error(422, "x", "r1")["error"]["type"] == "invalid_request_error"
