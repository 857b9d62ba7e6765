"""OpenAI's Responses API at an external target that serves it itself."""

from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from shoal.core.nativeapi import (
    NativeAnswer,
    NativeEvents,
    NotCounted,
    at_provider,
    counted,
    only_data,
    texts_of,
    usage_of,
)
from shoal.core.responses.items import error_members
from shoal.core.responses.request import AT_OPENAI, NAMESPACE, STATEFUL
from shoal.core.translation import Json, NotTranslatable, StreamFailure, as_list, as_object, inner, objects_of

_SENT: Final = (
    "input", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning", "stream", "temperature", "text",
    "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip
_DROPPED: Final = frozenset(
    {
        "model", "include", "background", "client_metadata", "max_tool_calls", "metadata", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options",
    }
)  # fmt: skip
_INCLUDED: Final = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""Of `include`: what a conversation needs whose answers are not stored."""
# Tuples: a client's `type` may be a list, which no set can be asked for.
_ITEMS: Final = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "apply_patch_call", "apply_patch_call_output",
)  # fmt: skip
_TOOLS: Final = ("function", "custom", "local_shell", "apply_patch")
"""Tools that the client runs."""
_GROUPED: Final = ("function", "custom")
"""What of them a namespace has."""
_MOST_EVENTS: Final = 2**53
"""A number beyond is no count of events."""
_MEDIA: Final = ("image_url", "file_url", "file_id")


def native_request(body: Mapping[str, Any]) -> Json:
    """What goes out of a body. Raises NotTranslatable."""
    for name, why in STATEFUL.items():
        if body.get(name) is not None:
            raise NotTranslatable(name, f"`{name}` is not supported: {why}.")
    if body.get("background") not in (None, False):
        raise NotTranslatable("background", "`background` is not supported: answers are not stored.")
    others = body.keys() - _DROPPED - STATEFUL.keys() - set(_SENT)
    if unknown := sorted(name for name in others if body[name] is not None):
        raise NotTranslatable(unknown[0], f"`{unknown[0][:100]}` is not forwarded.")
    given = body.get("input")
    if not isinstance(given, str):
        for number, item in enumerate(as_list(given, "input")):
            _check(as_object(item, f"input[{number}]"), f"input[{number}]")
    out: Json = {name: body[name] for name in _SENT if body.get(name) is not None}
    if (tools := _tools(body.get("tools"), body.get("tool_choice"))) is not None:
        out["tools"] = tools
    asked = body.get("include")
    if include := [one for one in _INCLUDED if isinstance(asked, list) and one in asked]:
        out["include"] = include
    # All tenants of the route share its key: each of them could read what is stored under it.
    out["store"] = False
    return out


def _check(item: Json, at: str) -> None:
    kind = item.get("type", "message")
    if kind not in _ITEMS:
        raise at_provider(at, kind)
    for name in ("content", "output"):
        parts: object = item.get(name)
        for number, value in enumerate(cast(list[object], parts) if isinstance(parts, list) else ()):
            here = f"{at}.{name}[{number}]"
            part = as_object(value, here)
            for field in _MEDIA:
                url: object = part.get(field)
                if url is not None and not (field == "image_url" and isinstance(url, str) and url.startswith("data:")):
                    raise only_data(f"{here}.{field}")


def _tools(value: object, choice: object) -> list[object] | None:
    """The tools, without those that would run at the provider, stand beside others and are not named by the choice."""
    if value is None:
        return None
    tools = [as_object(tool, f"tools[{number}]") for number, tool in enumerate(as_list(value, "tools"))]
    others = any(tool.get("type") not in AT_OPENAI for tool in tools)
    named = _chosen(choice)
    kept: list[object] = []
    for number, given in enumerate(tools):
        kind: object = given.get("type")
        if kind in AT_OPENAI and others and kind not in named:
            continue
        if kind == NAMESPACE:
            at = f"tools[{number}].tools"
            for place, value in enumerate(as_list(given.get("tools"), at)):
                if (inside := as_object(value, f"{at}[{place}]").get("type")) not in _GROUPED:
                    raise at_provider(f"{at}[{place}]", inside)
        elif kind not in _TOOLS:
            raise at_provider(f"tools[{number}]", kind)
        kept.append(given)
    return kept


def _chosen(choice: object) -> list[object]:
    """The types that the choice of a tool names."""
    if not isinstance(choice, dict):
        return []
    given = cast(Json, choice)
    return [given.get("type"), *(tool.get("type") for tool in objects_of(given.get("tools")))]


def native_turns(body: Mapping[str, Any]) -> list[Json]:
    """See `NativeApi.turns`."""
    given: object = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else objects_of(given)
    system: Json = {"role": "system", "content": body.get("instructions")}
    return [system, *({"role": one.get("role"), "content": _content(one)} for one in items)]


def _content(item: Json) -> object:
    """What a chat has of an item."""
    content: object = item.get("output") if item.get("content") is None else item["content"]
    return content if isinstance(content, str) else [_part(part) for part in objects_of(content)]


def _part(part: Json) -> Json:
    if part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    if part.get("type") == "input_file":
        return {"type": "file", "file": {"file_data": part.get("file_data")}}
    return part  # a text, or a sound, which is the same in both


def native_answer(answer: Json, model_name: str) -> NativeAnswer:
    """A whole response."""
    text = texts_of(answer.get("output"), _text)
    return NativeAnswer(answer | {"model": model_name}, _usage(inner(answer, "usage")), text, _finish(answer))


class NativeResponseEvents(NativeEvents):
    """The events of one streamed response."""

    __slots__ = ("_number",)

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self._number = -1
        """Of the last event."""

    @property
    def usage(self) -> Json | None:
        return _usage(self._counts) if self._counts else None

    def take(self, event: Json) -> tuple[bool, str]:
        kind, delta, number = event.get("type"), event.get("delta"), event.get("sequence_number")
        self._number = number if type(number) is int and 0 <= number < _MOST_EVENTS else self._number + 1
        if kind in ("response.completed", "response.incomplete"):
            self.complete = True
        elif kind in ("response.failed", "error"):
            self.failed = True
        if isinstance(response := event.get("response"), dict):
            told = cast(Json, response)
            self._counts = inner(told, "usage") or self._counts
            self.finish = _finish(told) or self.finish
            told["model"] = self._model
            return True, ""
        return False, delta if isinstance(delta, str) and isinstance(kind, str) and kind.endswith(".delta") else ""

    def error(self, failure: StreamFailure) -> bytes:
        # The event that failed is not sent, and its number is this one's.
        number = self._number if self.failed else self._number + 1
        event: Json = {"type": "error", "sequence_number": max(number, 0), **error_members(failure)}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(event)


def _text(item: Json) -> str:
    """What the model wrote in an item: a text, or the arguments of a call."""
    found: list[object] = [item.get("arguments"), item.get("input")]
    for name in ("content", "summary"):
        parts: object = item.get(name)
        for part in cast(list[object], parts) if isinstance(parts, list) else ():
            if isinstance(part, dict):
                found += [cast(Json, part).get("text"), cast(Json, part).get("refusal")]
    return "".join(text for text in found if isinstance(text, str))


def _finish(response: Json) -> str | None:
    """The reason as chats name it."""
    match response.get("status"):
        case "completed":
            return "stop"
        case "incomplete":
            return "length" if inner(response, "incomplete_details").get("reason") == "max_output_tokens" else "stop"
        case _:
            return None


def _usage(block: Json) -> Json | None:
    try:
        reasoning = inner(block, "output_tokens_details")
        return usage_of(
            counted(block, "input_tokens"),
            counted(inner(block, "input_tokens_details"), "cached_tokens", 0),
            counted(block, "output_tokens"),
            counted(reasoning, "reasoning_tokens") if reasoning else None,
        )
    except NotCounted:
        return None
