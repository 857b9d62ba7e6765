"""The OpenAI API: a pure ASGI application. One request's way is `_Request.run`, top to bottom."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import orjson
import structlog

from shoal.api.names import ENGINE_PORT
from shoal.core.access import Denied, Identity, authenticate
from shoal.core.resolve import ServedModel, listed
from shoal.core.routing import NoReplica, Replica
from shoal.gateway import errors, ids, sse
from shoal.gateway.body import ALLOWED, Budget, Disconnected, Parsed, engine_body, parse, read_body
from shoal.gateway.deadlines import Deadlines
from shoal.gateway.directory import Directory
from shoal.gateway.errors import ApiError
from shoal.gateway.fleet import Fleet
from shoal.gateway.installkey import KeyRing
from shoal.gateway.meter import CHECKPOINT_SECONDS, Meter
from shoal.gateway.metrics import Metrics
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.upstream import (
    Aborted,
    AbortHandle,
    Answer,
    AnswerTooLarge,
    ConnectFailed,
    Target,
    Upstream,
    UpstreamError,
)
from shoal.ledger.spool import Spool, SpoolUnavailable

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_JSON: Final = (b"content-type", b"application/json")
_EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx and its kind would hold the chunks back otherwise
    (b"x-accel-buffering", b"no"),
)
EMBEDDINGS: Final = "/v1/embeddings"
DISCONNECT: Final = "shoal.on_disconnect"
"""Key of the scope where the request leaves what to call when its client goes, if the server offers the key. ASGI's own
way is to await `receive()`, which costs a task per request. The server puts GONE there when the client has left."""
GONE: Final = object()
ANSWER: Final = "shoal.answer"
"""Key of the scope where the server may leave `answer(headers, body)`: a whole answer with status 200 in one write, or
False when the client must be waited for first. ASGI's two messages do the same for 7 % more CPU per request."""
_RETRY_AFTER: Final = {"none": 30, "not-ready": 10, "turned-away": 5, "tried": 2}
_DENIED: Final = {
    "unknown": (401, "Incorrect API key provided.", "invalid_api_key"),
    "disabled": (401, "This API key is disabled.", "disabled_api_key"),
    "expired": (401, "This API key has expired.", "expired_api_key"),
    "suspended": (403, "This account is suspended.", "tenant_suspended"),
}


class Gateway:
    """`engine_port` is there for tests, where engines share one address."""

    def __init__(
        self,
        settings: GatewaySettings,
        directory: Directory,
        fleet: Fleet,
        key_ring: KeyRing,
        spool: Spool,
        upstream: Upstream,
        metrics: Metrics,
        *,
        engine_port: Callable[[Replica], int] = lambda _: ENGINE_PORT,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.fleet = fleet
        self.key_ring = key_ring
        self.spool = spool
        self.upstream = upstream
        self.metrics = metrics
        self.engine_port = engine_port
        self.budget = Budget(settings.max_held_body_bytes)
        self.deadlines = Deadlines(settings.request_seconds)
        self.in_flight = 0
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = _Request(self, scope, receive, send)
        self.in_flight += 1
        try:
            await request.run()
        finally:
            self.in_flight -= 1


class _Retry(Exception):
    """This replica could not take the request and nothing went to the client: try another."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _ClientGone(Exception):
    """The client left."""


class _Prepared(NamedTuple):
    """What the request asks for, ready to be sent to any replica."""

    parsed: Parsed
    model: ServedModel
    raw: bytes
    name: sse.ModelName


class _Request:
    __slots__ = (
        "_answer",
        "_app",
        "_client_id",
        "_headers",
        "_id",
        "_path",
        "_receive",
        "_scope",
        "_send",
        "_started",
    )

    def __init__(self, app: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        # Taken out of the scope: left there it would be a cycle, and work for the collector.
        self._answer: Callable[[tuple[tuple[bytes, bytes], ...], bytes], bool] | None = scope.pop(ANSWER, None)
        self._path: str = scope["path"]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._id = ids.uuid7()
        self._client_id = ids.client_request_id(self._headers.get(b"x-request-id"))
        self._started = False

    async def run(self) -> None:
        try:
            await self._route()
        except ApiError as error:
            self._app.metrics.rejected.labels(error.code or str(error.status)).inc()
            await self._fail(error)
        except (Disconnected, _ClientGone):
            self._app.metrics.rejected.labels("disconnected").inc()
        except Exception:
            log.exception("request failed", request=self._id)
            if not self._started:
                await self._fail(ApiError(500, "The gateway failed.", "internal_error"))

    async def _route(self) -> None:
        path, method = self._path, self._scope["method"]
        if path in ALLOWED:
            if method != "POST":
                raise _wrong_method(method, "POST")
            await self._complete()
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            if method != "GET":
                raise _wrong_method(method, "GET")
            await self._models(path[len("/v1/models/") :])
        else:
            raise ApiError(404, f"Unknown path: {path[:200]}", "unknown_path")

    # --- models -----------------------------------------------------------------------------------------------------

    async def _models(self, wanted: str) -> None:
        snapshot = self._app.directory.snapshot
        words = snapshot.words(self._identity())
        if wanted:
            model = words.get(wanted)
            if model is None:
                raise errors.model_not_found(wanted)
            await self._json(200, orjson.dumps(_card(wanted, model)))
            return
        cards = [_card(word, model) for word, model in listed(words)]
        await self._json(200, orjson.dumps({"object": "list", "data": cards}))

    # --- completions ------------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        app = self._app
        settings = app.settings
        identity = self._identity()
        if app.in_flight > settings.max_requests:
            raise errors.unavailable("The gateway is serving as many requests as it can. Try again.", "overloaded", 2)
        if app.spool.error is not None:
            # What is not recorded cannot be billed, so it is not served.
            raise _cannot_record()
        raw = await read_body(
            self._receive,
            self._headers.get(b"content-length"),
            settings.max_body_bytes,
            app.budget,
        )
        try:
            await self._accept(identity, raw)
        finally:
            app.budget.give(len(raw))

    async def _accept(self, identity: Identity, raw: bytes) -> None:
        app = self._app
        parsed = parse(raw, self._path)
        model = app.directory.snapshot.words(identity).get(parsed.word)
        if model is None:
            raise errors.model_not_found(parsed.word)
        if model.embeds and self._path != EMBEDDINGS:
            raise errors.makes_embeddings(parsed.word)
        meter = Meter(
            self._id,
            app.settings.installation,
            identity,
            model,
            endpoint=self._path,
            word=parsed.word,
            stream=parsed.stream,
            client_request_id=self._client_id,
        )
        try:
            kept = app.spool.commit(meter.open_row())
        except SpoolUnavailable:
            raise _cannot_record() from None
        try:
            await kept
        except SpoolUnavailable:
            # The row may be on disk all the same: its final row says that nothing was served.
            meter.outcome, meter.status = "refused", 503
            app.spool.put(meter.final_row())
            raise _cannot_record() from None
        prepared = _Prepared(
            parsed,
            model,
            engine_body(parsed, self._path, model.engine_name, self._id),
            sse.ModelName(model.engine_name, parsed.word),
        )
        await self._serve(prepared, meter)

    async def _serve(self, prepared: _Prepared, meter: Meter) -> None:
        app = self._app
        abort = AbortHandle()
        watcher: asyncio.Task[None] | None = None
        if DISCONNECT in self._scope:
            if self._scope[DISCONNECT] is GONE:
                abort.abort()
            else:
                self._scope[DISCONNECT] = abort.abort
        else:
            watcher = asyncio.create_task(self._watch(abort))
        try:
            with app.deadlines.start():
                await self._attempts(prepared, meter, abort)
        except _ClientGone:
            meter.outcome = "cancelled"
        except TimeoutError:
            meter.outcome = "failed"
            limit = app.settings.request_seconds
            await self._tell(meter, ApiError(504, f"The request took longer than {limit:g} s.", "timeout"))
        except ApiError as error:
            meter.outcome = meter.outcome or ("rejected" if error.status < 500 else "failed")
            await self._tell(meter, error)
        except Exception:
            log.exception("request failed", request=self._id)
            meter.outcome = "failed"
            await self._tell(meter, ApiError(500, "The gateway failed.", "internal_error"))
        finally:
            abort.abort()
            if meter.outcome is None:
                meter.outcome = "failed"
            app.spool.put(meter.final_row())
            self._observe(meter)
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher

    async def _watch(self, abort: AbortHandle) -> None:
        """Waits for the client to leave, and cuts the engine off at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        abort.abort()

    async def _attempts(self, prepared: _Prepared, meter: Meter, abort: AbortHandle) -> None:
        app = self._app
        tried: set[str] = set()
        no_replica = NoReplica("tried")
        while meter.attempts < app.settings.attempts:
            choice = app.fleet.choose(app.directory.snapshot, prepared.model, tried)
            if isinstance(choice, NoReplica):
                no_replica = choice
                break
            replica = choice.replica
            tried.add(replica.uid)
            key = app.key_ring.key_for(replica.install_key, replica.model_uid)
            if key is None:
                log.warning("no install key for a pod", pod=replica.key, fingerprint=replica.install_key)
                continue
            if choice.fallback:
                app.metrics.fallbacks.inc()
            meter.attempts += 1
            meter.replica = replica
            heard = app.fleet.heard.get(replica.uid)
            meter.engine_boot = heard.engine_boot if heard else None
            app.fleet.enter(replica.uid)
            try:
                await self._attempt(prepared, meter, replica, key, abort)
                return
            except _Retry as retry:
                app.metrics.retries.labels(retry.reason).inc()
                log.debug("attempt failed", request=self._id, pod=replica.key, reason=retry.reason)
            finally:
                app.fleet.leave(replica.uid)
        meter.outcome = "refused"
        meter.replica = meter.engine_boot = None
        raise errors.unavailable(
            f"The model `{prepared.parsed.word}` cannot serve right now: {no_replica.message}. Try again.",
            "no_replica",
            _RETRY_AFTER[no_replica.reason],
        )

    async def _attempt(self, prepared: _Prepared, meter: Meter, replica: Replica, key: str, abort: AbortHandle) -> None:
        target = Target(replica.ip or "", self._app.engine_port(replica))
        head = self._head(target, key, len(prepared.raw), prepared.parsed.stream)
        try:
            answer = await self._app.upstream.start(target, head, prepared.raw, abort)
        except Aborted:
            raise _ClientGone from None
        except ConnectFailed:
            raise _Retry("connect") from None
        except UpstreamError:
            raise _Retry("lost") from None
        try:
            if answer.status in (401, 503):
                # 401: the pod's keys are being rotated. Both mean "not here", never "not you".
                raise _Retry("unauthorized" if answer.status == 401 else "unavailable")
            if answer.status == 200 and prepared.parsed.stream and b"event-stream" in answer.content_type:
                await self._stream(prepared, meter, answer, replica)
            else:
                await self._whole(prepared, meter, answer, replica)
        finally:
            answer.release()

    async def _whole(self, prepared: _Prepared, meter: Meter, answer: Answer, replica: Replica) -> None:
        try:
            body = await answer.read_all(self._app.settings.max_answer_bytes)
        except Aborted:
            raise _ClientGone from None
        except AnswerTooLarge:
            raise ApiError(502, "The engine's answer is too large.", "answer_too_large") from None
        except UpstreamError:
            raise _Retry("lost") from None
        if answer.status >= 400:
            raise errors.from_engine(answer.status, body)
        if (span := sse.find_usage(body)) is not None:
            meter.count(body[span[0] : span[1]], "final")
        meter.answer_began()
        meter.status = answer.status
        rewrite = prepared.name.rewrite_whatever if self._path == EMBEDDINGS else prepared.name.rewrite
        await self._json(answer.status, rewrite(body), self._replica_header(replica))
        meter.outcome = "answered"

    async def _stream(self, prepared: _Prepared, meter: Meter, answer: Answer, replica: Replica) -> None:
        parsed, name, send = prepared.parsed, prepared.name, self._send
        splitter = sse.Splitter()
        clock = asyncio.get_running_loop().time
        checkpoint_at = clock() + CHECKPOINT_SECONDS
        failed = done = False
        while True:
            try:
                data = await answer.read()
                events = splitter.feed(data)
            except Aborted:
                raise _ClientGone from None
            except (UpstreamError, sse.EventTooLarge):
                if self._started:
                    raise _engine_lost() from None
                raise _Retry("lost") from None
            if not data:
                break
            out: list[bytes] = []
            for event in events:
                if event == sse.DONE:
                    done = True
                    if not self._started and not out:
                        continue
                elif sse.is_error(event):
                    failed = True
                    event = self._engine_error(event, out)
                elif (span := sse.find_usage(event)) is not None:
                    closing = sse.is_closing_usage(event)
                    meter.count(event[span[0] : span[1]], "final" if closing else "continuous")
                    if closing:
                        if not parsed.wants_usage:
                            continue
                    elif not parsed.wants_continuous:
                        event = sse.without_usage(event, span)
                    event = name.rewrite(event)
                elif event.startswith(b":") and not self._started and not out:
                    continue  # a comment is no answer yet: until one comes, another replica can take over
                else:
                    event = name.rewrite(event)
                out.append(event)
            if out:
                if not self._started:
                    meter.answer_began()
                    meter.status = 200
                    await self._start(200, (*_EVENT_STREAM, *self._replica_header(replica)))
                out.append(b"")
                await send({"type": "http.response.body", "body": b"\n\n".join(out), "more_body": True})
            if (now := clock()) >= checkpoint_at:
                checkpoint_at = now + CHECKPOINT_SECONDS
                if meter.count_source != "none":
                    self._app.spool.put(meter.checkpoint_row())
        if not done and not failed:
            if self._started:
                raise _engine_lost()
            raise _Retry("lost")
        if not self._started:
            await self._start(200, _EVENT_STREAM)
        meter.status = 200
        meter.outcome = "failed" if failed else "answered"
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _engine_error(self, event: bytes, out: list[bytes]) -> bytes:
        """An error event of the engine: before the first byte an answer with a status, or another try; after it, an
        event in OpenAI's shape."""
        decoded = sse.payload(event) or {}
        status = errors.engine_status(decoded)
        error = errors.from_engine(status, orjson.dumps(decoded))
        if not self._started and not out:
            if status == 503:
                raise _Retry("unavailable")
            raise error
        return error.event().rstrip(b"\n")

    # --- answering --------------------------------------------------------------------------------------------------

    def _identity(self) -> Identity:
        header = self._headers.get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized(401, "No API key. Send `Authorization: Bearer <key>`.", "missing_api_key")
        found = authenticate(self._app.directory.snapshot.keys, hashlib.sha256(key).hexdigest(), datetime.now(UTC))
        if isinstance(found, Denied):
            raise _unauthorized(*_DENIED[found.reason])
        return found

    def _head(self, target: Target, key: str, length: int, stream: bool) -> bytes:
        host = f"[{target.host}]" if ":" in target.host else target.host
        trace = ids.traceparent(self._headers.get(b"traceparent"))
        # The client's headers stay here: some of them would steer the engine.
        return (
            f"POST {self._path} HTTP/1.1\r\nhost: {host}:{target.port}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\naccept: {'text/event-stream' if stream else 'application/json'}\r\n"
            f"x-request-id: {self._id}\r\ncontent-length: {length}\r\n"
            f"{f'traceparent: {trace.decode()}' + chr(13) + chr(10) if trace else ''}\r\n"
        ).encode()

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self._started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    *self._ids(),
                    *(((b"connection", b"close"),) if self._app.stopping else ()),
                ],
            }
        )

    def _ids(self) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
        return (
            (b"x-request-id", (self._client_id or self._id).encode()),
            (b"x-shoal-request-id", self._id.encode()),
        )

    async def _json(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        if self._answer is not None and status == 200 and not self._app.stopping:
            self._started = True
            if self._answer((_JSON, *headers, *self._ids()), body):
                return
        await self._start(status, (_JSON, (b"content-length", str(len(body)).encode()), *headers))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, error: ApiError) -> None:
        await self._json(error.status, error.body(), error.headers)

    async def _tell(self, meter: Meter, error: ApiError) -> None:
        """Tells the client of an error: by status, or by an event when the status is already out."""
        if not self._started:
            meter.status = error.status
            await self._fail(error)
            return
        await self._send({"type": "http.response.body", "body": error.event(), "more_body": False})

    def _replica_header(self, replica: Replica) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"x-shoal-replica", replica.key.encode()),) if self._app.settings.replica_header else ()

    def _observe(self, meter: Meter) -> None:
        outcome = meter.outcome or "failed"
        series = self._app.metrics.of(meter.model, self._path)
        series.duration[outcome].observe(meter.seconds)
        if (first := meter.seconds_to_first_byte) is not None:
            series.first_token.observe(first)
        counts = meter.tokens()
        if (tokens := counts["inputTokens"]) is not None:
            series.input_tokens.observe(tokens)
        if (tokens := counts["outputTokens"]) is not None:
            series.output_tokens.observe(tokens)


def _card(word: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": word,
        "object": "model",
        "created": int(model.created.timestamp()) if model.created else 0,
        "owned_by": "shoal",
        "root": model.key,
        "parent": None,
    }


def _unauthorized(status: int, message: str, code: str) -> ApiError:
    headers = ((b"www-authenticate", b"Bearer"),) if status == 401 else ()
    return ApiError(status, message, code, headers=headers)


def _wrong_method(method: str, allowed: str) -> ApiError:
    return ApiError(
        405,
        f"{method} is not allowed here; use {allowed}.",
        "method_not_allowed",
        headers=((b"allow", allowed.encode()),),
    )


def _cannot_record() -> ApiError:
    return errors.unavailable(
        "The gateway cannot record usage right now, so it serves nothing.", "cannot_record_usage", 10
    )


def _engine_lost() -> ApiError:
    return ApiError(502, "The replica that was answering was lost; the answer is incomplete.", "replica_lost")
