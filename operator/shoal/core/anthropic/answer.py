"""A chat completion as a message of Anthropic's API, and errors in the shape of that API."""

from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from shoal.core.translation import Json, StreamFailure, UnreadableAnswer, answered, count_in, inner, objects_of, text_in

_STOPS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> type. Others: `invalid_request_error` below 500, `api_error` above."""


def message(completion: Mapping[str, Any], id: str) -> Json:
    """The whole answer. `id` is the message's. Raises UnreadableAnswer."""
    choice, said = answered(completion)
    content: list[Json] = []
    if thought := text_in(said, "reasoning_content"):
        # The SDKs' types need a signature, and only Anthropic's own thoughts have one.
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := text_in(said, "content"):
        content.append({"type": "text", "text": text})
    calls = list(objects_of(said.get("tool_calls")))
    content += [{**tool_use(call), "input": _arguments(inner(call, "function"))} for call in calls]
    reason, sequence = stop_reason(choice, calls=bool(calls))
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": completion.get("model"),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(completion.get("usage")),
    }


def token_count(tokenized: Mapping[str, Any], _id: str) -> Json:
    """The answer of `/v1/messages/count_tokens`, from that of `/v1/tokenize`. Raises UnreadableAnswer."""
    count: object = tokenized.get("count")
    if type(count) is not int:
        raise UnreadableAnswer
    return {"input_tokens": count}


def tool_use(call: Mapping[str, Any]) -> Json:
    """The block of a call, without its arguments."""
    return {
        "type": "tool_use",
        "id": text_in(call, "id"),
        "name": text_in(inner(call, "function"), "name"),
        "input": {},
    }


def stop_reason(choice: Mapping[str, Any], *, calls: bool) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence) of a choice; (None, None) while it goes on. The engine names the stop sequence that
    it met in `matched_stop`, and the end of the text by the id of a token. `calls`: the answer has calls of tools; of
    one that had to be made vLLM says `stop`."""
    reason: object = choice.get("finish_reason")
    if not isinstance(reason, str):
        return None, None
    met: object = choice.get("matched_stop")
    if reason == "stop" and isinstance(met, str):
        return "stop_sequence", met
    if reason == "stop" and calls:
        return "tool_use", None
    return _STOPS.get(reason, "end_turn"), None


def usage(given: object) -> Json:
    """Anthropic counts the tokens that were found in the cache beside the others, OpenAI among them."""
    counted = cast(Json, given) if isinstance(given, dict) else {}
    cached = count_in(inner(counted, "prompt_tokens_details"), "cached_tokens")
    return {
        "input_tokens": max(0, count_in(counted, "prompt_tokens") - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count_in(counted, "completion_tokens"),
    }


def error(status: int, text: str, request_id: str) -> Json:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}


def error_event(failure: StreamFailure) -> bytes:
    """The event with which a stream ends that failed. It has no headers, so `retry_after` is in the error."""
    told = error(failure.status, failure.message, failure.request_id)
    if failure.retry_after is not None:
        told["error"]["retry_after"] = failure.retry_after
    return b"event: error\ndata: %b\n\n" % orjson.dumps(told)


def _arguments(function: Mapping[str, Any]) -> Json:
    """The engine writes them as JSON in a text. Text that is no object, or one too deep to be written again, is kept,
    under a name of its own."""
    text = text_in(function, "arguments")
    try:
        found: object = orjson.loads(text) if text else {}
        orjson.dumps(found)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        found = None
    return cast(Json, found) if isinstance(found, dict) else {"arguments": text}
