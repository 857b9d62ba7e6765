"""`POST /v1/records`: a batch of usage records, answered after its commit."""

import asyncio
import time
from functools import partial
from typing import Final

import orjson
import zstandard

from shoal.api import names
from shoal.ledger.ownrows import bound
from shoal.ledger.parse import Incoming, parse
from shoal.ledger.senders import Senders
from shoal.ledger.service import LedgerProblem, LedgerRequest, LedgerService, Response, answer_json
from shoal.ledger.sink import Sink

_IN_A_THREAD: Final = 200
"""Records from which on a batch is parsed beside the event loop: 5 ms."""


def add_routes(service: LedgerService, sink: Sink, *, max_body_bytes: int, senders: Senders | None = None) -> None:
    """Lets gateways send records: with `senders` only their own."""
    service.route("POST", names.RECORDS_PATH, partial(_take, sink, max_body_bytes, senders), ("gateway",))


async def _take(sink: Sink, max_body_bytes: int, senders: Senders | None, request: LedgerRequest) -> Response:
    pod = None if senders is None else await senders.pod_of(request)
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


def _elements(request: LedgerRequest, most: int) -> list[object]:
    body = request.body
    match request.headers.get(b"content-encoding", b"identity").strip().lower():
        case b"identity" | b"":
            pass
        case b"zstd":
            body = _decompressed(body, most)
        case other:
            raise LedgerProblem(415, f"Content-Encoding {other.decode('latin-1')[:50]} is not known here: zstd or none")
    try:
        elements = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise LedgerProblem(400, f"the body is not JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(elements, list):
        raise LedgerProblem(400, "the body is not a JSON array of usage records")
    return elements  # pyright: ignore[reportUnknownVariableType]


def _decompressed(body: bytes, most: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            found = reader.read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise LedgerProblem(400, f"the body is not zstd: {error}") from None
    if len(found) > most:
        raise LedgerProblem(413, f"the body is larger than {most} bytes when decompressed: send it in parts")
    return found
