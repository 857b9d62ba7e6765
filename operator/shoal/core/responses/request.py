"""The body of OpenAI's `POST /v1/responses` as the body of a chat completion.

What comes out is checked like any chat completion (`core/fields`): bounds stand there, and not here. Members of items,
tools and settings that nothing here reads are passed over: coding agents send new ones with each release.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from shoal.core.fields.turns import one_system
from shoal.core.translation import Json, NotTranslatable, as_list, as_object, as_text, quoted

_SAME: Final = ("model", "stream", "temperature", "top_p", "user", "parallel_tool_calls")
_DROPPED: Final = frozenset(
    {
        "include", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "stream_options", "truncation", "client_metadata",
    }
)  # fmt: skip
"""Without a meaning here: nothing is stored, reported or shortened, and prefixes are cached anyway."""
STATEFUL: Final = {
    "previous_response_id": "responses are not stored: send the whole conversation in `input`",
    "conversation": "conversations are not stored: send the whole conversation in `input`",
    "prompt": "prompts are not stored: send the text",
}
AT_OPENAI: Final = ("web_search", "web_search_preview", "image_generation")
"""Tools that run at OpenAI, and that agents offer unasked."""
NAMESPACE: Final = "namespace"
"""A group of functions, whose calls name the group: a chat has no field for it."""
_LEFT_OUT: Final = (*AT_OPENAI, NAMESPACE)
"""Agents offer them beside their functions. A model that does not know of them uses the functions; one that has nothing
else could not do what it is asked for."""
_KNOWN: Final = (
    _DROPPED
    | STATEFUL.keys()
    | {*_SAME, "background", "input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools"}
)

NAMES: Final = (
    (re.compile("max_(completion_)?tokens$"), "max_output_tokens"),
    # One item may be several messages, and several items one.
    (re.compile("messages.*"), "input"),
    (re.compile("reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
)
"""See `translation.Names`."""


def chat_request(body: Mapping[str, Any]) -> Json:
    """The body of the chat completion. Raises NotTranslatable."""
    if unknown := sorted(name for name in body.keys() - _KNOWN if body[name] is not None):
        raise NotTranslatable(unknown[0], f"`{unknown[0][:100]}` is not supported.")
    for name, why in STATEFUL.items():
        if body.get(name) is not None:
            raise NotTranslatable(name, f"`{name}` is not supported: {why}.")
    if body.get("background") not in (None, False):
        raise NotTranslatable("background", "`background` is not supported: answers are not stored.")
    out: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        out["max_completion_tokens"] = body["max_output_tokens"]
    out["messages"] = _messages(body)
    if tools := _tools(body.get("tools")):
        out["tools"] = tools
        if (choice := _tool_choice(body.get("tool_choice"))) is not None:
            out["tool_choice"] = choice
    else:
        out.pop("parallel_tool_calls", None)
    reasoning = as_object(body.get("reasoning"), "reasoning")
    if reasoning.get("mode") not in (None, "standard"):
        raise NotTranslatable("reasoning.mode", '`reasoning.mode` must be "standard": there is one mode here.')
    if (effort := reasoning.get("effort")) is not None:
        out["reasoning_effort"] = effort
    if (wanted := _format(as_object(body.get("text"), "text").get("format"))) is not None:
        out["response_format"] = wanted
    return out


def _messages(body: Mapping[str, Any]) -> list[Json]:
    out: list[Json] = []
    if (instructions := body.get("instructions")) is not None:
        out.append({"role": "system", "content": as_text(instructions, "instructions")})
    given = body.get("input")
    if given is None:
        raise NotTranslatable("input", "You must provide `input`.")
    if isinstance(given, str):
        return [*out, {"role": "user", "content": given}]
    thoughts: list[str] = []
    for number, value in enumerate(as_list(given, "input")):
        at = f"input[{number}]"
        item = as_object(value, at)
        if item.get("type") == "reasoning":
            thoughts += _thoughts(item)
            continue
        _add(out, item, at)
        if thoughts and out[-1]["role"] == "assistant":
            before = out[-1].get("reasoning_content")
            out[-1]["reasoning_content"] = "\n".join([before, *thoughts] if before else thoughts)
        thoughts = []
    return one_system(out)


def _thoughts(item: Json) -> list[str]:
    """What a model thought before what it said next. Thoughts that are encrypted can only be read by who did that."""
    parts: object = item.get("content") or item.get("summary")
    found = cast("list[object]", parts) if isinstance(parts, list) else []
    texts = [cast(Json, part).get("text") for part in found if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str) and text]


def _add(out: list[Json], item: Json, at: str) -> None:
    """Appends what an item is in a chat. A model's calls stand in one message with what it said before them."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise NotTranslatable(
                    f"{at}.role", f'`{at}.role` must be "user", "assistant", "system" or "developer".'
                )
            role = "system" if role == "developer" else role
            out.append({"role": role, "content": _content(item.get("content"), f"{at}.content")})
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = _content(item.get("output"), f"{at}.output")
            out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case "item_reference":
            raise NotTranslatable(f"{at}.type", f"`{at}.type`: items are not stored, so none can be referred to.")
        case other:
            raise NotTranslatable(f"{at}.type", f"`{at}.type`: items of type {quoted(other)} are not supported.")


def _content(value: object, at: str) -> object:
    if isinstance(value, str):
        return value
    parts = [_part(as_object(part, f"{at}[{n}]"), f"{at}[{n}]") for n, part in enumerate(as_list(value, at))]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Json, at: str) -> Json:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": as_text(part.get("text"), f"{at}.text")}
        case "refusal":
            return {"type": "text", "text": as_text(part.get("refusal"), f"{at}.refusal")}
        case "input_image" if part.get("image_url") is not None:
            url: Json = {"url": part["image_url"]}
            if part.get("detail") is not None:
                url["detail"] = part["detail"]
            return {"type": "image_url", "image_url": url}
        case other:
            raise NotTranslatable(f"{at}.type", f"`{at}.type`: parts of type {quoted(other)} are not supported.")


def _tools(value: object) -> list[Json]:
    out: list[Json] = []
    tools = [] if value is None else as_list(value, "tools")
    given_tools = [as_object(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    for number in _kept(given_tools):
        at, given = f"tools[{number}]", given_tools[number]
        if given.get("type") != "function":
            raise NotTranslatable(
                f"{at}.type", f"`{at}.type`: tools of type {quoted(given.get('type'))} are not supported."
            )
        names = ("name", "description", "parameters", "strict")
        out.append(
            {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}
        )
    return out


def kept_tools(body: Mapping[str, Any]) -> list[int]:
    """The places in the request's list of those tools that are in the chat, in the chat's order. For a body that
    `chat_request` takes."""
    return _kept(cast("list[Json]", body.get("tools") or []))


def _kept(tools: Sequence[Json]) -> list[int]:
    functions = any(tool.get("type") == "function" for tool in tools)
    return [place for place, tool in enumerate(tools) if not (tool.get("type") in _LEFT_OUT and functions)]


def _tool_choice(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    choice = as_object(value, "tool_choice")
    if choice.get("type") != "function":
        raise NotTranslatable("tool_choice.type", '`tool_choice.type` must be "function".')
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(value: object) -> Json | None:
    given = as_object(value, "text.format")
    match given.get("type"):
        case None | "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            names = ("name", "description", "schema", "strict")
            return {"type": "json_schema", "json_schema": {n: given[n] for n in names if given.get(n) is not None}}
        case _:
            raise NotTranslatable(
                "text.format.type", '`text.format.type` must be "text", "json_object" or "json_schema".'
            )
