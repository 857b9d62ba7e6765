"""What the APIs that a storm asks look like to a client. Engines answer messages and responses as chats, so their words
are those of a chat. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from shoal.core.translation import first_choice

TranslatedKind = Literal["message", "message_stream", "response", "response_stream"]
TRANSLATED: Final[Mapping[str, str]] = {
    "message": "/v1/messages",
    "message_stream": "/v1/messages",
    "response": "/v1/responses",
    "response_stream": "/v1/responses",
}
"""Path of each kind of request that a gateway translates into a chat."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one event, or a whole answer, says."""

    text: str = ""
    usage: tuple[int, int] | None = None
    """Prompt and answer tokens."""
    done: bool = False
    """It is the last event of a whole answer."""


def body_of(kind: str, text: str, max_tokens: int) -> dict[str, Any]:
    """The body of a request, without its model."""
    turns = [{"role": "user", "content": text}]
    match kind:
        case "response" | "response_stream":
            return {"input": text, "max_output_tokens": max_tokens}
        case "chat" | "message" | "message_stream":
            return {"messages": turns, "max_tokens": max_tokens}
        case _:
            return {"prompt": text, "max_tokens": max_tokens, "ignore_eos": True}


def whole(kind: str, body: Mapping[str, Any]) -> Said:
    """Raises LookupError or TypeError: it is no answer of this API."""
    match kind:
        case "message":
            text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
        case "response":
            parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
            text = "".join(part["text"] for part in parts)
        case "chat":
            text = body["choices"][0]["message"]["content"]
        case _:
            text = body["choices"][0]["text"]
    return Said(text, _usage(body.get("usage")))


def heard(kind: str, event: Mapping[str, Any]) -> Said:
    """What one event says that is no error."""
    if kind not in TRANSLATED:
        choice = first_choice(dict(event))
        return Said(choice.get("text") or choice.get("delta", {}).get("content") or "", _usage(event.get("usage")))
    match event.get("type"):
        case "content_block_delta":
            return Said(event["delta"].get("text", ""))
        case "message_delta":
            return Said(usage=_usage(event["usage"]))
        case "message_stop":
            return Said(done=True)
        case "response.output_text.delta":
            return Said(event["delta"])
        case "response.completed" | "response.incomplete":
            return Said(usage=_usage(event["response"]["usage"]), done=True)
        case _:
            return Said()


def error_in(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The error that an event of any of the APIs tells; None: it is none."""
    match event.get("type"):
        case "response.failed":
            return event["response"]["error"]
        case "error" if "error" not in event:
            return event
        case _:
            return event.get("error")


def _usage(counts: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not counts:
        return None
    if "prompt_tokens" in counts:
        return counts["prompt_tokens"], counts["completion_tokens"]
    # Anthropic counts what was cached beside the rest.
    return counts["input_tokens"] + counts.get("cache_read_input_tokens", 0), counts["output_tokens"]
