"""The chunks of a streamed chat completion as the events of a response."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import orjson

from shoal.core.responses import items
from shoal.core.translation import Json, StreamFailure, count_in, first_choice, inner, objects_of, text_in

_POINTER: Final = 8


class _Item:
    """The item that is open: what it is, and what of it has come."""

    def __init__(self, kind: str, id: str, made: Callable[[str, str], Json], call: object = None) -> None:
        self.kind = kind
        self.id = id
        self.call = call
        """Index of the tool call; None: it is none."""
        self._made = made
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def grows(self, text: str) -> int:
        """Returns the bytes that this takes in memory."""
        self._parts.append(text)
        return sys.getsizeof(text) + _POINTER

    def shown(self, status: str) -> Json:
        """The item. While it is in progress it is empty."""
        return self._made("" if status == "in_progress" else self.text, status)


class ResponseEvents:
    """The events of one response. Feed it every chunk, then call `end`. The item that is open closes when another
    begins."""

    def __init__(self, id: str, model: str) -> None:
        self._id, self._model = id, model
        self._created = 0
        self._number = -1
        self._started = False
        self._output: list[Json] = []
        self._open: _Item | None = None
        self._status = "completed"
        self._usage: Json | None = None
        self._held = 0
        """Bytes of the answer in memory: the last event repeats all of it."""

    def held_after(self, more: int) -> int:
        """Bytes of the answer in memory after so many more of the engine's."""
        return self._held + more

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of one chunk; it may have none."""
        out: list[bytes] = []
        if isinstance(chunk.get("usage"), dict):
            self._usage = items.usage(chunk["usage"])
        if not self._started:
            self._created = count_in(chunk, "created")
            self._start(out)
        choice = first_choice(chunk)
        delta = inner(choice, "delta")
        if thought := text_in(delta, "reasoning_content"):
            self._text(out, "reasoning", thought)
        if text := text_in(delta, "content"):
            self._text(out, "message", text)
        for call in objects_of(delta.get("tool_calls")):
            self._call(out, call)
        if (reason := choice.get("finish_reason")) is not None:
            self._status = items.status_of(reason)
        return b"".join(out)

    def end(self) -> bytes:
        """The last events, once the engine has said that the stream is complete."""
        out: list[bytes] = []
        if not self._started:
            self._start(out)
        if self._open is None and not self._output:
            self._begin(out, self._message())
        self._close(out, self._status)
        out.append(self._event(f"response.{self._status}", response=self._response(self._status)))
        return b"".join(out)

    def error(self, failure: StreamFailure) -> bytes:
        """The last event of a stream that failed: `response.failed` with what has come, or `error` where no event was
        sent."""
        if not self._started:
            return self._event("error", **items.error_members(failure))
        begun = self._open
        output = self._output if begun is None else [*self._output, begun.shown("incomplete")]
        failed = items.response(
            self._id,
            self._model,
            self._created,
            output,
            status="failed",
            usage=self._usage,
            error=items.error_of(failure),
        )
        return self._event("response.failed", response=failed)

    def _start(self, out: list[bytes]) -> None:
        self._started = True
        begun = self._response("in_progress")
        out += [self._event(kind, response=begun) for kind in ("response.created", "response.in_progress")]

    def _response(self, status: str) -> Json:
        usage = None if status == "in_progress" else self._usage or items.usage(None)
        return items.response(self._id, self._model, self._created, self._output, status=status, usage=usage)

    def _message(self) -> _Item:
        id = f"msg_{self._id}_{len(self._output)}"
        return _Item("message", id, partial(items.message, id))

    def _reasoning(self) -> _Item:
        id = f"rs_{self._id}_{len(self._output)}"
        return _Item("reasoning", id, partial(items.reasoning, id))

    def _text(self, out: list[bytes], kind: str, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(out)
            self._begin(out, self._message() if kind == "message" else self._reasoning())
        name = "output_text" if kind == "message" else "reasoning_text"
        self._grow(out, f"response.{name}.delta", text)

    def _call(self, out: list[bytes], call: Json) -> None:
        function = inner(call, "function")
        if self._open is None or self._open.kind != "function_call" or self._open.call != call.get("index"):
            self._close(out)
            id, name = text_in(call, "id"), text_in(function, "name")
            made = partial(items.function_call, id, name)
            self._begin(out, _Item("function_call", f"fc_{id}", made, call.get("index")))
        if arguments := text_in(function, "arguments"):
            self._grow(out, "response.function_call_arguments.delta", arguments)

    def _begin(self, out: list[bytes], item: _Item) -> None:
        self._open = item
        place = len(self._output)
        out.append(self._event("response.output_item.added", output_index=place, item=item.shown("in_progress")))
        if item.kind == "message":
            part = items.text_part("")
            out.append(self._event("response.content_part.added", **self._at(item), content_index=0, part=part))

    def _grow(self, out: list[bytes], kind: str, delta: str) -> None:
        item = self._open
        if item is None:
            return
        self._held += item.grows(delta)
        more: Json = {} if item.kind == "function_call" else {"content_index": 0}
        if item.kind == "message":
            more["logprobs"] = []
        out.append(self._event(kind, **self._at(item), **more, delta=delta))

    def _close(self, out: list[bytes], status: str = "completed") -> None:
        """`status`: of the item; the last one is `incomplete` where the response is."""
        item = self._open
        if item is None:
            return
        at, text = self._at(item), item.text
        done = item.shown(status)
        match item.kind:
            case "message":
                out.append(self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=[]))
                part = items.text_part(text)
                out.append(self._event("response.content_part.done", **at, content_index=0, part=part))
            case "reasoning":
                out.append(self._event("response.reasoning_text.done", **at, content_index=0, text=text))
            case _:
                name = done["name"]
                out.append(self._event("response.function_call_arguments.done", **at, name=name, arguments=text))
        out.append(self._event("response.output_item.done", output_index=len(self._output), item=done))
        self._output.append(done)
        self._open = None

    def _at(self, item: _Item) -> Json:
        return {"item_id": item.id, "output_index": len(self._output)}

    def _event(self, kind: str, **members: Any) -> bytes:
        self._number += 1
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **members})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
