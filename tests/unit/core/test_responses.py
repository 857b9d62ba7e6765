"""OpenAI's Responses API as chat completions, and back."""

from typing import Any

import orjson
import pytest

from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import CHAT
from shoal.core.responses import ResponseEvents, chat_request, whole
from shoal.core.translation import NotTranslatable, StreamFailure

TOOL = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


def test_what_a_model_thought_stands_beside_what_it_said_next() -> None:
    """Templates show it between the calls of one turn."""

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "t1", "name": "read", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "t1", "output": "x"}
    said = {"type": "message", "role": "assistant", "content": "Done."}
    chat = chat_request({
        "model": "llama",
        "input": [{"role": "user", "content": "hi"}, thought("One."), call, done, thought("Two."), said, thought("3")],
    })  # fmt: skip
    assert check(chat, CHAT, Facts(), 1000) is None
    assert [turn.get("reasoning_content") for turn in chat["messages"]] == [None, "One.", None, "Two."]


def test_a_text_is_a_message_of_the_user() -> None:
    assert chat_request({"model": "llama", "input": "hi"}) == {
        "model": "llama",
        "messages": [{"role": "user", "content": "hi"}],
    }


def test_what_a_coding_agent_sends_is_a_valid_chat_completion() -> None:
    body = {
        "model": "llama",
        "instructions": "You write code.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "Read both."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
            {"type": "function_call", "call_id": "t1", "name": "read", "arguments": '{"path":"a"}'},
            {"type": "function_call", "call_id": "t2", "name": "read", "arguments": '{"path":"b"}'},
            {"type": "function_call_output", "call_id": "t1", "output": "text of a"},
            {"type": "function_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "none"}]},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "max_output_tokens": 500,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}},
    }
    chat = chat_request(body)
    assert check(chat, CHAT, Facts(), 1000) is None
    assert chat["messages"] == [
        {"role": "system", "content": "You write code.\n\nBe brief."},
        {"role": "user", "content": "Read both."},
        {
            "role": "assistant",
            "content": "I do.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}},
                {"id": "t2", "type": "function", "function": {"name": "read", "arguments": '{"path":"b"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "text of a"},
        {"role": "tool", "tool_call_id": "t2", "content": "none"},
    ]
    rest = {name: value for name, value in chat.items() if name not in ("messages", "tools")}
    assert rest == {
        "model": "llama",
        "stream": True,
        "parallel_tool_calls": False,
        "max_completion_tokens": 500,
        "tool_choice": "auto",
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }
    function = {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}
    assert chat["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "send the whole conversation in `input`"),
        ({"background": True}, "background", "answers are not stored"),
        ({"input": None}, "input", "You must provide `input`."),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "items are not stored"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", 'items of type "computer_call"'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            '"input_file"',
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'tools of type "web_search" are not supported'),
        ({"tools": [{"type": "namespace", "tools": [TOOL]}, {"type": "web_search"}]}, "tools[0].type", '"namespace"'),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", 'must be "function"'),
        ({"logit_bias": {}}, "logit_bias", "`logit_bias` is not supported."),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", 'must be "standard"'),
    ],
)
def test_what_cannot_be_translated_is_named(more: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(NotTranslatable) as refused:
        chat_request({"model": "llama", "input": "hi"} | more)
    assert refused.value.param == param
    assert text in str(refused.value)


def test_members_that_say_nothing_here_are_passed_over() -> None:
    """Coding agents send them: without an effect they work on, with a 400 they would not."""
    body: dict[str, Any] = {"model": "llama", "input": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    more: dict[str, Any] = {
        "input": [{"role": "user", "content": "hi", "id": "msg_1", "status": "completed", "phase": "commentary"}],
        "tools": [TOOL | {"defer_loading": True, "output_schema": {"type": "object"}}],
        "reasoning": {"summary": "auto", "context": "all_turns", "mode": "standard"},
        "text": {"verbosity": "low"},
    }
    assert chat_request(body | more) == chat_request(body)


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 60},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
COUNTED = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 60},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 4},
    "total_tokens": 109,
}


def test_a_whole_answer() -> None:
    said = {
        "role": "assistant",
        "content": "I read it.",
        "reasoning_content": "A file.",
        "tool_calls": [{"id": "t1", "function": {"name": "read", "arguments": "{}"}}],
    }
    completion = {"model": "llama", "created": 7, "choices": [{"message": said, "finish_reason": "tool_calls"}]}
    found = whole(completion | {"usage": USAGE}, "r1")
    assert (found["id"], found["object"], found["status"], found["created_at"]) == ("r1", "response", "completed", 7)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert found["output"][1]["content"][0]["text"] == "I read it."
    assert found["output"][2]["call_id"] == "t1"
    assert found["usage"] == COUNTED
    cut = whole({"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}, "r1")
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize(
    ("said", "items"),
    [
        ({"content": "x"}, [("message", "incomplete")]),
        ({"content": "x", "reasoning_content": "Hm."}, [("reasoning", "completed"), ("message", "incomplete")]),
        ({"content": None, "reasoning_content": "Hm"}, [("reasoning", "incomplete")]),
        (
            {"content": "x", "tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": "{"}}]},
            [("message", "completed"), ("function_call", "incomplete")],
        ),
    ],
)
def test_the_item_that_was_cut_says_so(said: dict[str, Any], items: list[tuple[str, str]]) -> None:
    found = whole({"choices": [{"message": said, "finish_reason": "length"}]}, "r1")
    assert [(item["type"], item["status"]) for item in found["output"]] == items
    stream = ResponseEvents("r1", "llama")
    stream.chunk({"choices": [{"delta": said}]})
    stream.chunk({"choices": [{"delta": {}, "finish_reason": "length"}]})
    last = events(stream.end())[-1]
    assert last["type"] == "response.incomplete"
    assert [(item["type"], item["status"]) for item in last["response"]["output"]] == items


def test_a_stream_opens_and_closes_its_items() -> None:
    stream = ResponseEvents("r1", "llama")

    def delta(**said: Any) -> bytes:
        return stream.chunk({"created": 7, "choices": [{"delta": said}]})

    def call(index: int, **function: Any) -> dict[str, Any]:
        named = {"id": f"t{index}"} if "name" in function else {}
        return {"index": index, "function": function} | named

    got = delta(role="assistant", content="")
    got += delta(reasoning_content="Hm.")
    got += delta(content="I ")
    got += delta(content="read.")
    got += delta(tool_calls=[call(0, name="read", arguments="")])
    got += delta(tool_calls=[call(0, arguments='{"a":1}')])
    got += delta(tool_calls=[call(1, name="read", arguments="{}")])
    got += stream.chunk({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    got += stream.chunk({"choices": [], "usage": USAGE})
    got += stream.end()
    blocks = [block.split(b"\n") for block in got.split(b"\n\n") if block]
    seen = [orjson.loads(line.removeprefix(b"data: ")) for _, line in blocks]
    assert [kind.removeprefix(b"event: ").decode() for kind, _ in blocks] == [event["type"] for event in seen]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert [event["type"].removeprefix("response.") for event in seen] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = seen[-1]["response"]
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [event["output_index"] for event in seen if event["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    assert done["output"][1]["content"][0]["text"] == "I read."
    assert done["usage"] == COUNTED
    assert seen[0]["response"]["usage"] is None


def test_a_stream_without_text_is_an_empty_message() -> None:
    stream = ResponseEvents("r1", "llama")
    stream.chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    last = orjson.loads(stream.end().split(b"\n\n")[-2].split(b"data: ")[1])
    assert [item["type"] for item in last["response"]["output"]] == ["message"]


LOST = StreamFailure(502, "The replica was lost.", "server_error", "replica_lost", None, None, "r1")
FULL = StreamFailure(503, "Too much.", "server_error", "overloaded", None, 2, "r1")


def events(data: bytes) -> list[dict[str, Any]]:
    blocks = [block.split(b"\n") for block in data.split(b"\n\n") if block]
    found = [orjson.loads(line.removeprefix(b"data: ")) for _, line in blocks]
    assert [kind.removeprefix(b"event: ").decode() for kind, _ in blocks] == [event["type"] for event in found]
    return found


def test_a_stream_that_fails_ends_with_what_has_come() -> None:
    stream = ResponseEvents("r1", "llama")
    call = {"index": 0, "id": "t1", "function": {"name": "read", "arguments": '{"pa'}}
    got = stream.chunk({"created": 7, "choices": [{"delta": {"content": "I read."}}]})
    got += stream.chunk({"choices": [{"delta": {"tool_calls": [call]}}]})
    seen = events(got + stream.error(LOST))
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert seen[-1]["type"] == "response.failed"
    failed = seen[-1]["response"]
    assert (failed["id"], failed["status"], failed["created_at"]) == ("r1", "failed", 7)
    assert failed["error"] == {"code": "server_error", "message": "The replica was lost."}
    assert [(item["type"], item["status"]) for item in failed["output"]] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert failed["output"][1]["arguments"] == '{"pa'
    assert failed["usage"] is None, "unknown, and not nothing"


def test_a_stream_that_fails_before_it_begins_is_an_error() -> None:
    assert events(ResponseEvents("r1", "llama").error(FULL)) == [
        {
            "type": "error",
            "sequence_number": 0,
            "code": "overloaded",
            "message": "Too much.",
            "param": None,
            "retry_after": 2,
        }
    ]


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_prompt"), (413, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")],
)
def test_a_response_that_failed_has_a_code_of_openai(status: int, code: str) -> None:
    stream = ResponseEvents("r1", "llama")
    stream.chunk({"choices": []})
    (failed,) = events(stream.error(FULL._replace(status=status)))
    assert failed["response"]["error"] == {"code": code, "message": "Too much.", "retry_after": 2}
