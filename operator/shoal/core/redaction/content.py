"""The logged content of a request and its answer: known fields only, each text redacted, bounded in size.

Encodings of a text are left out, because no rule would find a match in them: token ids, log probabilities, embeddings.
Images, audio and files are replaced by a note of their size.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from shoal.core.redaction.rules import Rules

TEXTS: Final = (
    "messages",
    "prompt",
    "input",
    "query",
    "documents",
    "items",
    "tokens",
    "suffix",
    "tools",
    "tool_choice",
    "response_format",
    "stop",
    "json_schema",
    "regex",
    "ebnf",
    "stop_regex",
    "chat_template_kwargs",
    # Of APIs that are not translated.
    "system",
    "instructions",
    "stop_sequences",
)
PARAMETERS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
    "reasoning_effort",
    "encoding_format",
    "dimensions",
    "top_n",
    "return_documents",
    "apply_softmax",
    "item_first",
    "return_token_logprobs",
    "add_special_tokens",
    "add_generation_prompt",
    "skip_special_tokens",
    "ignore_eos",
    "language",
    "timestamp_granularities[]",
    "file",
)
_ENCODED: Final = ("prompt", "input", "query", "items", "tokens")
"""Texts that may be given as token ids."""
LOGGED: Final = frozenset((*TEXTS, *PARAMETERS))
"""Logged fields of a request."""
_API_KEYS: Final = frozenset(
    (
        *LOGGED,
        *(
            "role",
            "content",
            "type",
            "text",
            "name",
            "id",
            "index",
            "function",
            "arguments",
            "tool_calls",
            "parameters",
        ),
        *("tool_call_id", "description", "properties", "required", "strict", "schema", "image_url", "url", "detail"),
        *("input_audio", "audio", "data", "format", "file", "file_data", "filename", "video_url", "refusal", "items"),
        *("reasoning_content", "finish_reason", "choices", "enum", "additionalProperties", "cut", "json_schema"),
    )
)
"""Keys of OpenAI's API, kept so that an entry can be read. All other keys are redacted like texts."""
_API_VALUES: Final[dict[str, frozenset[str]]] = {
    "role": frozenset(("system", "developer", "user", "assistant", "tool", "function")),
    "type": frozenset(("text", "function", "image_url", "input_audio", "file", "object", "string", "json_schema")),
    "finish_reason": frozenset(("stop", "length", "tool_calls", "content_filter")),
}
"""Values that the API defines: common in messages, with nothing to redact."""
_DATA_URL: Final = re.compile(r"data:([A-Za-z0-9.+-]{1,64}/[A-Za-z0-9.+-]{1,64})?((?:;[A-Za-z0-9=._-]{1,64}){0,4}),")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_=\s-]*")
_PERCENT: Final = re.compile(r"[^\s\"'<>)\]]*")
_BINARY_KEYS: Final = ("data", "file_data", "b64_json", "video", "audio", "image")
_BINARY_FROM: Final = 256
"""Characters of base64 under such a key from which on the value is a file, not a word."""
CUT: Final = "\x00cut"
"""The only key of an object that stands for a text that was cut off before it came here."""
MOST_DEPTH: Final = 64
MOST_NODES: Final = 20_000
TAIL: Final = 1024
"""Characters that are dropped with the part that was cut off: a match across the cut would not be found."""


class Content:
    """Redacts one entry. `most_bytes`: bound of the output, over all calls; `cut`: something was left out because of
    it; `counts`: matches of each rule."""

    def __init__(self, rules: Rules, most_bytes: int) -> None:
        self._rules = rules
        self._left = most_bytes
        self._nodes = MOST_NODES
        self.cut = False
        self.counts: Counter[str] = Counter()

    def request(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The logged part of a request's body."""
        out: dict[str, Any] = {}
        for name in (*PARAMETERS, *TEXTS):
            if (value := fields.get(name)) is not None:
                tokens = _token_ids(value) if name in _ENCODED else None
                out[name] = f"[{tokens} token ids]" if tokens else self.value(value)
        return out

    def answer(self, choices: Sequence[Mapping[str, Any]], *, whole: bool = True) -> list[Any]:
        """An answer's choices, in the form of `capture.py`, redacted. `whole` False: the texts are cut off."""
        return [self.value(choice, whole=whole) for choice in choices]

    def value(self, value: Any, *, whole: bool = True, depth: int = 0, key: str = "") -> Any:
        """A JSON value with every text, key and number redacted."""
        self._nodes -= 1
        if self._nodes < 0 or self._left <= 0 or depth > MOST_DEPTH:
            self.cut = True
            return "[cut]"
        match value:
            case str():
                if key in _API_VALUES and value in _API_VALUES[key]:
                    self._left -= len(value)
                    return value
                return self.text(value, whole=whole, key=key, depth=depth)
            case None | bool():
                self._left -= 4
                return value
            case int() | float():
                written = str(value)
                self._left -= len(written)
                redacted = self._rules.text(written, self.counts)
                return value if redacted == written else redacted
            case dict():
                found = cast(dict[str, Any], value)
                if len(found) == 1 and isinstance(text := found.get(CUT), str):
                    self.cut = True
                    return self.text(text, whole=False, key=key)
                return self._object(found, whole, depth)
            case list() | tuple():
                out: list[Any] = []
                for item in cast(Sequence[Any], value):
                    out.append(self.value(item, whole=whole, depth=depth + 1, key=key))
                    if self._nodes < 0 or self._left <= 0:
                        break
                return out
            case _:
                return "[cut]"

    def _object(self, value: dict[str, Any], whole: bool, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, item in value.items():
            name = key if key in _API_KEYS else self.text(key)
            while name in out:
                name += "'"  # two keys became the same by redaction
            out[name] = self.value(item, whole=whole, depth=depth + 1, key=key)
            if self._nodes < 0 or self._left <= 0:
                break
        return out

    def text(self, text: str, *, whole: bool = True, key: str = "", depth: int = 0) -> str:
        """A text, redacted. JSON inside it (a tool call's arguments) is also redacted in decoded form, since an escaped
        character hides a match. `whole` False: the text is cut off, and its end is dropped."""
        if key in _BINARY_KEYS and len(text) >= _BINARY_FROM and _BASE64.fullmatch(text, 0, 4096):
            text = _size_note("", len(text) * 3 // 4)
        elif "data:" in text:
            text = _without_data(text)
        complete = whole
        if len(text) > self._left + TAIL:
            text, complete = text[: self._left + TAIL], False
            self.cut = True
        inner = self._inside(text, depth) if complete else None
        redacted = inner if inner is not None else self._redacted(text, complete)
        self._left -= len(redacted)
        return redacted

    def _redacted(self, text: str, whole: bool) -> str:
        if whole:
            return self._rules.text(text, self.counts)
        if len(text) <= TAIL:
            return "[cut]"
        return self._rules.text(text, self.counts, leave=TAIL) + "[cut]"

    def _inside(self, text: str, depth: int) -> str | None:
        """The text with its JSON redacted; None: it is no JSON, or nothing was found in it."""
        if "\\" not in text or depth >= MOST_DEPTH or not text.lstrip().startswith(("{", "[", '"')):
            return None
        try:
            decoded: object = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        before = self._left
        redacted = self.value(decoded, depth=depth + 8)
        self._left = before
        if redacted == decoded:
            return None
        return self._rules.text(orjson.dumps(redacted).decode(), self.counts)


def _token_ids(value: object) -> int:
    """Number of token ids in a prompt; 0: it is text."""
    if not isinstance(value, list):
        return 0
    items = cast(list[object], value)
    if items and all(type(item) is int for item in items):
        return len(items)
    if items and all(isinstance(item, list) for item in items):
        return sum(_token_ids(item) for item in items)
    return 0


def _without_data(text: str) -> str:
    """The text without the content of data: URLs."""
    out: list[str] = []
    at = 0
    for match in _DATA_URL.finditer(text):
        if match.start() < at:
            continue
        encoded = ";base64" in (match[2] or "").lower()
        body = (_BASE64 if encoded else _PERCENT).match(text, match.end())
        end = body.end() if body is not None else match.end()
        size = end - match.end()
        if not encoded and not match[1] and not match[2]:
            continue  # "the data:, as I said"
        out += (text[at : match.start()], _size_note(match[1] or "", size * 3 // 4 if encoded else size))
        at = end
    return "".join(out) + text[at:]


def _size_note(kind: str, size: int) -> str:
    return f"[{kind or 'file'}, {size} bytes, not logged]"
