"""The body of Anthropic's `POST /v1/messages` as the body of a chat completion, and of `/v1/messages/count_tokens` as
that of `/v1/tokenize`.

What comes out is checked like any chat completion (`core/fields`): bounds stand there, and not here. Members of blocks,
tools and settings that nothing here reads are passed over: coding agents send new ones with each release.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from shoal.core.translation import Json, NotTranslatable, as_list, as_object, as_text, quoted

_SAME: Final = ("model", "stream", "temperature", "top_p", "top_k")
_AT_ANTHROPIC: Final = ("web_search_", "web_fetch_")
_ATTRIBUTION: Final = "x-anthropic-billing-header:"
_OF_THE_PROMPT: Final = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message")
_DROPPED: Final = frozenset(
    {"service_tier", "context_management", "container", "inference_geo", "speed", "cache_control"}
)
"""Fields without a meaning here: one tier, no memory between requests, no container. Prefixes are cached anyway."""
_KNOWN: Final = _DROPPED | {
    *_SAME, "max_tokens", "messages", "metadata", "output_config", "output_format", "stop_sequences", "system",
    "thinking", "tool_choice", "tools",
}  # fmt: skip

NAMES: Final = (
    # One message may be several of a chat.
    (re.compile("messages.*"), "messages"),
    (re.compile("stop$"), "stop_sequences"),
    (re.compile("user$"), "metadata.user_id"),
    (re.compile("reasoning_effort$"), "output_config.effort"),
    (re.compile(r"response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
)
"""See `translation.Names`."""


def chat_request(body: Mapping[str, Any]) -> Json:
    """The body of the chat completion. Raises NotTranslatable."""
    if unknown := sorted(name for name in body.keys() - _KNOWN if body[name] is not None):
        raise NotTranslatable(unknown[0], f"`{unknown[0][:100]}` is not supported.")
    if body.get("max_tokens") is None:
        raise NotTranslatable("max_tokens", "You must provide `max_tokens`.")
    out: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    out["max_tokens"] = body["max_tokens"]
    if out.get("top_k") == 0:
        del out["top_k"]
    out["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
    if (stops := body.get("stop_sequences")) is not None:
        out["stop"] = stops
    tools = _tools(body.get("tools"), body.get("tool_choice"))
    if tools:
        out["tools"] = tools
        out |= _tool_choice(body.get("tool_choice"))
    user = as_object(body.get("metadata"), "metadata").get("user_id")
    if user is not None:
        out["user"] = user
    if (schema := _output_schema(body)) is not None:
        out["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if (effort := as_object(body.get("output_config"), "output_config").get("effort")) is not None:
        out["reasoning_effort"] = effort
    thinking = as_object(body.get("thinking"), "thinking").get("type")
    continued = _continues(out["messages"])
    if continued:
        out["continue_final_message"] = True
    if thinking is not None or continued:
        # What templates of models that can think or not read; others ignore the variable. A begun answer comes after
        # all thoughts.
        out["chat_template_kwargs"] = {"enable_thinking": thinking not in (None, "disabled")}
    return out


def count_request(body: Mapping[str, Any]) -> Json:
    """The body of the question how many tokens the prompt of a message has. Raises NotTranslatable."""
    chat = chat_request({**body, "max_tokens": 1})
    out = {name: chat[name] for name in _OF_THE_PROMPT if name in chat}
    return out if "continue_final_message" in out else out | {"add_generation_prompt": True}


def _continues(messages: list[Json]) -> bool:
    """Whether the last message is the beginning of the answer. An empty one begins nothing, and is removed."""
    if not messages or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        return False
    if messages[-1]["content"]:
        return True
    messages.pop()
    return False


def _system(value: object) -> list[Json]:
    if value is None or value == "" or value == []:
        return []
    texts = [value] if isinstance(value, str) else _texts(value, "system")
    text = "\n".join(text for given in texts if (text := without_attribution(given)))
    return [{"role": "system", "content": text}] if text else []


def without_attribution(text: str) -> str:
    """Without the first line of a coding agent, which says who pays and differs in each request: a prompt that begins
    with it has no prefix in any cache."""
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def _messages(value: object) -> list[Json]:
    out: list[Json] = []
    for number, message in enumerate(as_list(value, "messages")):
        at = f"messages[{number}]"
        given = as_object(message, at)
        role, content = given.get("role"), given.get("content")
        if role == "system":
            out += _system(content)
        elif role not in ("user", "assistant"):
            raise NotTranslatable(f"{at}.role", f'`{at}.role` must be "user" or "assistant".')
        elif isinstance(content, str):
            out.append({"role": role, "content": content})
        elif role == "user":
            out += _user(as_list(content, f"{at}.content"), f"{at}.content")
        else:
            out.append(_assistant(as_list(content, f"{at}.content"), f"{at}.content"))
    return out


def _user(blocks: list[object], at: str) -> list[Json]:
    """Results of tools are messages of their own in a chat, before what the user says. Images in a result follow with
    the user's own parts: a result is text."""
    results: list[Json] = []
    parts: list[Json] = []
    for number, value in enumerate(blocks):
        here = f"{at}[{number}]"
        block = as_object(value, here)
        if block.get("type") == "tool_result":
            text, images = _tool_result(block.get("content"), f"{here}.content")
            parts += images
            if block.get("is_error") is True and not text.lower().startswith("error"):
                text = f"Error: {text}" if text else "Error"
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            parts.append(_part(block, here))
    if not parts:
        return results
    if all(part["type"] == "text" for part in parts):
        return [*results, {"role": "user", "content": "\n".join(part["text"] for part in parts)}]
    return [*results, {"role": "user", "content": parts}]


def _tool_result(content: object, at: str) -> tuple[str, list[Json]]:
    if content is None or isinstance(content, str):
        return content or "", []
    found = [_part(as_object(value, f"{at}[{n}]"), f"{at}[{n}]") for n, value in enumerate(as_list(content, at))]
    return "\n".join(p["text"] for p in found if p["type"] == "text"), [p for p in found if p["type"] != "text"]


def _assistant(blocks: list[object], at: str) -> Json:
    """One message. Templates leave out what a model thought before, except between calls of one turn."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for number, value in enumerate(blocks):
        here = f"{at}[{number}]"
        block = as_object(value, here)
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": _arguments(block.get("input"), f"{here}.input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(as_text(block.get("thinking"), f"{here}.thinking"))
        elif kind != "redacted_thinking":  # Anthropic's own models alone can read it
            texts.append(_text(block, here))
    message: Json = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if thought := "\n".join(thoughts):
        message["reasoning_content"] = thought
    return message | {"tool_calls": calls} if calls else message | {"content": message["content"] or ""}


def _arguments(value: object, at: str) -> str:
    """JSON in a text, as in OpenAI's API: not all engines and providers take an object."""
    try:
        return orjson.dumps(as_object(value, at)).decode()
    except (TypeError, RecursionError):
        raise NotTranslatable(at, f"`{at[:200]}` cannot be written as JSON: it is nested too deeply.") from None


def _part(block: Json, at: str) -> Json:
    if block.get("type") != "image":
        return {"type": "text", "text": _text(block, at)}
    source = as_object(block.get("source"), f"{at}.source")
    if source.get("type") == "base64":
        url: object = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url":
        url = source.get("url")
    else:
        raise NotTranslatable(f"{at}.source.type", f'`{at}.source.type` must be "base64" or "url".')
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(value: object, at: str) -> list[str]:
    return [_text(as_object(block, f"{at}[{n}]"), f"{at}[{n}]") for n, block in enumerate(as_list(value, at))]


def _text(block: Json, at: str) -> str:
    if block.get("type") != "text":
        raise NotTranslatable(
            f"{at}.type", f"`{at}.type`: blocks of type {quoted(block.get('type'))} are not supported."
        )
    text = block.get("text")
    if not isinstance(text, str):
        raise NotTranslatable(f"{at}.text", f"`{at}.text` must be a string.")
    cited: object = block.get("citations")  # those of an earlier answer are a list
    if isinstance(cited, dict) and cast(Json, cited).get("enabled") not in (None, False):
        raise NotTranslatable(f"{at}.citations", f"`{at}.citations` is not supported: answers here have no citations.")
    return text


def needless(tools: Sequence[Json], choice: object) -> list[bool]:
    """For each tool, whether the model can do without it: it would run at Anthropic, agents offer it unasked, and there
    are other tools, of which the request may take any."""
    at_anthropic = [_runs_at_anthropic(tool.get("type")) for tool in tools]
    if all(at_anthropic):
        return [False] * len(tools)
    forced: object = as_object(choice, "tool_choice").get("name")
    return [
        there and (forced is None or tool.get("name") != forced)
        for tool, there in zip(tools, at_anthropic, strict=True)
    ]


def _runs_at_anthropic(kind: object) -> bool:
    return isinstance(kind, str) and kind.startswith(_AT_ANTHROPIC)


def _tools(value: object, choice: object) -> list[Json]:
    out: list[Json] = []
    tools = [as_object(tool, f"tools[{n}]") for n, tool in enumerate([] if value is None else as_list(value, "tools"))]
    for number in _kept(tools, choice):
        at, given = f"tools[{number}]", tools[number]
        if given.get("type") not in (None, "custom"):
            raise NotTranslatable(
                f"{at}.type", f"`{at}.type`: tools of type {quoted(given.get('type'))} run at Anthropic, not here."
            )
        function: Json = {"name": given.get("name"), "parameters": given.get("input_schema")}
        function |= {name: given[name] for name in ("description", "strict") if given.get(name) is not None}
        out.append({"type": "function", "function": function})
    return out


def kept_tools(body: Mapping[str, Any]) -> list[int]:
    """The places in the request's list of those tools that are in the chat, in the chat's order. For a body that
    `chat_request` takes."""
    return _kept(cast("list[Json]", body.get("tools") or []), body.get("tool_choice"))


def _kept(tools: Sequence[Json], choice: object) -> list[int]:
    return [place for place, left_out in enumerate(needless(tools, choice)) if not left_out]


def _tool_choice(value: object) -> Json:
    choice = as_object(value, "tool_choice")
    out: Json = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    match choice.get("type"):
        case None | "auto":
            return out
        case "any":
            return out | {"tool_choice": "required"}
        case "none":
            return out | {"tool_choice": "none"}
        case "tool":
            return out | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
        case _:
            raise NotTranslatable("tool_choice.type", '`tool_choice.type` must be "auto", "any", "tool" or "none".')


def _output_schema(body: Mapping[str, Any]) -> object:
    wanted: object = as_object(body.get("output_config"), "output_config").get("format") or body.get("output_format")
    if wanted is None:
        return None
    given = as_object(wanted, "output_config.format")
    if given.get("type") != "json_schema":
        raise NotTranslatable("output_config.format.type", '`output_config.format.type` must be "json_schema".')
    return given.get("schema")
