"""A journal of requests: one JSON line each, with a hash where the prompt would be."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import orjson


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished sequence. Times are Unix seconds; None where a request never came that far."""

    rid: str
    path: str
    model: str
    stream: bool
    prompt_sha256: str
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    arrived: float
    first_token: float | None
    finished: float
    outcome: str
    """stop, length, abort, rejected, or the kind of the fault."""


class Journal:
    """Appends to a file, or to nothing. Written at once: lines are short, and a crash must not lose them."""

    def __init__(self, path: str | None) -> None:
        self._file = Path(path).open("ab", buffering=0) if path else None  # noqa: SIM115 - closed by close()

    def write(self, entry: Entry) -> None:
        if self._file is not None:
            self._file.write(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt_hash(prompt: tuple[int, ...]) -> str:
    """Names a prompt without telling it."""
    return hashlib.sha256(repr(prompt).encode()).hexdigest()[:16]
