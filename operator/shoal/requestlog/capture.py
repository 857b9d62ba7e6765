"""Captures running requests of tenants with a request log, with bounds per request and in total.

Nothing is redacted here, because this runs in the event loop. The captured content leaves the process only through
`entry.py`.
"""

from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.api.tenant import TenantLogging
from shoal.core.redaction.content import CUT, LOGGED, TAIL

OVERHEAD: Final = 1024
"""Bytes that an entry counts for in addition to its content."""
_MOST_PARTS: Final = 128
"""Most choices of an answer, and most tool calls of a choice."""
_MOST_WALKED: Final = 5_000
_WHOLE_ANSWERS: Final = 4
"""A non-streaming answer is kept if it is at most this many times larger than what is logged of it: its JSON contains
more."""
_LONGEST_USER: Final = 512
_TEXTS: Final = ("content", "reasoning_content", "refusal", "text")


class CaptureBudget:
    """Bytes that all captures and waiting entries may use. The event loop takes and the writer thread gives back: each
    has its own counter, so that neither needs a lock."""

    __slots__ = ("_given", "_most", "_taken")

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._given = 0

    @property
    def held(self) -> int:
        return self._taken - self._given

    def take(self, size: int) -> bool:
        """Takes bytes; False: they do not fit. Call it in the event loop only."""
        if self.held + size > self._most:
            return False
        self._taken += size
        return True

    def leave(self, size: int) -> None:
        """Gives back bytes that are not used. Call it in the event loop only."""
        self._taken -= size

    def give(self, size: int) -> None:
        """Gives back the bytes of a written or dropped entry. Call it in the writer thread only."""
        self._given += size


class _Choice:
    """One choice of a stream, as far as it has arrived."""

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


class Captured(NamedTuple):
    """The captured content, for the writer."""

    request: bytes | None
    """The logged fields of the body as JSON."""
    answer: bytes | None
    """The JSON of an answer that was no stream."""
    choices: list[dict[str, Any]]
    """The choices of a stream, or empty."""
    left_out: tuple[str, ...]
    """Which of `request` and `answer` did not fit into the memory budget."""
    answer_cut: bool


class Capture:
    """The capture of one request. `RequestLogger.begin` creates it; `RequestLogger.end` takes it."""

    __slots__ = (
        "_answer",
        "_budget",
        "_choices",
        "_left_out",
        "_most",
        "_request",
        "answer_cut",
        "error",
        "full",
        "key_hash",
        "logging",
        "size",
        "user",
    )

    def __init__(self, budget: CaptureBudget, logging: TenantLogging, key_hash: str, most: int) -> None:
        """The caller has already taken its overhead from `budget`."""
        self._budget = budget
        self._most = most
        self.logging = logging
        self.full = logging.mode == "Full"
        self.key_hash = key_hash
        self.size = OVERHEAD
        self.user: str | None = None
        self.error: str | None = None
        """Code of the error that the client got."""
        self.answer_cut = False
        self._request: bytes | None = None
        self._answer: bytes | None = None
        self._choices: dict[int, _Choice] = {}
        self._left_out: list[str] = []

    def requested(self, raw: bytes | None, fields: dict[str, Any]) -> None:
        """Captures the request's body, given raw and decoded. `raw` is None if media were fetched for the request: the
        raw body has their URLs, which may contain signatures. `fields` then has the media, of which only type and size
        are kept."""
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
        """Captures a whole answer."""
        if not self.full:
            return
        if len(body) <= self._most * _WHOLE_ANSWERS and self._take(len(body)):
            self._answer = body
        else:
            self._left_out.append("answer")

    def event(self, event: bytes) -> None:
        """Captures one event of a stream. Its texts are joined; the rest is not kept."""
        if not self.full or self.answer_cut or not event.startswith(b"data:"):
            return
        try:
            chunk: Any = orjson.loads(event[5:])
            for choice in chunk.get("choices") or ():
                self._fold(choice)
        except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
            return  # it is not a chunk; the client gets it all the same

    def wrote(self, text: str, finish: str | None) -> None:
        """Captures a part of a stream whose events are no chunks of a chat. `finish`: why it ended, if it has."""
        if self.full and not self.answer_cut:
            self._fold({"delta": {"content": text}, "finish_reason": finish})

    def take(self) -> Captured:
        choices = [choice.logged(index) for index, choice in sorted(self._choices.items())]
        return Captured(self._request, self._answer, choices, tuple(self._left_out), self.answer_cut)

    def _fold(self, choice_delta: dict[str, Any]) -> None:
        index = int(choice_delta.get("index") or 0)
        choice = self._choices.get(index)
        if choice is None:
            if len(self._choices) >= _MOST_PARTS or not self._take(OVERHEAD):
                self.answer_cut = True
                return
            choice = self._choices[index] = _Choice()
        delta: dict[str, Any] = choice_delta.get("delta") or choice_delta
        for name in _TEXTS:
            text = delta.get(name)
            if text and isinstance(text, str) and self._take_text(text):
                choice.texts.setdefault(name, []).append(text)
        for call in delta.get("tool_calls") or ():
            self._fold_call(choice, call)
        finish = choice_delta.get("finish_reason")
        if isinstance(finish, str):
            choice.finish = finish[:64]

    def _fold_call(self, choice: _Choice, call_delta: dict[str, Any]) -> None:
        index = int(call_delta.get("index") or 0)
        call = choice.calls.get(index)
        if call is None:
            if len(choice.calls) >= _MOST_PARTS or not self._take(OVERHEAD):
                self.answer_cut = True
                return
            call = choice.calls[index] = {"id": None, "name": None, "arguments": []}
        if isinstance(call_delta.get("id"), str):
            call["id"] = call_delta["id"][:256]
        function: dict[str, Any] = call_delta.get("function") or {}
        if isinstance(function.get("name"), str):
            call["name"] = function["name"][:256]
        arguments = function.get("arguments")
        if arguments and isinstance(arguments, str) and self._take_text(arguments):
            cast(list[str], call["arguments"]).append(arguments)

    def _take_text(self, text: str) -> bool:
        # A short text in a list takes more memory than its characters.
        if self.size < 3 * self._most and self._take(len(text) + 64):
            return True
        self.answer_cut = True
        return False

    def _take(self, size: int) -> bool:
        if not self._budget.take(size):
            return False
        self.size += size
        return True


def _clipped(fields: dict[str, Any], most: int) -> dict[str, Any]:
    """The loggable part of a large body, in about `most` bytes: files are dropped, long texts are cut."""
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
                    return items[:2]  # token ids: `content.py` logs only that there are any
                return [self.value(item, depth + 1) for item in items if self._goes_on()]
            case _:
                self._left -= 8
                return value

    def _goes_on(self) -> bool:
        return self._left > 0 and self._walked > 0

    def _text(self, text: str) -> Any:
        if len(text) > TAIL and text.startswith("data:"):
            # `content.py` recognises the type by the first characters, but not the size, so the size is added.
            kind = text[: text.find(",", 0, 256)].removeprefix("data:")
            self._left -= 64
            return f"[{kind.partition(';')[0] or 'file'}, {len(text) * 3 // 4} bytes, not logged]"
        if len(text) <= max(self._left, 0):
            self._left -= len(text)
            return text
        cut = text[: max(self._left, 0) + TAIL]
        self._left -= len(cut)
        return {CUT: cut}
