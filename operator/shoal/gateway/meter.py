"""The meter of one request: collects what its usage record says, and writes the record's rows.

Rows are built as plain dicts, because two are made per request; `shoal.api.usage` is what they must validate as (a test
says so). Prompt, answer and key never come here.
"""

import time
from datetime import UTC, datetime
from typing import Any, Final, cast

import orjson

from shoal.api.usage import EVENT_TYPE, CountSource, Outcome, RecordKind
from shoal.core.access import Identity
from shoal.core.resolve import ServedAdapter, ServedModel
from shoal.core.routing import Replica
from shoal.ledger.spoolfile import Row

CHECKPOINT_SECONDS: Final = 1.0


class Meter:
    """One accepted request."""

    __slots__ = (
        "_base",
        "_checkpoints",
        "_source",
        "_started",
        "_tokens",
        "_usage",
        "attempts",
        "count_source",
        "engine_boot",
        "first_byte",
        "held_seconds",
        "id",
        "model",
        "outcome",
        "replica",
        "status",
        "tenant",
    )

    def __init__(
        self,
        id: str,
        source: str,
        identity: Identity,
        model: ServedModel,
        *,
        endpoint: str,
        word: str,
        stream: bool,
        client_request_id: str | None = None,
        gateway: str | None = None,
    ) -> None:
        self.id = id
        self.model = model.key
        self.tenant = identity.tenant
        self._source = source
        self._started = time.monotonic()
        self._usage: bytes | None = None
        self._tokens: dict[str, int | None] | None = None
        self._checkpoints = 0
        self._base: dict[str, Any] = {
            "requestId": id,
            "clientRequestId": client_request_id,
            "tenant": identity.tenant,
            "externalId": identity.external_id,
            "keyName": identity.key_name,
            "plan": identity.plan,
            "gateway": gateway,
            "admittedAt": datetime.now(UTC),
            "endpoint": endpoint,
            "model": model.key,
            "modelRequested": word,
            "stream": stream,
        }
        if model.adapter is not None:
            self.use(model.adapter)
        self.outcome: Outcome | None = None
        self.status: int | None = None
        self.attempts = 0
        self.replica: Replica | None = None
        self.engine_boot: str | None = None
        self.first_byte: float | None = None
        self.held_seconds: float | None = None
        self.count_source: CountSource = "none"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def seconds_to_first_byte(self) -> float | None:
        return None if self.first_byte is None else self.first_byte - self._started

    def use(self, adapter: ServedAdapter) -> None:
        """The revision of an adapter that is asked for the answer."""
        self._base["adapter"] = adapter.key
        self._base["adapterRevision"] = adapter.revision

    def count(self, usage: bytes, source: CountSource) -> None:
        """Keeps the engine's usage block (its JSON), to be parsed once at the end."""
        self._usage = usage
        self._tokens = None
        self.count_source = source

    def answer_began(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic()

    def tokens(self) -> dict[str, int | None]:
        """The counts so far. What the engine did not say is None."""
        if self._usage is None:
            return _NO_COUNTS
        if self._tokens is None:
            self._tokens = parse_usage(self._usage, final=self.count_source == "final")
        return self._tokens

    def open_row(self) -> Row:
        return self._row("open", f"{self.id}:open", _NO_COUNTS)

    def checkpoint_row(self) -> Row:
        self._checkpoints += 1
        return self._row("checkpoint", f"{self.id}:checkpoint:{self._checkpoints}", self.tokens())

    def final_row(self) -> Row:
        return self._row("final", f"{self.id}:final", self.tokens())

    def _row(self, kind: RecordKind, id: str, counts: dict[str, int | None]) -> Row:
        # What is unknown is left out: the row is smaller, and absent reads as None.
        data: dict[str, Any] = {**self._base, "kind": kind, "countSource": self.count_source}
        if kind != "open":
            data["attempts"] = self.attempts
            data["durationMs"] = round(self.seconds * 1000, 3)
            data.update((name, value) for name, value in counts.items() if value is not None)
            if self.outcome is not None:
                data["outcome"] = self.outcome
            if self.status is not None:
                data["status"] = self.status
            if (replica := self.replica) is not None:
                data["replica"] = replica.key
                data["node"] = replica.node
                data["gpuClass"] = replica.gpu_class
                data["engineBoot"] = self.engine_boot
            if self.held_seconds is not None:
                data["holdMs"] = round(self.held_seconds * 1000, 3)
            if (first := self.seconds_to_first_byte) is not None:
                data["ttftMs"] = round(first * 1000, 3)
        record = {
            "specversion": "1.0",
            "id": id,
            "source": self._source,
            "type": EVENT_TYPE,
            "subject": self._base["tenant"],
            "time": datetime.now(UTC),
            "data": data,
        }
        return (id, self.id, kind, orjson.dumps(record))


_NO_COUNTS: Final[dict[str, int | None]] = {
    "inputTokens": None,
    "cachedTokens": None,
    "outputTokens": None,
    "reasoningTokens": None,
}


def parse_usage(usage: bytes, *, final: bool) -> dict[str, int | None]:
    """Counts of an engine's usage block. Cached tokens stand in the closing block only: before it they are unknown."""
    try:
        decoded: object = orjson.loads(usage)
    except orjson.JSONDecodeError:
        return dict(_NO_COUNTS)
    if not isinstance(decoded, dict):
        return dict(_NO_COUNTS)
    block = cast(dict[str, object], decoded)
    details = block.get("prompt_tokens_details")
    cached = _number(cast(dict[str, object], details), "cached_tokens") if final and isinstance(details, dict) else None
    return {
        "inputTokens": _number(block, "prompt_tokens"),
        "cachedTokens": cached,
        "outputTokens": _number(block, "completion_tokens"),
        "reasoningTokens": _number(block, "reasoning_tokens"),
    }


def _number(block: dict[str, object], name: str) -> int | None:
    value = block.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
