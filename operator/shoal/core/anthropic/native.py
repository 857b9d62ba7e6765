"""Anthropic's Messages API at an external target that serves it itself."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from shoal.core.anthropic.answer import error_event
from shoal.core.anthropic.request import needless, without_attribution
from shoal.core.nativeapi import (
    MOST_NESTED,
    NativeAnswer,
    NativeEvents,
    NotCounted,
    at_provider,
    counted,
    only_data,
    texts_of,
    usage_of,
)
from shoal.core.translation import Json, NotTranslatable, StreamFailure, as_list, as_object, inner, objects_of

_SENT: Final = (
    "cache_control", "max_tokens", "messages", "output_config", "output_format", "stop_sequences", "stream", "system",
    "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
)  # fmt: skip
_DROPPED: Final = frozenset(
    {"model", "metadata", "service_tier", "context_management", "container", "inference_geo", "speed"}
)
"""`model` has another name there; the others say who the client is, name what is stored there, or change the price."""
_OF_A_PROMPT: Final = frozenset({"messages", "system", "thinking", "tool_choice", "tools"})
# Tuples: a client's `type` may be a list, which no set can be asked for.
_BLOCKS: Final = (
    "text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result",
)  # fmt: skip
_SOURCES: Final = ("base64", "text", "content")
_RUN_BY_CLIENTS: Final = ("bash_", "text_editor_", "computer_", "memory_")
"""Tools of Anthropic's that the client runs."""


def native_request(body: Mapping[str, Any]) -> Json:
    """What goes out of a body. Raises NotTranslatable."""
    if unknown := sorted(name for name in body.keys() - _DROPPED - set(_SENT) if body[name] is not None):
        raise NotTranslatable(unknown[0], f"`{unknown[0][:100]}` is not forwarded.")
    for number, message in enumerate(as_list(body.get("messages"), "messages")):
        at = f"messages[{number}].content"
        _check(as_object(message, f"messages[{number}]").get("content"), at, 0)
    _check(body.get("system"), "system", 0)
    out: Json = {name: body[name] for name in _SENT if body.get(name) is not None}
    if body.get("tools") is not None:
        out["tools"] = _tools(body["tools"], body.get("tool_choice"))
    return out


def native_count_request(body: Mapping[str, Any]) -> Json:
    """The same, for the number of tokens of a prompt. Raises NotTranslatable."""
    return {name: value for name, value in native_request(body).items() if name in _OF_A_PROMPT}


def _tools(value: object, choice: object) -> list[Json]:
    tools = [as_object(tool, f"tools[{number}]") for number, tool in enumerate(as_list(value, "tools"))]
    kept: list[Json] = []
    for number, (tool, left_out) in enumerate(zip(tools, needless(tools, choice), strict=True)):
        kind: object = tool.get("type")
        if left_out:
            continue
        if kind not in (None, "custom") and not (isinstance(kind, str) and kind.startswith(_RUN_BY_CLIENTS)):
            raise at_provider(f"tools[{number}]", kind)
        kept.append(tool)
    return kept


def _check(content: object, at: str, depth: int) -> None:
    """Refuses what is no plain content. Raises NotTranslatable."""
    if content is None or isinstance(content, str):
        return
    if depth > MOST_NESTED:
        raise NotTranslatable(at, f"`{at[:200]}` is nested too deeply.")
    for number, value in enumerate(as_list(content, at)):
        here = f"{at}[{number}]"
        block = as_object(value, here)
        if (kind := block.get("type")) not in _BLOCKS:
            raise at_provider(here, kind)
        if isinstance(source := block.get("source"), dict):
            if cast(Json, source).get("type") not in _SOURCES:
                raise only_data(f"{here}.source")
            _check(cast(Json, source).get("content"), f"{here}.source.content", depth + 1)
        if kind in ("tool_result", "search_result"):
            _check(block.get("content"), f"{here}.content", depth + 1)


def native_turns(body: Mapping[str, Any]) -> list[Json]:
    """See `NativeApi.turns`."""
    system = {"role": "system", "content": list(_parts(body.get("system"), 0))}
    messages = objects_of(body.get("messages"))
    return [system, *({"role": one.get("role"), "content": list(_parts(one.get("content"), 0))} for one in messages)]


def _parts(content: object, depth: int) -> Iterator[Json]:
    """What a chat has of a content, and of the results and documents in it."""
    if isinstance(content, str):
        yield {"type": "text", "text": without_attribution(content)}
    if depth > MOST_NESTED:
        return
    for block in objects_of(content):
        source = inner(block, "source")
        match block.get("type"):
            case "text":
                yield from _parts(block.get("text"), depth)
            case "image":
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
                yield {"type": "image_url", "image_url": {"url": url}}
            case "document" if source.get("type") == "base64":
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
                yield {"type": "file", "file": {"file_data": url}}
            case "document" if source.get("type") == "text":
                yield {"type": "text", "text": source.get("data")}
            case _:
                yield from _parts(block.get("content"), depth + 1)
                yield from _parts(source.get("content"), depth + 1)


def native_answer(answer: Json, model_name: str) -> NativeAnswer:
    """A whole message."""
    text, finish = texts_of(answer.get("content"), _text), answer.get("stop_reason")
    why = finish if isinstance(finish, str) else None
    return NativeAnswer(answer | {"model": model_name}, _usage(inner(answer, "usage")), text, why)


def native_count(answer: Json, _model_name: str) -> NativeAnswer:
    """The number of tokens of a prompt: no model computes anything."""
    return NativeAnswer(answer, usage_of(0, 0, 0), "", None)


class NativeMessageEvents(NativeEvents):
    """The events of one streamed message."""

    __slots__ = ()

    @property
    def usage(self) -> Json | None:
        return _usage(self._counts) if self._counts else None

    def take(self, event: Json) -> tuple[bool, str]:
        match event.get("type"):
            case "message_start":
                message = inner(event, "message")
                self._count(message)
                message["model"] = self._model
                return True, ""
            case "content_block_delta":
                return False, _text(inner(event, "delta"))
            case "message_delta":
                self._count(event)
                reason = inner(event, "delta").get("stop_reason")
                self.finish = reason if isinstance(reason, str) else self.finish
            case "message_stop":
                self.complete = True
            case "error":
                self.failed = True
            case _:
                pass
        return False, ""

    def error(self, failure: StreamFailure) -> bytes:
        return error_event(failure)

    def _count(self, event: Json) -> None:
        """Counts of later events are those of the whole answer so far."""
        self._counts |= {name: value for name, value in inner(event, "usage").items() if value is not None}


def _text(block: Json) -> str:
    found = [block.get(name) for name in ("text", "thinking", "partial_json")]
    return "".join(text for text in found if isinstance(text, str))


def _usage(block: Json) -> Json | None:
    """`input_tokens` are those that no cache had and that no cache got."""
    try:
        cached = counted(block, "cache_read_input_tokens", 0)
        read = counted(block, "input_tokens") + cached + counted(block, "cache_creation_input_tokens", 0)
        return usage_of(read, cached, counted(block, "output_tokens"))
    except NotCounted:
        return None
