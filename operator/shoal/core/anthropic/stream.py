"""The chunks of a streamed chat completion as the events of a message."""

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from shoal.core.anthropic.answer import error_event, stop_reason, tool_use, usage
from shoal.core.translation import Json, StreamFailure, first_choice, inner, objects_of, text_in

Block = Literal["text", "thinking", "tool_use"]


class MessageEvents:
    """The events of one message. Feed it every chunk, then call `end`.

    The message is open from the first chunk on that has content or counts; the block that is open closes when another
    begins. Tokens found in the cache are known in the last chunk only, so `message_start` counts them as input, and
    `message_delta` has the exact numbers.
    """

    __slots__ = ("_block", "_call", "_called", "_id", "_index", "_model", "_reason", "_sequence", "_started", "_usage")

    def __init__(self, id: str, model: str) -> None:
        self._id, self._model = id, model
        self._started = False
        self._index = -1
        self._block: Block | None = None
        self._call: object = None
        """Index of the tool call whose block is open."""
        self._called = False
        self._reason: str | None = None
        self._sequence: str | None = None
        self._usage: Json = usage(None)

    def held_after(self, more: int) -> int:
        """None: no event repeats what earlier ones said."""
        return 0

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of one chunk; it may have none."""
        out: list[bytes] = []
        if isinstance(chunk.get("usage"), dict):
            self._usage = usage(chunk["usage"])
        choice = first_choice(chunk)
        delta = inner(choice, "delta")
        if not self._started:
            said = any(delta.get(name) for name in ("reasoning_content", "content", "tool_calls"))
            if not said and not isinstance(chunk.get("usage"), dict):
                return b""  # the first chunk of SGLang has a role only, and the next one says how long the prompt is
            out.append(self._start())
        if thought := text_in(delta, "reasoning_content"):
            self._open(out, "thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if text := text_in(delta, "content"):
            self._open(out, "text", {"type": "text", "text": ""})
            out.append(self._delta({"type": "text_delta", "text": text}))
        for call in objects_of(delta.get("tool_calls")):
            self._tool(out, call)
        reason, sequence = stop_reason(choice, calls=self._called)
        if reason is not None:
            self._reason, self._sequence = reason, sequence
        return b"".join(out)

    def end(self) -> bytes:
        """The last events, once the engine has said that the stream is complete."""
        out: list[bytes] = [] if self._started else [self._start()]
        self._close(out)
        stopped = {"stop_reason": self._reason or "end_turn", "stop_sequence": self._sequence}
        out.append(_event("message_delta", delta=stopped, usage=self._usage))
        out.append(_event("message_stop"))
        return b"".join(out)

    def error(self, failure: StreamFailure) -> bytes:
        return error_event(failure)

    def _start(self) -> bytes:
        self._started = True
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage,
        }
        return _event("message_start", message=message)

    def _tool(self, out: list[bytes], call: Json) -> None:
        self._called = True
        if self._block != "tool_use" or call.get("index") != self._call:
            self._close(out)
            self._call = call.get("index")
            self._open(out, "tool_use", tool_use(call))
        if arguments := text_in(inner(call, "function"), "arguments"):
            out.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))

    def _open(self, out: list[bytes], kind: Block, block: Json) -> None:
        if self._block == kind:
            return
        self._close(out)
        self._block = kind
        self._index += 1
        out.append(_event("content_block_start", index=self._index, content_block=block))

    def _close(self, out: list[bytes]) -> None:
        if self._block is not None:
            out.append(_event("content_block_stop", index=self._index))
            self._block = None

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **members}))
