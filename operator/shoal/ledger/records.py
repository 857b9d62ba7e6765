"""`POST /v1/records`: a batch of usage records, answered after its commit."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import orjson
import structlog
import zstandard
from starlette.responses import Response

from shoal.api import names
from shoal.api.ledger import BatchAnswer
from shoal.kube.podtokens import PodTokens
from shoal.ledger.ownrows import bound
from shoal.ledger.parse import Incoming, parse
from shoal.ledger.service import LedgerService
from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest, answer_json

log = structlog.get_logger()


class Senders:
    """Identifies the gateway pod that sends a batch by its projected ServiceAccount token (`kube/podtokens.py`).
    Verified tokens are cached."""

    def __init__(self, tokens: PodTokens) -> None:
        self._tokens = tokens
        self._logged = ""

    async def pod_of(self, request: ShellRequest) -> str:
        """Name of the sending pod. Raises Problem if it is not verified: the gateway keeps its records and sends them
        again."""
        token = request.headers.get(names.HEADER_POD_TOKEN, "").strip()
        verdict = await self._tokens.pod_of(token)
        if verdict.allowed:
            return verdict.pod
        if verdict.message != self._logged:
            self._logged = verdict.message
            log.warning("records are refused: their sender is not verified", reason=verdict.message)
        raise Problem(verdict.status, verdict.message, verdict.headers)


class Sink(Protocol):
    """Stores usage records. The ledger's own store implements it; another store (a Kafka topic, a ClickHouse table) can
    replace it behind `POST /v1/records`, without changes in gateways, spools and shippers, if it keeps two promises:

    1. When `take` returns, the records are durable: a gateway then deletes them. (Kafka: acks=all, and the
      acknowledgement awaited. ClickHouse: a synchronous insert.)
    2. Records that are already stored, by (source, id), change no count, even when they arrive again years later or
      concurrently. (Kafka: keyed by source and request, with deduplication by the reader, since a producer's
      idempotence ends with its session. ClickHouse: ReplacingMergeTree ordered by (source, request, attempt), with
      `step` as its version, read with FINAL.)
    """

    async def take(self, records: Sequence[Incoming]) -> BatchAnswer:
        """Stores a batch.

        Raises:
            DatabaseUnavailable: nothing was stored, or the result is unknown; the caller sends the same batch again.
        """
        ...


_IN_A_THREAD: Final = 200
"""Batch size from which parsing runs in a thread: parsing so many records takes 5 ms."""


def add_routes(service: LedgerService, sink: Sink, *, max_body_bytes: int, senders: Senders | None = None) -> None:
    """Adds the route for records; with `senders`, a gateway may send only its own records."""
    service.route("POST", names.RECORDS_PATH, partial(_take, service, sink, max_body_bytes, senders), ("gateway",))


async def _take(
    service: LedgerService, sink: Sink, max_body_bytes: int, senders: Senders | None, request: ShellRequest
) -> Response:
    # A gateway of version 0.1 has no token, and its records must not be lost in an upgrade. Its key becomes invalid
    # when the last pod that was created with it is gone.
    pod = None if senders is None or service.has_old_key(request) else await senders.pod_of(request)
    elements = _elements(request, max_body_bytes)
    now = time.time_ns() // 1_000_000
    if len(elements) < _IN_A_THREAD:
        records = _parse(elements, now, pod)
    else:
        records = await asyncio.to_thread(_parse, elements, now, pod)
    taken = await sink.take(records)
    return answer_json(taken.model_dump(mode="json", by_alias=True))


def _parse(elements: list[object], now: int, pod: str | None) -> list[Incoming]:
    records = [parse(element, now) for element in elements]
    return records if pod is None else [bound(record, pod) for record in records]


def _elements(request: ShellRequest, most: int) -> list[object]:
    body = request.content
    match request.headers.get("content-encoding", "identity").strip().lower():
        case "identity" | "":
            pass
        case "zstd":
            body = _decompressed(body, most)
        case other:
            raise Problem(415, f"Content-Encoding {other[:50]} is not known here: zstd or none")
    try:
        elements = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(elements, list):
        raise Problem(400, "the body is not a JSON array of usage records")
    return elements  # pyright: ignore[reportUnknownVariableType]


def _decompressed(body: bytes, most: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            found = reader.read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Problem(400, f"the body is not zstd: {error}") from None
    if len(found) > most:
        raise Problem(413, f"the body is larger than {most} bytes when decompressed: send it in parts")
    return found
