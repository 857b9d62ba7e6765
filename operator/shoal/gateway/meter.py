"""The meter of one request: collects what its usage record says, and writes the record's rows.

Rows are built as plain dicts, because two are made per request; `shoal.api.usage` is what they must validate as (a test
says so). Prompt, answer and key never come here.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

import orjson

from shoal.api.usage import EVENT_TYPE, CountSource, Outcome, RecordKind
from shoal.core.access import Identity
from shoal.core.quota.abandoned import is_exact
from shoal.core.resolve import ServedAdapter, ServedModel
from shoal.core.routing import Replica
from shoal.ledger.spoolfile import Row

KEEP_ALIVE_SECONDS: Final = 300.0
"""A request that goes on for so long without news says so: the ledger closes what is not heard of any more."""


class Meter:
    """One accepted request."""

    __slots__ = (
        "_admitted",
        "_base",
        "_checkpoints",
        "_choices",
        "_estimate",
        "_per_prompt",
        "_sent_at",
        "_source",
        "_spoke_at",
        "_started",
        "_tokens",
        "_usage",
        "_written",
        "attempts",
        "count_source",
        "engine_boot",
        "first_byte",
        "held_seconds",
        "id",
        "model",
        "outcome",
        "replica",
        "slot",
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
        self._choices: dict[int, bytes] | None = None
        self._per_prompt = 1
        self._tokens: dict[str, int | None] | None = None
        self._estimate = 0
        self._checkpoints = 0
        self._written: object = "none"
        self._spoke_at = self._sent_at = self._started
        self.slot = 0
        """Its place among the checkpoints."""
        self._admitted = admitted = datetime.now(UTC)
        self._base: dict[str, Any] = {
            "requestId": id,
            "tenant": identity.tenant,
            "keyName": identity.key_name,
            "gateway": gateway,
            "admittedAt": admitted,
            "endpoint": endpoint,
            "model": model.key,
            "modelRequested": word,
            "stream": stream,
        }
        # What is unknown is left out: the row is smaller, and absent reads as None.
        if client_request_id is not None:
            self._base["clientRequestId"] = client_request_id
        if identity.external_id is not None:
            self._base["externalId"] = identity.external_id
        if identity.plan is not None:
            self._base["plan"] = identity.plan
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
    def said(self) -> Mapping[str, Any]:
        """Who asks what, in the record's words."""
        return self._base

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def seconds_to_first_byte(self) -> float | None:
        return None if self.first_byte is None else self.first_byte - self._started

    @property
    def seconds_at_replica(self) -> float:
        """Since the last replica got it."""
        return time.monotonic() - self._sent_at

    def use(self, adapter: ServedAdapter) -> None:
        """The revision of an adapter that is asked for the answer."""
        self._base["adapter"] = adapter.key
        self._base["adapterRevision"] = adapter.revision

    def sent(self, body_bytes: int) -> None:
        """A replica gets a request of this size: until it says more, what it computes is estimated from that."""
        self._estimate = max(1, body_bytes // 4)
        self._sent_at = time.monotonic()
        self._tokens = None
        self.count_source = "estimated"

    def not_taken(self) -> None:
        """It computed nothing: it was not reached, or refused."""
        if self.count_source == "estimated":
            self.count_source = "none"
            self._tokens = None

    def count(self, usage: bytes, source: CountSource) -> None:
        """Keeps the engine's usage block (its JSON), to be parsed once at the end."""
        self._usage = usage
        self._tokens = None
        self.count_source = source

    def count_cancelled(self, usage: bytes) -> None:
        """The same of an answer that its engine ended because the client left, where that says what it computed."""
        if is_exact(parse_usage(usage)["inputTokens"]):
            self.count(usage, "final")

    def count_choice(self, usage: bytes, choice: int, per_prompt: int) -> None:
        """The same while one of several answers streams: engines count each for itself until the closing block.
        `per_prompt`: answers to each prompt, which have its tokens in common."""
        if self._choices is None:
            self._choices = {}
        self._choices[choice] = usage
        self._per_prompt = max(1, per_prompt)
        self.count(usage, "continuous")

    def forget_counts(self) -> None:
        """Another replica begins anew."""
        self._usage = self._choices = self._tokens = None
        self.count_source = "none"
        self.replica = self.engine_boot = None

    def answer_began(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic()

    def tokens(self) -> dict[str, int | None]:
        """The counts so far. What the engine did not say is None."""
        if self._tokens is None:
            if self.count_source == "none":
                return _NO_COUNTS
            if self._usage is None:
                self._tokens = {**_NO_COUNTS, "inputTokens": self._estimate}
            elif self._choices is not None and self.count_source == "continuous":
                self._tokens = sum_choices(self._choices, self._per_prompt)
            else:
                self._tokens = parse_usage(self._usage)
        return self._tokens

    def open_row(self) -> Row:
        return self._row("open", f"{self.id}:open", _NO_COUNTS)

    def checkpoint_row(self) -> Row:
        self._checkpoints += 1
        return self._row("checkpoint", f"{self.id}:checkpoint:{self._checkpoints}", self.tokens())

    def news(self, now: float) -> Row | None:
        """A checkpoint, where there is something to say at `now` (time.monotonic) that no row says yet."""
        state = self.count_source if self._usage is None else self._usage
        if state == self._written and now - self._spoke_at < KEEP_ALIVE_SECONDS:
            return None
        self._written, self._spoke_at = state, now
        return self.checkpoint_row()

    def attempt_row(self) -> Row:
        """Of a try whose answer nobody got, before `forget_counts`."""
        return self._row("attempt", f"{self.id}:attempt:{self.attempts}", self.tokens())

    def final_row(self) -> Row:
        return self._row("final", f"{self.id}:final", self.tokens())

    def _row(self, kind: RecordKind, id: str, counts: dict[str, int | None]) -> Row:
        data: dict[str, Any] = {**self._base, "kind": kind, "countSource": self.count_source}
        if kind == "attempt":
            data["attempt"] = self.attempts
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
            "time": self._admitted if kind == "open" else datetime.now(UTC),
            "data": data,
        }
        return (id, self.id, kind, orjson.dumps(record))


_NO_COUNTS: Final[dict[str, int | None]] = {
    "inputTokens": None,
    "cachedTokens": None,
    "outputTokens": None,
    "reasoningTokens": None,
}


def parse_usage(usage: bytes) -> dict[str, int | None]:
    """Counts of an engine's usage block; what it does not say is unknown. SGLang says how much was cached in the
    closing block, and for chat also while it streams."""
    try:
        decoded: object = orjson.loads(usage)
    except orjson.JSONDecodeError:
        return _NO_COUNTS
    if not isinstance(decoded, dict):
        return _NO_COUNTS
    block = cast(dict[str, object], decoded)
    whole = _number(block, "prompt_tokens")
    cached = _inner(block, "prompt_tokens_details", "cached_tokens")
    reasoning = _number(block, "reasoning_tokens")
    if cached is not None and whole is not None and cached > whole:
        cached = whole  # they are part of the input: whatever an engine says, they are never more
    return {
        "inputTokens": whole,
        "cachedTokens": cached,
        "outputTokens": _number(block, "completion_tokens"),
        "reasoningTokens": reasoning
        if reasoning is not None
        else _inner(block, "completion_tokens_details", "reasoning_tokens"),
    }


def sum_choices(choices: Mapping[int, bytes], per_prompt: int) -> dict[str, int | None]:
    """Counts of answers that stream at a time, by their index: each prompt counts once, each answer's own tokens."""
    total: dict[str, int | None] = {"inputTokens": 0, "cachedTokens": 0, "outputTokens": 0, "reasoningTokens": 0}
    prompts: set[int] = set()
    for index, usage in sorted(choices.items()):
        counts = parse_usage(usage)
        names = ["outputTokens", "reasoningTokens"]
        if (prompt := index // per_prompt) not in prompts:
            prompts.add(prompt)
            names += ["inputTokens", "cachedTokens"]
        for name in names:
            so_far, more = total[name], counts[name]
            total[name] = None if so_far is None or more is None else so_far + more
    return total


def _number(block: dict[str, object], name: str) -> int | None:
    value = block.get(name)
    return value if type(value) is int and value >= 0 else None  # the exact type: True is no number


def _inner(block: dict[str, object], name: str, field: str) -> int | None:
    inner = block.get(name)
    return _number(cast(dict[str, object], inner), field) if isinstance(inner, dict) else None
