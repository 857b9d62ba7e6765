"""A journal of requests: JSON lines, with a hash where the prompt would be.

Each line names its `event`: `asked` when a sequence was taken on, `finished` when it ended, and what became of the
process (`started`, `ready`, `sigterm`, `exiting`). An engine that is killed leaves sequences that were asked and never
finished, which is what tells a killed answer from one that was never begun.
"""

import hashlib
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import orjson

ProcessEvent = Literal["ready", "sigterm", "exiting"]


@dataclass(frozen=True, slots=True)
class JournalStart:
    """One sequence that was taken on. Time in Unix seconds."""

    rid: str
    model: str
    stream: bool
    arrived: float
    adapter: str | None = None
    """Name of the adapter that answers, as the engine knows it; None: the base model."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
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
    adapter: str | None = None
    signature: str | None = None
    """Of the adapter's files as they were loaded."""


class Journal:
    """Appends to a file, or to nothing. Written at once: lines are short, and a crash must not lose them.

    A path that is a folder gets one file per process, named by the host: many engines can share the folder.
    """

    def __init__(self, path: str | None, *, live: bool = False) -> None:
        """`live`: the engine's counters move while a request runs, not at its end."""
        self._engine = socket.gethostname()
        self._boot = f"{time.time_ns():x}"
        self._file = _file_in(Path(path), self._engine, self._boot).open("ab", buffering=0) if path else None
        self._line("started", {"at": time.time(), "live": live})

    def started(self, entry: JournalStart) -> None:
        self._line("asked", asdict(entry))

    def write(self, entry: JournalEntry) -> None:
        self._line("finished", asdict(entry))

    def ended(self, event: ProcessEvent) -> None:
        self._line(event, {"at": time.time()})

    def _line(self, event: str, fields: dict[str, object]) -> None:
        if self._file is not None:
            line = {"event": event, "engine": self._engine, "boot": self._boot, **fields}
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_in(path: Path, engine: str, boot: str) -> Path:
    return path / f"{engine}-{boot}-{os.getpid()}.jsonl" if path.is_dir() else path


def prompt_hash(prompt: tuple[int, ...]) -> str:
    """Names a prompt without telling it."""
    return hashlib.sha256(repr(prompt).encode()).hexdigest()[:16]
