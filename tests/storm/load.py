"""The clients of a storm, as a process of its own inside the lab's network: `python -m tests.storm.load CONFIG`.

Open loop: a request is sent at its time, whatever became of those before it. One journal line when it is sent, one at
the first byte of the answer, one at the end; the file is appended to and never rewritten.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import uvloop
from pydantic import BaseModel, ConfigDict

from tests.storm.journals import WRONG
from tests.storm.plan import Answers, Ask, Target, asks
from tests.storm.sdk import Sdk
from tests.storm.wire import Clients, End, exchange

_TRIES: Final = 3
"""As the SDK's max_retries=2: a connection that broke before the answer is tried again, under a new id."""
_BACKOFF_SECONDS: Final = 0.5
_SAY_SECONDS: Final = 10.0


class LoadConfig(BaseModel):
    """What the storm hands over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    port: int
    others: tuple[tuple[str, int], ...] = ()
    """Further gateways, where no Service spreads the connections."""
    key: str
    model_path: Path
    journal: Path
    seed: int
    requests: int
    rate: float
    sdk_rate: float
    long: float
    attacks: bool = True
    """Not where gateways answer that are of a version without the check of fields. Such a version may lack the other
    APIs too."""
    targets: tuple[Target, ...]
    adapters: dict[str, tuple[Path, ...]] = {}
    """By name, where the files of the revisions are whose words may answer."""
    mixed: dict[str, tuple[str, ...]] = {}
    """Routes that the base and these adapters may answer."""
    words: bool = True
    """Whether the engines say what the simulator says."""


@dataclass(slots=True)
class Journal:
    """Append-only."""

    file: int
    outcomes: Counter[str]
    open: int = 0

    @classmethod
    def at(cls, path: Path) -> "Journal":
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), Counter())

    def line(self, event: str, attempt: str, **fields: Any) -> None:
        os.write(self.file, orjson.dumps({"event": event, "attempt": attempt, "at": time.time(), **fields}) + b"\n")

    def sent(self, ask: Ask, attempt: str, **fields: Any) -> None:
        self.open += 1
        self.line("send", attempt, ask=ask.id, model=ask.model, kind=ask.kind, tokens=ask.max_tokens, **fields)

    def first(self, attempt: str, end: End) -> None:
        self.line("first", attempt, gateway_id=end.gateway_id)

    def ended(self, ask: Ask, attempt: str, end: End, answers: Answers | None) -> None:
        if answers is not None:
            check(end, ask, answers)
        self.open -= 1
        self.outcomes[end.outcome] += 1
        self.line(
            "end",
            attempt,
            outcome=end.outcome,
            why=end.why,
            status=end.status,
            head=end.head,
            first=end.first,
            gateway_id=end.gateway_id,
            comments=end.comments,
            usage=end.usage,
            weights=end.weights,
        )


def check(end: End, ask: Ask, answers: Answers) -> None:
    """An answer with other words than its own is none; a part of an answer must be the beginning of its own."""
    if ask.kind in ("wrong", "attack") or end.outcome in ("refused", "lost"):
        return
    expected = answers.by_weights(ask)
    whole = end.outcome == "answered"
    right = {name for name, text in expected if (end.text == text if whole else text.startswith(end.text))}
    end.weights = tuple(sorted(right)) if whole else ()
    if not right:
        end.why = f"{WRONG} after `{end.outcome}`: {end.text[:80]!r} where {expected[0][1][:80]!r} was to come"
        end.outcome = "lost"


class Load:
    """All clients."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._clients = Clients(config.host, config.port, config.key, config.others)
        self._answers = Answers(config.model_path, config.adapters, config.mixed) if config.words else None
        self._journal = Journal.at(config.journal)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Sends nothing more; what was sent is waited for."""
        self._stop.set()

    async def run(self) -> None:
        config = self._config
        sdk = Sdk(f"http://{config.host}:{config.port}/v1", config.key)
        saying = asyncio.create_task(self._say())
        try:
            async with asyncio.TaskGroup() as group:
                rates = ((config.rate, self._one), (config.sdk_rate, sdk.one if config.sdk_rate else None))
                total = config.rate + config.sdk_rate
                for number, (rate, one) in enumerate(rates):
                    if one is None:
                        continue
                    count = round(config.requests * rate / total)
                    planned = asks(
                        config.seed,
                        count,
                        rate,
                        config.targets,
                        "s" if number == 0 else "sdk",
                        long=config.long,
                        attacks=config.attacks,
                        translated=config.attacks and number == 0,
                    )
                    group.create_task(self._send(group, planned, one))
        finally:
            saying.cancel()
            self._clients.close()
            await sdk.close()
        self._print()

    async def _send(self, group: asyncio.TaskGroup, planned: Any, one: Any) -> None:
        began = time.monotonic()
        for ask in planned:
            wait = began + ask.at - time.monotonic()
            if wait > 0:
                try:
                    async with asyncio.timeout(wait):
                        await self._stop.wait()
                except TimeoutError:
                    pass
            if self._stop.is_set():
                return
            group.create_task(one(ask, self._journal, self._answers))

    async def _one(self, ask: Ask, journal: Journal, answers: Answers | None) -> None:
        for number in range(_TRIES):
            # A retry goes over a new connection, as with every client that found its old one broken.
            wire = await self._clients.wire(reuse=number == 0)
            attempt = ask.id if number == 0 else f"{ask.id}.{number}"
            journal.sent(ask, attempt, reused=wire.used if wire else None, port=wire.port if wire else None)
            if wire is None:
                journal.ended(ask, attempt, End("lost", "no gateway could be reached"), answers)
                return

            def first(end: End, attempt: str = attempt) -> None:
                journal.first(attempt, end)

            end = await exchange(self._clients, wire, ask, attempt, first)
            journal.ended(ask, attempt, end, answers)
            if end.outcome != "broken" or end.head is not None:
                return
            await asyncio.sleep(_BACKOFF_SECONDS * 2**number)

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(_SAY_SECONDS)
            self._print()

    def _print(self) -> None:
        counts = " ".join(f"{name} {count}" for name, count in sorted(self._journal.outcomes.items()))
        print(f"open {self._journal.open} dials failed {self._clients.dials_failed} {counts}", flush=True)


async def main(config: LoadConfig) -> None:
    load = Load(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.stop)
    await load.run()


if __name__ == "__main__":
    uvloop.run(main(LoadConfig.model_validate_json(Path(sys.argv[1]).read_bytes())))
