"""Parses the records that gateways send into rows of the tables.

A request advances in steps: open, checkpoints, closed by the ledger because its gateway is dead, final. Each step
contains everything known by then, so a higher step replaces a lower one, and rows may arrive in any order and any
number of times.
"""

import hashlib
from datetime import datetime
from math import isfinite
from typing import Final, Literal, NamedTuple

import orjson
from pydantic import ValidationError

from shoal.metering.record import EVENT_TYPE, StoredRow, UsageRecord, stored

CLOSED: Final = 1_000_000_000
"""Step of a request closed by the ledger. Checkpoints have lower numbers, one per second."""
FINAL: Final = 2_000_000_000

_MOST_TOKENS: Final = 10**12
"""Tokens of one request at most. A larger value is an error that would corrupt the sums of its hour."""
_MOST_TEXT: Final = 4_096
_FIRST_MS: Final = 0
_LAST_MS: Final = 32_503_680_000_000
"""The year 3000."""


class Good(NamedTuple):
    """A valid record."""

    id: str
    kind: Literal["open", "checkpoint", "final", "attempt"]
    row: StoredRow
    body: bytes
    sender: str | None = None
    """The verified pod that sent it; None: not verified."""


class Bad(NamedTuple):
    """An invalid record."""

    reason: str
    body: bytes
    digest: str


Incoming = Good | Bad


def parse(element: object, now_ms: int) -> Incoming:
    """Parses one element of a batch, as decoded by orjson."""
    try:
        body = orjson.dumps(element)
    except TypeError:  # orjson decodes objects nested hundreds deep, but does not encode them
        return bad("it is nested too deeply", b"null")
    try:
        record = UsageRecord.model_validate_json(body)  # takes half the time of validating the decoded element
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
        # Gateways of older versions send no admission time; the time of an open row is the same.
        admitted_at=milliseconds(record.data.admitted_at or record.time),
    )
    return Good(record.id, record.data.kind, row, body)


def bad(reason: str, body: bytes) -> Bad:
    """An invalid record, to be quarantined."""
    return Bad(reason[:2_000].replace("\0", ""), body, hashlib.sha256(body).hexdigest())


def milliseconds(time: datetime) -> int:
    """Whole milliseconds since 1970 (UTC)."""
    return round(time.timestamp() * 1000)


def _fault(record: UsageRecord, body: bytes) -> str | None:
    """Errors beyond types: values that a table cannot hold or that would corrupt a sum."""
    data = record.data
    if record.type != EVENT_TYPE:
        return f"type: {record.type[:100]} is not {EVENT_TYPE}"
    for name, count in (
        ("inputTokens", data.input_tokens),
        ("cachedTokens", data.cached_tokens),
        ("outputTokens", data.output_tokens),
        ("reasoningTokens", data.reasoning_tokens),
        ("imageTokens", data.image_tokens),
        ("audioTokens", data.audio_tokens),
        ("acceptedTokens", data.accepted_tokens),
        ("documents", data.documents),
        ("images", data.images),
        ("audioMs", data.audio_ms),
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
    # A string cannot be longer than the whole body. (PostgreSQL does not accept the character 0.)
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
