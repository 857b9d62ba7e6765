"""One request that an Envoy carries: the client's side of it for the gateway's application, and the engine's side.

The application (`app.py`) gets it as from a connection of its own, and so decides all that it decides there. What it
sends to a replica and what it answers become Envoy's mutations. There is one attempt: Envoy takes one replica.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from shoal.api import names
from shoal.core import admission, extproc
from shoal.core.extproc import AnswerHead, Conversation, Message, ProtocolBroken, RequestHead, State
from shoal.gateway import redact
from shoal.gateway.carrier import CARRIER
from shoal.gateway.connections import sidecar_error
from shoal.gateway.extproc.protocol import external_processor_pb2 as pb
from shoal.gateway.extproc.wire import headers_of, message, metadata_of
from shoal.gateway.upstream import (
    Aborted,
    AbortHandle,
    AnswerTooLarge,
    BrokenOff,
    ConnectFailed,
    ConnectionLost,
    RequestBody,
    UpstreamAddress,
    UpstreamAnswer,
    UpstreamError,
)
from shoal.net.asgi import DISCONNECT, GONE, Scope
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.app import GatewayApp

log = structlog.get_logger()

_AHEAD_BYTES: Final = 64 * 1024
"""Bytes of a body that are read before they are used. Then Envoy has to wait."""
_CONTENT_TYPE: Final = b"content-type"
_AUTHORIZATION: Final = b"authorization"
_SIDECAR: Final = names.HEADER_SIDECAR.encode()


class Ended(Exception):
    """Envoy has ended the conversation."""


Read = Callable[[], Awaitable[pb.ProcessingRequest | None]]
"""The next message of Envoy; None at the end. Raises Ended."""
Write = Callable[[pb.ProcessingResponse], Awaitable[None]]
"""Raises Ended."""


class CarriedRequest:
    """Runs one conversation. It is the request's carrier (`gateway/carrier.py`), and the answer of its replica."""

    def __init__(self, app: "GatewayApp", read: Read, write: Write, *, body_seconds: float) -> None:
        self._app = app
        self._read = read
        self._write = write
        self._body_seconds = body_seconds
        self._talk = Conversation()
        self._scope: Scope = {}
        self._parts: deque[tuple[bytes, bool]] = deque()
        """Of the request's body, or of the answer's."""
        self._size = 0
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._over = False
        """Envoy has ended the conversation, or is not understood."""
        self._not_understood = False
        self._told_all = False
        """Envoy has the end of the answer to the client."""
        self.unfinished = True
        """After `run`: Envoy still waits, for an answer or for the rest of one. If the conversation ended well then, it
        would go on without the gateway, and pass on to the client what comes from the replica."""
        self._error: UpstreamError | None = None
        self._bodyless = False
        self._body_until: float | None = None
        self._head: AnswerHead | None = None
        self._answer: tuple[int, extproc.Headers] | None = None
        """The answer to the client, until it is known whether a replica's answer carries it."""
        self._body: list[bytes] = []
        self.subset: frozenset[str] | None = None
        self.handle: AbortHandle | None = None
        self.broke_off = False
        self.status = 0
        self.content_type = self.retry_after = self.encoding = b""

    # --- the conversation ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the answer has ended, or Envoy is gone."""
        try:
            head = await self._first()
        except Ended:
            self.unfinished = False
            return
        except TimeoutError:
            return
        except ProtocolBroken as broken:
            await self._misunderstood(broken)
            self.unfinished = False
            return
        self._scope = self._scope_of(head)
        self.subset, self._bodyless = head.subset, head.ended
        reader = asyncio.create_task(self._listen(), name="listens to Envoy")
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self.unfinished = not self._told_all and (self._not_understood or not self._over)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def leave(self) -> None:
        """Envoy is gone. While the answer of a replica comes, it goes alike when the client has left and when the
        replica was lost. Before, it would answer itself for a replica that is lost; and after, nothing is left of the
        replica that could be."""
        if self._over:
            return
        self._over = True
        if self._talk.answer_comes and self._error is None:
            self.broke_off = True
            self._news.set()
            return
        if self._not_understood and self.sent:
            self._news.set()  # with its error
            return
        gone = self._scope.get(DISCONNECT)
        self._scope[DISCONNECT] = GONE
        if callable(gone):
            gone()
        self._news.set()

    async def _first(self) -> RequestHead:
        async with asyncio.timeout(self._body_seconds):
            first = await self._read()
        if first is None:
            raise Ended
        if first.WhichOneof("request") != "request_headers":
            raise ProtocolBroken("the head of the request has to come first")
        if first.HasField("protocol_config"):
            modes = {first.protocol_config.request_body_mode, first.protocol_config.response_body_mode}
            if modes != {pb.FULL_DUPLEX_STREAMED}:
                raise ProtocolBroken("request_body_mode and response_body_mode have to be FULL_DUPLEX_STREAMED")
        head = first.request_headers
        return self._talk.request_head(headers_of(head.headers), head.end_of_stream, metadata_of(first))

    async def _misunderstood(self, broken: ProtocolBroken) -> None:
        log.warning("an Envoy's external processing filter is not set up as Shoal needs it", problem=str(broken))
        error = ApiError(500, "The gateway's proxy is set up wrongly.", "proxy_misconfigured")
        try:
            await self._tell(extproc.Immediate(error.status, ((_CONTENT_TYPE, b"application/json"),), error.body()))
        except Ended:
            return

    def _scope_of(self, head: RequestHead) -> Scope:
        return {
            "type": "http",
            "http_version": "1.1",
            "method": head.method,
            "path": head.path,
            "query_string": head.query,
            "headers": list(head.headers),
            DISCONNECT: None,
            CARRIER: self,
        }

    async def _listen(self) -> None:
        """Takes what Envoy says until the end."""
        try:
            while (heard := await self._read()) is not None:
                self._heard(heard)
                while self._size > _AHEAD_BYTES:
                    self._room.clear()
                    await self._room.wait()
        except Ended:
            pass
        except ProtocolBroken as broken:
            log.warning("an Envoy broke the protocol of external processing", problem=str(broken))
            self._give_up(str(broken))
        except Exception as error:
            log.error("a message of an Envoy cannot be read", **redact.redact_error(error))
            self._give_up("a message cannot be read")
        finally:
            self.leave()

    def _give_up(self, why: str) -> None:
        self._error, self._not_understood = ConnectionLost(why), True

    def _heard(self, heard: pb.ProcessingRequest) -> None:
        """Raises ProtocolBroken."""
        talk = self._talk
        match heard.WhichOneof("request"):
            case "request_body":
                talk.request_part(heard.request_body.end_of_stream)
                self._put(heard.request_body.body, heard.request_body.end_of_stream)
            case "request_trailers":
                talk.trailers(True, headers_of(heard.request_trailers.trailers))
                self._put(b"", True)
            case "response_headers":
                told = heard.response_headers
                self._head = talk.answer_head(headers_of(told.headers), told.end_of_stream, metadata_of(heard))
                self._put(b"", told.end_of_stream)
            case "response_body":
                talk.answer_part(heard.response_body.end_of_stream)
                self._put(heard.response_body.body, heard.response_body.end_of_stream)
            case "response_trailers":
                talk.trailers(False, headers_of(heard.response_trailers.trailers))
                self._put(b"", True)
            case _:
                raise ProtocolBroken("an unexpected message")

    def _put(self, data: bytes, last: bool) -> None:
        if data or last:
            self._parts.append((data, last))
            self._size += len(data)
        self._news.set()

    async def _take(self) -> tuple[bytes, bool]:
        """What has come of the body; whether that was all. Empty at the end of the conversation."""
        while not self._parts and not self._over:
            self._news.clear()
            await self._news.wait()
        if not self._parts:
            return b"", False
        data, last = self._parts.popleft()
        self._size -= len(data)
        if self._size <= _AHEAD_BYTES:
            self._room.set()
        return data, last

    async def _tell(self, told: Message) -> None:
        await self._write(message(told))

    # --- the client's side --------------------------------------------------------------------------------------------

    async def _receive(self) -> Mapping[str, Any]:
        if self._talk.state is not State.REQUEST:
            raise RuntimeError("the body was read to its end")
        if self._bodyless:
            return {"type": "http.request", "body": b"", "more_body": False}
        if self._body_until is None:
            self._body_until = asyncio.get_running_loop().time() + self._body_seconds
        try:
            async with asyncio.timeout_at(self._body_until):
                data, last = await self._take()
        except TimeoutError:
            raise ApiError(408, "The body did not arrive in time.", "request_timeout") from None
        if not data and not last:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": data, "more_body": not last}

    async def _send(self, said: dict[str, Any]) -> None:
        """A message of the application. What Envoy does not take any more is dropped, as by a server whose client
        left."""
        try:
            if said["type"] == "http.response.start":
                await self._begin(said["status"], said["headers"])
            else:
                await self._continue(said.get("body", b""), last=not said.get("more_body", False))
        except Ended:
            self.leave()

    async def _begin(self, status: int, headers: extproc.Headers) -> None:
        head = self._head
        if self._talk.state is State.ANSWERED and head is not None and status == head.status and status < 400:
            await self._tell_all(self._talk.begin(status, headers))
        else:
            self._answer = status, headers

    async def _continue(self, data: bytes, *, last: bool) -> None:
        if self._answer is None:
            # The last part may come before the end of the replica's answer. Envoy then resets the replica's stream.
            await self._tell_all(self._talk.part(data, last=last))
        else:
            self._body.append(data)
            if last:
                status, headers = self._answer
                await self._tell_all(self._talk.refuse(status, headers, b"".join(self._body)))
        self._told_all = last

    async def _tell_all(self, told: Iterable[Message]) -> None:
        if self._over:
            raise Ended
        for each in told:
            await self._tell(each)

    # --- the engine's side (gateway/carrier.py, gateway/upstream.py) --------------------------------------------------

    @property
    def sent(self) -> bool:
        """Whether Envoy has the request, which then goes to no other replica."""
        return self._talk.state is not State.REQUEST

    @property
    def limited(self) -> bool:
        return self.subset is not None

    def takes(self, target: UpstreamAddress) -> bool:
        """Whether Envoy can send the request to a replica."""
        return self.subset is None or bool({target.host, _endpoint(target)} & self.subset)

    async def start(
        self, target: UpstreamAddress, head: bytes, body: RequestBody, abort: AbortHandle
    ) -> UpstreamAnswer:
        abort.hold(self)
        if abort.aborted or self._over:
            raise Aborted("the client left")
        path, headers = parsed(head)
        if target.server_name is not None:
            headers = admitted(target.host, path, headers)
        abort.sent = True
        try:
            if isinstance(body, bytes):
                forwarded = self._talk.forward(_endpoint(target), path, headers, body)
            else:
                parts = (bytes(part) for part in body.slices(extproc.PART_BYTES))
                forwarded = self._talk.forward(_endpoint(target), path, headers, b"", before=parts)
            await self._tell_all(forwarded)
        except Ended:
            self.leave()
            raise Aborted("the client left") from None
        while self._head is None:
            self._check()
            self._news.clear()
            await self._news.wait()
        if self._head.served not in (None, _endpoint(target)):
            # The record names the replica that was picked, and so is wrong.
            log.warning(
                "a proxy sent a request to another endpoint", picked=_endpoint(target), served=self._head.served
            )
        told = dict(self._head.headers)
        flags = told.get(_SIDECAR)
        if target.server_name is not None and flags not in (None, b"-"):
            # The sidecar answers itself: it is the replica that does not serve, and not the client that erred.
            error = sidecar_error(flags)
            abort.sent = not isinstance(error, ConnectFailed)
            raise error
        self.status = self._head.status
        self.content_type = told.get(_CONTENT_TYPE, b"")
        self.retry_after, self.encoding = told.get(b"retry-after", b""), told.get(b"content-encoding", b"")
        return self

    async def read(self) -> bytes:
        while True:
            self._check()
            if not self._parts and not self._over:
                # Also `abort` ends this wait: a replica that stalls sends nothing more.
                self._news.clear()
                await self._news.wait()
                continue
            data, last = await self._take()
            if data:
                if last:
                    self._parts.appendleft((b"", True))
                return data
            if last:
                self._parts.appendleft((b"", True))
                return b""

    async def relay(self, take: Callable[[bytes], bool], drained: Callable[[], Awaitable[None]]) -> None:
        while data := await self.read():
            if not take(data):
                await drained()

    async def read_all(self, limit: int, grown: Callable[[int], None] = lambda _size: None) -> bytes:
        parts: list[bytes] = []
        size = 0
        while data := await self.read():
            size += len(data)
            if size > limit:
                raise AnswerTooLarge(f"the engine's answer is larger than {limit} bytes")
            grown(len(data))
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        if self.handle is not None:
            self.handle.drop()
            self.handle = None

    def abort(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
        self._news.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._over and not self._parts:
            raise BrokenOff("the proxy broke the answer off") if self.broke_off else Aborted("the client left")


def _endpoint(target: UpstreamAddress) -> str:
    """Where the proxy reaches a replica. It has no certificate for the gateways' port."""
    return extproc.endpoint(target.host, target.port if target.server_name is None else names.ENGINE_PROXY_PORT)


def admitted(host: str, path: str, headers: extproc.Headers) -> extproc.Headers:
    """The headers with a proof in place of the engine's key, which no proxy gets."""
    key = dict(headers)[_AUTHORIZATION].decode().removeprefix("Bearer ")
    proof = admission.proof(key, host, path, secrets.token_hex(16), time.time())
    rest = (pair for pair in headers if pair[0] != _AUTHORIZATION)
    return [*rest, (admission.HEADER.encode(), proof.encode())]


def parsed(head: bytes) -> tuple[str, extproc.Headers]:
    """Path and headers of the request's head, as the dispatch writes it."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return first.split(" ")[1], [(name.encode("latin-1"), value.encode("latin-1")) for name, _, value in pairs]
