"""Answer of the gateway's `GET /v1/traffic` on OPS_PORT, read by other gateways and `kubectl shoal advise`: facts of
the last requests of Models, without prompts.

A request is a row of fixed layout (`HEAD`), followed by its marks (`MARK`, `core/advice/marks.py`). Rows are short and
many, so they are not JSON.
"""

import base64
import binascii
import struct
from collections.abc import Iterator
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from shoal.api.replica import Id, Message, Sentence, Tally

MARK: Final = struct.Struct("<8sI")
"""A keyed hash of the prompt up to the mark, and the characters before it; with `AFTER_ANSWER` added, the mark is after
an answer."""
AFTER_ANSWER: Final = 1 << 31
HEAD: Final = struct.Struct("<dIIIIIIQQBBB")
UNKNOWN: Final = (1 << 32) - 1
"""In a number of 32 bits."""
STREAM: Final = 1
ADAPTER_KNOWN: Final = 2
ADAPTER_RESIDENT: Final = 4
MOST_ROWS: Final = 200_000
MOST_TEXT: Final = 96 * 1024 * 1024
"""Characters of one gateway's rows of a Model."""


UnixSeconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""Since 1970."""


class TrafficRow(NamedTuple):
    """One request. Times after `admitted` are milliseconds after it."""

    admitted: float
    """Seconds since 1970."""
    sent: int
    """When the last replica got it."""
    first: int
    """First byte of the answer; UNKNOWN: there was none."""
    ended: int
    prompt: int
    """Tokens, as the engine counted them."""
    cached: int
    answer: int
    replica: int
    """64 bits of the pod and the start of its engine."""
    adapter: int
    """64 bits of the adapter; 0: none."""
    gpu_class: int
    """Index of `ModelTraffic.classes`, from 1; 0: unknown."""
    flags: int
    mark_count: int
    """Number of marks."""


class ModelTraffic(Message):
    """The last requests of one Model at one gateway."""

    model: Id
    """namespace/name."""
    gateway: Id
    since: UnixSeconds
    """From then on all requests are in `rows`."""
    classes: Annotated[tuple[Id, ...], Field(max_length=255)] = ()
    requests: Annotated[Tally, Field(le=MOST_ROWS)]
    rows: Annotated[str, Field(max_length=MOST_TEXT)]
    """Base64."""


class MissingTraffic(Message):
    gateway: Id
    reason: Sentence


class TrafficPage(Message):
    """The whole answer."""

    since: UnixSeconds = 0.0
    """From then on every gateway has kept requests: the last of their starts."""
    models: tuple[ModelTraffic, ...] = ()
    missing: tuple[MissingTraffic, ...] = ()
    """Gateways that did not answer."""


def rows_of(traffic: ModelTraffic) -> Iterator[tuple[TrafficRow, bytes]]:
    """Each row with its marks, oldest first. Raises ValueError for what is not in this layout."""
    try:
        raw = base64.b64decode(traffic.rows, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the rows of gateway {traffic.gateway} are not base64: {error}") from None
    at = 0
    while at < len(raw):
        start = at + HEAD.size
        if start > len(raw):
            raise ValueError(f"the rows of gateway {traffic.gateway} end in the middle of one")
        row = TrafficRow(*HEAD.unpack_from(raw, at))
        at = start + row.mark_count * MARK.size
        if at > len(raw):
            raise ValueError(f"the rows of gateway {traffic.gateway} end in the middle of one")
        yield row, raw[start:at]
