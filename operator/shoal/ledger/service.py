"""The ledger's API: a small frame in which each room of the ledger has its routes.

A handler gets a `Request` with its body read and its caller known, and returns a `Response` or `Events`, or raises
`Problem`. What every route shares is here: keys, bounds, errors.
"""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

import orjson
import structlog

from shoal.api import names
from shoal.api.keys import ROLES, Role
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.core import cells
from shoal.ledger.auth import LedgerKeys, match_key
from shoal.ledger.database import DatabaseUnavailable
from shoal.net.asgi import DISCONNECT, GONE, Receive, Scope, Send, unproved
from shoal.net.hub import Caller, StreamHub, TooManyReaders
from shoal.net.tls import TLSCredentials

log = structlog.get_logger()

WRITE_SECONDS: Final = 10.0
"""A reader that takes no byte for so long is dropped."""
_LONGEST_NAME: Final = 253

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class LedgerRequest:
    """One call."""

    method: str
    path: str
    query: Mapping[str, Sequence[str]]
    headers: Mapping[bytes, bytes]
    body: bytes
    caller: Caller
    """`role` is that of its key."""
    old_key: bool = False
    """Its key is one of before the role keys."""

    def one(self, name: str, default: str | None = None) -> str | None:
        """A parameter that may be given once. Raises Problem where it is given more often."""
        values = self.query.get(name, ())
        if len(values) > 1:
            raise LedgerProblem(400, f"{name} is given {len(values)} times; once is enough")
        return values[0] if values else default


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; `body` in one piece, or as it is made."""

    status: int = 200
    headers: Headers = ()
    body: bytes | AsyncIterator[bytes] = b""


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """An answer that is a stream of a hub's messages."""

    hub: StreamHub


class LedgerProblem(Exception):
    """A call that is refused. The message says what is wrong and what to do."""

    def __init__(self, status: int, message: str, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


Handler = Callable[[LedgerRequest], Awaitable[Response | StreamAnswer]]
Answered = Callable[[str, str, Role, float, int], None]
"""Hears of calls of who may call: method, path, whose key, when it began (time.monotonic), the answer's status."""


def answer_json(content: object, status: int = 200, headers: Headers = ()) -> Response:
    """`content` as orjson takes it."""
    return Response(status, ((b"content-type", b"application/json"), *headers), orjson.dumps(content))


def answer_csv(header: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> Response:
    """A table with a line of names (RFC 4180); `name` of the file, where a browser should keep it as one."""
    text = io.StringIO(newline="")
    writer = cells.CSVWriter(text)
    writer.row(header)
    writer.rows(rows)
    headers: Headers = ((b"content-type", b"text/csv; charset=utf-8"),)
    if name:
        headers += ((b"content-disposition", f'attachment; filename="{name}"'.encode()),)
    return Response(200, headers, text.getvalue().encode())


class LedgerService:
    """A pure ASGI application. Routes are added before it serves."""

    def __init__(self, keys: LedgerKeys, *, max_body_bytes: int, credentials: TLSCredentials | None = None) -> None:
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._credentials = credentials
        self._routes: dict[str, dict[str, tuple[Handler, tuple[Role, ...]]]] = {}
        self.answered: Answered | None = None

    def route(self, method: str, path: str, handler: Handler, roles: Iterable[Role]) -> None:
        """Lets callers with a key of one of `roles` call `handler`. Raises ValueError where there is one already."""
        methods = self._routes.setdefault(path, {})
        if method in methods:
            raise ValueError(f"{method} {path} has a handler")
        methods[method] = (handler, tuple(roles))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            answer = await self._call(scope, receive)
        except LedgerProblem as problem:
            answer = refusal(problem.status, str(problem), problem.headers)
        except (DatabaseUnavailable, TimeoutError) as error:
            answer = refusal(503, str(error) or "the database did not answer in time", ((b"retry-after", b"1"),))
        except Exception:
            log.exception("a call failed", method=scope["method"], path=scope["path"])
            answer = refusal(500, "the ledger failed at this call; its log says why")
        if answer is None:
            return
        if isinstance(answer, StreamAnswer):
            await self._events(answer.hub, scope, send)
            return
        try:
            await send_answer(answer, send)
        except TimeoutError:
            log.warning("a client took nothing of its answer and was dropped", path=scope["path"])
        except Exception:
            # Its head is sent: the client hears of it by a body that ends too soon.
            log.exception("an answer broke off", path=scope["path"])
            raise

    async def _call(self, scope: Scope, receive: Receive) -> Response | StreamAnswer | None:
        path, method = scope["path"], scope["method"]
        methods = self._routes.get(path)
        if methods is None:
            raise LedgerProblem(404, f"the ledger has no {path[:200]}")
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            raise LedgerProblem(405, f"{path} takes {allowed}", ((b"allow", allowed.encode()),))
        handler, roles = methods[method]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        matched = match_key(headers, ROLES, self._keys)
        if matched is None:
            raise LedgerProblem(
                401,
                f"a key of this installation is needed ({', '.join(roles)}), as a bearer token or in "
                f"{names.HEADER_KEY}",
                ((b"www-authenticate", b"Bearer"),),
            )
        role = matched.role
        if (why := unproved(self._credentials, scope, role)) is not None:
            raise LedgerProblem(403, why)
        if role not in roles:
            raise LedgerProblem(403, f"the key of role {role} may not do this: {', '.join(roles)} may")
        body = await self._body(headers, receive)
        if body is None:
            return None
        try:
            query = parse_qs(scope["query_string"].decode(), keep_blank_values=True, max_num_fields=100)
        except ValueError:
            raise LedgerProblem(400, "the query string is not valid") from None
        caller = Caller(role, _token(headers, names.HEADER_CALLER), _token(headers, names.HEADER_BOOT))
        request = LedgerRequest(method, path, query, headers, body, caller, matched.old)
        return await (
            handler(request) if self.answered is None else self._traced(handler, request, role, self.answered)
        )

    async def _traced(
        self, handler: Handler, request: LedgerRequest, role: Role, told: Answered
    ) -> Response | StreamAnswer:
        began, status = time.monotonic(), 500
        try:
            answer = await handler(request)
            status = answer.status if isinstance(answer, Response) else 200
            return answer
        except LedgerProblem as problem:
            status = problem.status
            raise
        except (DatabaseUnavailable, TimeoutError):
            status = 503
            raise
        finally:
            told(request.method, request.path, role, began, status)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """None: the client has gone."""
        too_large = LedgerProblem(413, f"the body is larger than {self._max_body_bytes} bytes: send it in parts")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while True:
            # The server itself drops who does not finish a body in time.
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_body_bytes:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _events(self, hub: StreamHub, scope: Scope, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        caller = Caller("", _token(headers, names.HEADER_CALLER), _token(headers, names.HEADER_BOOT))
        try:
            with hub.reader(caller) as reader:
                if scope.get(DISCONNECT) is GONE:
                    return
                scope[DISCONNECT] = reader.end
                head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
                while True:
                    try:
                        message = await reader.next(HEARTBEAT_SECONDS)
                    except TimeoutError:
                        message = hub.heartbeat()
                    if message is None:
                        break
                    async with asyncio.timeout(WRITE_SECONDS):
                        await send({"type": "http.response.body", "body": message, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TooManyReaders:
            await send_answer(refusal(503, "too many readers", ((b"retry-after", b"2"),)), send)
        except TimeoutError:
            log.warning("a reader took nothing and was dropped", caller=caller.name)


def refusal(status: int, message: str, headers: Headers = ()) -> Response:
    """An error as every process of Shoal words it to another."""
    return answer_json({"error": {"message": message}}, status, headers)


def _token(headers: Mapping[bytes, bytes], name: str) -> str:
    return headers.get(name.encode(), b"").decode("latin-1")[:_LONGEST_NAME]


async def send_answer(answer: Response, send: Send) -> None:
    """Sends it."""
    body = answer.body
    head: list[tuple[bytes, bytes]] = [*answer.headers]
    if isinstance(body, bytes):
        head.append((b"content-length", str(len(body)).encode()))
    start: dict[str, Any] = {"type": "http.response.start", "status": answer.status, "headers": head}
    async with asyncio.timeout(WRITE_SECONDS):
        await send(start)
    if isinstance(body, bytes):
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    async for chunk in body:
        async with asyncio.timeout(WRITE_SECONDS):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
