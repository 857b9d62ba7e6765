"""What is kept of one request while it runs, for the tenants that asked for it; bounded, alone and all together.

Nothing is redacted here: this is the event loop's time. Nothing of it leaves the process but through `entry.py`.
"""

from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.api.tenant import TenantLogging
from shoal.core.redaction.content import CUT, LOGGED, TAIL

OVERHEAD: Final = 1024
"""Bytes that an entry counts for beside its content."""
_MOST_PARTS: Final = 128
"""Choices of an answer, and tool calls of a choice."""
_MOST_WALKED: Final = 5_000
_WHOLE_ANSWERS: Final = 4
"""An answer that is no stream may be as many times as large as what is logged of it: its JSON says more."""
_LONGEST_USER: Final = 512
_TEXTS: Final = ("content", "reasoning_content", "refusal", "text")


class Room:
    """Bytes that all captures and waiting entries may take. The event loop takes, the writer gives back: a counter for
    each, so that neither waits for the other."""

    __slots__ = ("_given", "_most", "_taken")

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._given = 0

    @property
    def held(self) -> int:
        return self._taken - self._given

    def take(self, size: int) -> bool:
        """Of the event loop only."""
        if self.held + size > self._most:
            return False
        self._taken += size
        return True

    def leave(self, size: int) -> None:
        """Of the event loop: what it took and does not use."""
        self._taken -= size

    def give(self, size: int) -> None:
        """Of the writer only."""
        self._given += size


class _Choice:
    """One choice of a stream, as far as it came."""

    __slots__ = ("calls", "finish", "texts")

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None

    def logged(self, index: int) -> dict[str, Any]:
        out: dict[str, Any] = {"index": index, **{name: "".join(parts) for name, parts in self.texts.items()}}
        if self.calls:
            out["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for call in self.calls.values()
            ]
        if self.finish is not None:
            out["finish_reason"] = self.finish
        return out


class Taken(NamedTuple):
    """What was kept, for the writer."""

    request: bytes | None
    """The logged fields of the body as JSON."""
    answer: bytes | None
    """The JSON of an answer that was no stream."""
    choices: list[dict[str, Any]]
    """Of a stream, or empty."""
    left_out: tuple[str, ...]
    """Of `request` and `answer`: what did not fit into memory at all."""
    answer_cut: bool


class Capture:
    """Of one request. `begin` made it; `RequestLog.end` takes it."""

    __slots__ = (
        "_answer",
        "_choices",
        "_left_out",
        "_most",
        "_request",
        "_room",
        "answer_cut",
        "error",
        "full",
        "key_hash",
        "logging",
        "size",
        "user",
    )

    def __init__(self, room: Room, logging: TenantLogging, key_hash: str, most: int) -> None:
        """Its overhead was taken from `room` already."""
        self._room = room
        self._most = most
        self.logging = logging
        self.full = logging.mode == "Full"
        self.key_hash = key_hash
        self.size = OVERHEAD
        self.user: str | None = None
        self.error: str | None = None
        """Code of the error that the client was told."""
        self.answer_cut = False
        self._request: bytes | None = None
        self._answer: bytes | None = None
        self._choices: dict[int, _Choice] = {}
        self._left_out: list[str] = []

    def asked(self, raw: bytes | None, fields: dict[str, Any]) -> None:
        """The request's body, as it came and decoded. `raw` None: media were fetched for it, and what came has their
        URLs, which may hold signatures; the fields have the media, of which only type and size are kept."""
        user = fields.get("user")
        if isinstance(user, str):
            self.user = user[:_LONGEST_USER]
        if not self.full:
            return
        kept = raw if raw is not None and len(raw) <= self._most else orjson.dumps(_clipped(fields, self._most))
        if self._take(len(kept)):
            self._request = kept
        else:
            self._left_out.append("request")

    def answered(self, body: bytes) -> None:
        """A whole answer."""
        if not self.full:
            return
        if len(body) <= self._most * _WHOLE_ANSWERS and self._take(len(body)):
            self._answer = body
        else:
            self._left_out.append("answer")

    def event(self, event: bytes) -> None:
        """One event of a stream that goes out. Its texts are put together; the rest of it is not kept."""
        if not self.full or self.answer_cut or not event.startswith(b"data:"):
            return
        try:
            chunk: Any = orjson.loads(event[5:])
            for choice in chunk.get("choices") or ():
                self._fold(choice)
        except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
            return  # what it says is no chunk; the client gets it all the same

    def take(self) -> Taken:
        choices = [choice.logged(index) for index, choice in sorted(self._choices.items())]
        return Taken(self._request, self._answer, choices, tuple(self._left_out), self.answer_cut)

    def _fold(self, said: dict[str, Any]) -> None:
        index = int(said.get("index") or 0)
        choice = self._choices.get(index)
        if choice is None:
            if len(self._choices) >= _MOST_PARTS or not self._take(OVERHEAD):
                self.answer_cut = True
                return
            choice = self._choices[index] = _Choice()
        delta: dict[str, Any] = said.get("delta") or said
        for name in _TEXTS:
            text = delta.get(name)
            if text and isinstance(text, str) and self._room_for(text):
                choice.texts.setdefault(name, []).append(text)
        for call in delta.get("tool_calls") or ():
            self._fold_call(choice, call)
        finish = said.get("finish_reason")
        if isinstance(finish, str):
            choice.finish = finish[:64]

    def _fold_call(self, choice: _Choice, said: dict[str, Any]) -> None:
        index = int(said.get("index") or 0)
        call = choice.calls.get(index)
        if call is None:
            if len(choice.calls) >= _MOST_PARTS or not self._take(OVERHEAD):
                self.answer_cut = True
                return
            call = choice.calls[index] = {"id": None, "name": None, "arguments": []}
        if isinstance(said.get("id"), str):
            call["id"] = said["id"][:256]
        function: dict[str, Any] = said.get("function") or {}
        if isinstance(function.get("name"), str):
            call["name"] = function["name"][:256]
        arguments = function.get("arguments")
        if arguments and isinstance(arguments, str) and self._room_for(arguments):
            cast(list[str], call["arguments"]).append(arguments)

    def _room_for(self, text: str) -> bool:
        # A short text in a list takes more than its letters.
        if self.size < 3 * self._most and self._take(len(text) + 64):
            return True
        self.answer_cut = True
        return False

    def _take(self, size: int) -> bool:
        if not self._room.take(size):
            return False
        self.size += size
        return True


def _clipped(fields: dict[str, Any], most: int) -> dict[str, Any]:
    """Of a large body what may be logged, in about `most` bytes: files go, long texts are cut."""
    clip = _Clip(most)
    return {name: clip.value(value) for name, value in fields.items() if name in LOGGED}


class _Clip:
    def __init__(self, most: int) -> None:
        self._left = most
        self._walked = _MOST_WALKED

    def value(self, value: Any, depth: int = 0) -> Any:
        self._walked -= 1
        if self._walked < 0 or depth > 32:
            return {CUT: ""}
        match value:
            case str():
                return self._text(value)
            case dict():
                self._left -= 16
                found = cast(dict[str, Any], value)
                return {key[:256]: self.value(item, depth + 1) for key, item in found.items() if self._goes_on()}
            case list():
                items = cast(list[Any], value)
                if len(items) > _MOST_WALKED and type(items[0]) is int:
                    return items[:2]  # token ids: `content.py` says only that they are
                return [self.value(item, depth + 1) for item in items if self._goes_on()]
            case _:
                self._left -= 8
                return value

    def _goes_on(self) -> bool:
        return self._left > 0 and self._walked > 0

    def _text(self, text: str) -> Any:
        if len(text) > TAIL and text.startswith("data:"):
            # Its first letters tell `content.py` what it is; how large it is they do not, so that stands behind them.
            kind = text[: text.find(",", 0, 256)].removeprefix("data:")
            self._left -= 64
            return f"[{kind.partition(';')[0] or 'file'}, {len(text) * 3 // 4} bytes, not logged]"
        if len(text) <= max(self._left, 0):
            self._left -= len(text)
            return text
        cut = text[: max(self._left, 0) + TAIL]
        self._left -= len(cut)
        return {CUT: cut}
