"""From what a gateway sent to what the tables keep.

A request has steps: open, its checkpoints, closed by the ledger because its gateway is dead, final. Each step says all
that is known by then, so a higher one replaces a lower, and rows may come in any order and as often as they like.
"""

import hashlib
from datetime import datetime
from math import isfinite
from typing import Final, Literal, NamedTuple

import orjson
from pydantic import ValidationError

from shoal.metering.record import EVENT_TYPE, StoredRow, UsageRecord, stored

CLOSED: Final = 1_000_000_000
"""The ledger closed it; checkpoints number below, one a second."""
FINAL: Final = 2_000_000_000

_MOST_TOKENS: Final = 10**12
"""Of one request. What is larger is a mistake that would spoil the sums of its hour."""
_MOST_TEXT: Final = 4_096
_FIRST_MS: Final = 0
_LAST_MS: Final = 32_503_680_000_000
"""The year 3000."""


class Good(NamedTuple):
    """A record that counts."""

    id: str
    kind: Literal["open", "checkpoint", "final", "attempt"]
    row: StoredRow
    body: bytes
    sender: str | None = None
    """The pod that sent it; None where that was not asked."""


class Bad(NamedTuple):
    """A record that does not."""

    reason: str
    body: bytes
    digest: str


Incoming = Good | Bad


def parse(element: object, now_ms: int) -> Incoming:
    """One element of a batch, as orjson read it."""
    try:
        body = orjson.dumps(element)
    except TypeError:  # it reads what it does not write: objects within objects, hundreds deep
        return bad("it is nested too deeply", b"null")
    try:
        record = UsageRecord.model_validate_json(body)  # half the time of the element itself
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'record'}: {fault['msg']}" for fault in error.errors())
        return bad("; ".join(faults), body)
    if (fault := _fault(record, body)) is not None:
        return bad(fault, body)
    step, attempt = _step(record)
    row = stored(
        record,
        attempt=attempt,
        step=step,
        ended=step == FINAL,
        received_at=now_ms,
        # Gateways of before said no time of admission; an open row's own time is the same.
        admitted_at=milliseconds(record.data.admitted_at or record.time),
    )
    return Good(record.id, record.data.kind, row, body)


def bad(reason: str, body: bytes) -> Bad:
    """A record to keep aside."""
    return Bad(reason[:2_000].replace("\0", ""), body, hashlib.sha256(body).hexdigest())


def milliseconds(time: datetime) -> int:
    """Since 1970 in UTC, whole."""
    return round(time.timestamp() * 1000)


def _fault(record: UsageRecord, body: bytes) -> str | None:
    """What is wrong beyond the types: values that a table cannot hold or that would spoil a sum."""
    data = record.data
    if record.type != EVENT_TYPE:
        return f"type: {record.type[:100]} is not {EVENT_TYPE}"
    for name, count in (
        ("inputTokens", data.input_tokens),
        ("cachedTokens", data.cached_tokens),
        ("outputTokens", data.output_tokens),
        ("reasoningTokens", data.reasoning_tokens),
    ):
        if count is not None and not 0 <= count <= _MOST_TOKENS:
            return f"data.{name}: {count} is not between 0 and {_MOST_TOKENS}"
    if data.kind == "final" and data.outcome is None:
        return "data.outcome: a final record says how the request ended"
    if data.kind == "attempt" and not 1 <= (data.attempt or 0) <= 1_000:
        return "data.attempt: an attempt record says which try it was, from 1"
    if not 0 <= (data.status or 0) <= 999 or not 0 <= data.attempts <= 1_000_000:
        return "data.status, data.attempts: not a status of HTTP, or not a number of attempts"
    for taken in (data.ttft_ms, data.hold_ms, data.duration_ms):
        if taken is not None and not isfinite(taken):
            return "data.ttftMs, data.holdMs, data.durationMs: not a number of milliseconds"
    for time in (record.time, data.admitted_at):
        if time is not None and (time.tzinfo is None or not _FIRST_MS <= milliseconds(time) < _LAST_MS):
            return f"time, data.admittedAt: {time.isoformat()} has no time zone or is out of range"
    # A text cannot be longer than all of it. (PostgreSQL takes no character 0.)
    if (len(body) > _MOST_TEXT or b"\\u0000" in body) and any(
        len(text) > _MOST_TEXT or "\0" in text
        for text in (record.id, record.source, *(value for _, value in data if isinstance(value, str)))
    ):
        return f"a text is longer than {_MOST_TEXT} characters or contains the character 0"
    if not (record.id and record.source and data.request_id and data.tenant):
        return "id, source, data.requestId, data.tenant: must not be empty"
    return None


def _step(record: UsageRecord) -> tuple[int, int]:
    data = record.data
    match data.kind:
        case "open":
            return 0, 0
        case "checkpoint":
            number = record.id.rpartition(":")[2]
            return (min(int(number), CLOSED - 1) if number.isascii() and number.isdigit() else 1), 0
        case "final":
            return FINAL, 0
        case "attempt":
            return FINAL, data.attempt or 1
