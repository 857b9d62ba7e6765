"""A response of OpenAI's Responses API, and the items of its output."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from shoal.core.translation import Json, StreamFailure, answered, count_in, inner, objects_of, text_in


def response(
    id: str,
    model: str,
    created: int,
    output: Sequence[Json],
    *,
    status: str,
    usage: Json | None = None,
    error: Json | None = None,
) -> Json:
    """The object. `status`: in_progress, completed, incomplete (by the bound on its tokens) or failed. Fields of the
    request that the object could repeat have their defaults."""
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "model": model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
        "metadata": {},
    }


def error_of(failure: StreamFailure) -> Json:
    """The `error` of a response that failed. Its codes are OpenAI's: clients of some languages know no others."""
    match failure.status:
        case 429:
            code = "rate_limit_exceeded"
        case status if status < 500:
            code = "invalid_prompt"
        case _:
            code = "server_error"
    return {"code": code, "message": failure.message} | after_of(failure)


def error_members(failure: StreamFailure) -> Json:
    """What an event `error` has besides its type and number."""
    return {"code": failure.code, "message": failure.message, "param": failure.param} | after_of(failure)


def after_of(failure: StreamFailure) -> Json:
    """A stream has no header for it."""
    return {} if failure.retry_after is None else {"retry_after": failure.retry_after}


def whole(completion: Mapping[str, Any], id: str) -> Json:
    """The response of a chat completion. Raises UnreadableAnswer."""
    choice, said = answered(completion)
    status = status_of(choice.get("finish_reason"))
    output: list[Json] = []
    if thought := text_in(said, "reasoning_content"):
        output.append(reasoning(f"rs_{id}", thought))
    calls = list(objects_of(said.get("tool_calls")))
    cut_thought = bool(output) and status == "incomplete"
    if (text := text_in(said, "content")) or not (calls or cut_thought):
        output.append(message(f"msg_{id}", text))
    output += [call_of(call) for call in calls]
    output[-1]["status"] = status  # a bound on the tokens cuts the last item
    created, model = count_in(completion, "created"), str(completion.get("model"))
    return response(id, model, created, output, status=status, usage=usage(completion.get("usage")))


def status_of(finish_reason: object) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def message(id: str, text: str, status: str = "completed") -> Json:
    content = [text_part(text)] if text or status == "completed" else []
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning(id: str, text: str, status: str = "completed") -> Json:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": id, "status": status, "summary": [], "content": content}


def call_of(call: Mapping[str, Any]) -> Json:
    """The item of a call, from a chat's `tool_calls`."""
    function = inner(call, "function")
    return function_call(text_in(call, "id"), text_in(function, "name"), text_in(function, "arguments"))


def function_call(call_id: str, name: str, arguments: str, status: str = "completed") -> Json:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def usage(given: object) -> Json:
    counted = cast(Json, given) if isinstance(given, dict) else {}
    read, written = count_in(counted, "prompt_tokens"), count_in(counted, "completion_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": count_in(inner(counted, "prompt_tokens_details"), "cached_tokens")},
        "output_tokens": written,
        "output_tokens_details": {
            "reasoning_tokens": count_in(inner(counted, "completion_tokens_details"), "reasoning_tokens")
        },
        "total_tokens": read + written,
    }
