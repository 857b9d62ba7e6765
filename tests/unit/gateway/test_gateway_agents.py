"""Requests of coding agents (`fixtures/agents/`; its README says which are captured) through the gateway, to each
engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.routing.affinity import head_of
from tests.support.gateway import gateway, replica
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.vllm_engine import vllm_engine

REQUESTS = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("fixtures/agents/*.json")}
ENGINES = ["SGLang", "vLLM"]


async def sglang(request: EngineRequest) -> None:
    if request.path == "/v1/tokenize":
        await request.answer(200, b'{"tokens":[1,2],"count":2,"max_model_len":8192}')
    else:
        await serve_normally(request)


async def sent(tmp_path: Path, name: str, engine_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """The client's answer to such a request, and the body that the engine got."""
    given = REQUESTS[name]
    engine = ScriptedEngine(sglang) if engine_type == "SGLang" else vllm_engine()
    async with gateway(tmp_path, engine) as it:
        it.pods["chat/llama-1"] = replica(1, engine=engine_type)
        it.changed()
        response = await it.post({**given["body"], **changes}, given["path"], headers=given["headers"])
        text = await response.text()
        assert response.status == 200, text
        (record,) = await it.records()
        assert record.data.outcome == "answered"
        assert record.data.count_source == "final"
        return text, engine.requests[0].body


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", REQUESTS)
async def test_each_is_answered(tmp_path: Path, name: str, engine: str):
    text, body = await sent(tmp_path, name, engine)
    path = REQUESTS[name]["path"].partition("?")[0]
    if path == "/v1/messages/count_tokens":
        assert json.loads(text) == {"input_tokens": 2}
    elif path == "/v1/chat/completions" and REQUESTS[name]["body"].get("stream"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        assert all("error" not in json.loads(event) for event in events)
    elif REQUESTS[name]["body"].get("stream"):
        kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
        begins, ends = {
            "/v1/messages": ("message_start", "message_stop"),
            "/v1/responses": ("response.created", "response.completed"),
        }[path]
        assert (kinds[0], kinds[-1]) == (begins, ends)
        assert "error" not in kinds
    else:
        assert json.loads(text)["model"] == "llama"
    assert body["model"] == "chat/llama"


async def test_tool_results_come_in_the_order_of_a_chat(tmp_path: Path):
    _, body = await sent(tmp_path, "messages-tool-results", "SGLang")
    turns = body["messages"]
    assert [turn["role"] for turn in turns] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool", "user", "assistant", "tool", "user",
    ]  # fmt: skip
    assert [call["id"] for call in turns[2]["tool_calls"]] == ["toolu_01A", "toolu_01B"]
    assert turns[2]["content"] == "The test first."
    assert [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"] == [
        "toolu_01A", "toolu_01B", "toolu_01C", "toolu_01D",
    ]  # fmt: skip
    assert turns[-1]["content"][0]["type"] == "image_url"
    assert len(body["tools"]) == 12
    assert "signature" not in json.dumps(turns)


async def test_calls_and_outputs_of_a_response_come_in_the_order_of_a_chat(tmp_path: Path):
    _, body = await sent(tmp_path, "responses-tool-results", "SGLang")
    turns = body["messages"]
    assert [turn["role"] for turn in turns] == [
        "system", "user", "user", "assistant", "tool", "tool", "assistant", "tool", "system", "user",
    ]  # fmt: skip
    assert [call["id"] for call in turns[3]["tool_calls"]] == ["call_1", "call_2"]
    assert turns[3]["content"] == "The test first."
    # What a developer says first belongs to the instructions: many templates know one system message, at the beginning.
    assert turns[0]["content"].startswith("You are an agent")
    assert "<permissions instructions>" in turns[0]["content"]
    assert body["reasoning_effort"] == "medium"


async def test_fields_of_reasoning_are_taken_by_a_model_without_a_parser_of_thoughts(tmp_path: Path):
    """Coding agents send them to every model, and the chat template decides what they do."""
    _, message = await sent(tmp_path, "messages-first-turn", "SGLang")
    assert message["reasoning_effort"] == "medium"
    assert message["chat_template_kwargs"] == {"enable_thinking": True}
    folder = tmp_path / "other"
    folder.mkdir()
    engine = ScriptedEngine(sglang)
    async with gateway(folder, engine) as it:
        assert "reasoning" not in it.models["chat/llama"].traits
        for asked in ({"reasoning_effort": "high"}, {"reasoning_effort": "none"}, {"reasoning": {"effort": "low"}}):
            answer = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}], **asked})
            assert answer.status == 200, await answer.text()
            assert engine.requests[-1].body.items() >= asked.items()


async def test_a_tool_that_would_run_at_openai_is_left_out_beside_others(tmp_path: Path):
    _, body = await sent(tmp_path, "responses-first-turn", "vLLM")
    assert [tool["function"]["name"] for tool in body["tools"]] == [
        "shell_command", "update_plan", "apply_patch", "view_image", "list_mcp_resources",
    ]  # fmt: skip


async def test_a_group_of_functions_is_left_out_beside_functions(tmp_path: Path):
    """Codex CLI offers one; a chat has no field for the group that a call names."""
    kinds = [tool["type"] for tool in REQUESTS["responses-codex"]["body"]["tools"]]
    assert (kinds.count("namespace"), kinds.count("web_search")) == (1, 1)
    _, body = await sent(tmp_path, "responses-codex", "SGLang")
    assert [tool["function"]["name"] for tool in body["tools"]] == [
        "exec_command", "write_stdin", "request_user_input", "view_image", "get_goal", "create_goal", "update_goal",
    ]  # fmt: skip
    assert [turn["role"] for turn in body["messages"]] == [
        "system", "user", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip


async def test_a_call_and_its_result_with_marks_for_a_cache_are_those_of_a_chat(tmp_path: Path):
    _, body = await sent(tmp_path, "messages-opencode", "SGLang")
    assert [turn["role"] for turn in body["messages"]] == ["system", "user", "assistant", "tool"]
    (call,) = body["messages"][2]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == (body["messages"][3]["tool_call_id"], "read")
    assert len(body["tools"]) == 10
    assert "cache_control" not in json.dumps(body)


async def test_thoughts_of_an_earlier_message_reach_the_engine(tmp_path: Path):
    """pi sends them back with the call that followed; `budget_tokens` and `eager_input_streaming` have no effect."""
    _, body = await sent(tmp_path, "messages-pi", "SGLang")
    assert [turn["role"] for turn in body["messages"]] == ["system", "user", "assistant", "tool"]
    assert body["messages"][2]["reasoning_content"] == "I look at the folder."
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert {name for tool in body["tools"] for name in tool["function"]} == {"name", "description", "parameters"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["chat-pi", "chat-qwen"])
async def test_thoughts_of_a_chat_have_the_name_that_each_engine_reads(tmp_path: Path, name: str, engine: str):
    """Both agents send them back as they came from the gateway."""
    given = REQUESTS[name]["body"]["messages"]
    (place,) = (place for place, turn in enumerate(given) if "reasoning_content" in turn)
    _, body = await sent(tmp_path, name, engine)
    thought = given[place]["reasoning_content"]
    assert body["messages"][place].items() >= {"reasoning_content": thought, "reasoning": thought}.items()


async def test_functions_without_parameters_and_results_in_parts_are_those_of_a_chat(tmp_path: Path):
    _, body = await sent(tmp_path, "chat-qwen", "SGLang")
    assert body["tools"] == REQUESTS["chat-qwen"]["body"]["tools"]
    bare = [tool["function"]["name"] for tool in body["tools"] if "parameters" not in tool["function"]]
    assert bare == ["get_goal", "list_agents"]
    assert body["messages"][-1]["content"] == [{"type": "text", "text": "hello\n"}]


async def test_a_message_of_calls_alone_needs_no_content(tmp_path: Path):
    _, body = await sent(tmp_path, "chat-mini-swe-agent", "SGLang")
    assert [turn["role"] for turn in body["messages"]] == ["system", "user", "assistant", "tool"]
    assert "content" not in body["messages"][2]


async def test_a_thought_of_an_earlier_response_stands_with_the_call_that_followed(tmp_path: Path):
    _, body = await sent(tmp_path, "responses-openai-agents", "SGLang")
    assert [turn["role"] for turn in body["messages"]] == ["system", "user", "assistant", "tool"]
    said = body["messages"][2]
    assert (said["reasoning_content"], said["tool_calls"][0]["id"]) == ("I look at the folder.", "call_1")
    assert [tool["function"]["strict"] for tool in body["tools"]] == [True, True, True]


@pytest.mark.parametrize(("name", "left_out"), [("messages-cline", 1), ("responses-cline", 2)])
async def test_tools_that_would_run_at_a_provider_are_left_out_beside_functions(
    tmp_path: Path, name: str, left_out: int
):
    """Cline offers them to each model, and ends where they are refused."""
    _, body = await sent(tmp_path, name, "SGLang")
    assert len(body["tools"]) == len(REQUESTS[name]["body"]["tools"]) - left_out
    assert {tool["type"] for tool in body["tools"]} == {"function"}


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_a_developer_says_is_the_systems(tmp_path: Path, engine: str):
    """So pi sends its system prompt. Many chat templates do not know the role: the model would not see the prompt."""
    given = REQUESTS["chat-pi"]["body"]["messages"]
    _, body = await sent(tmp_path, "chat-pi", engine)
    assert given[0]["role"] == "developer"
    assert body["messages"][0] == {"role": "system", "content": given[0]["content"]}


async def test_the_line_that_differs_in_each_request_does_not_reach_the_prompt(tmp_path: Path):
    """It would be the first of the prompt: no request would find the one before it in the prefix cache, and each would
    go to another replica."""
    heads: set[int | None] = set()
    for number in range(2):
        system = json.loads(json.dumps(REQUESTS["messages-first-turn"]["body"]["system"]))
        system[0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.0; cch={number};"
        system[1]["text"] += "x" * 400
        folder = tmp_path / str(number)
        folder.mkdir()
        _, body = await sent(folder, "messages-first-turn", "SGLang", system=system)
        assert "billing" not in json.dumps(body)
        assert body["messages"][0]["content"].startswith("You are an agent")
        heads.add(head_of("tenant/acme", body))
    assert len(heads) == 1
    assert None not in heads
