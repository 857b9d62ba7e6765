"""One request's way, top to bottom: `Request.run`."""

import asyncio
import contextlib
import hashlib
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
import structlog

from shoal.core.access import Denied, Identity, authenticate
from shoal.core.hold.limits import longest_wait
from shoal.core.hold.retries import RetryBudget
from shoal.core.hold.room import estimated_tokens
from shoal.core.resolve import ServedModel, listed
from shoal.core.routing import Choice, NoReplica, Replica
from shoal.gateway import errors, ids, sse
from shoal.gateway.asgi import DISCONNECT, GONE, Headers, Receive, Scope, Send
from shoal.gateway.body import ALLOWED, Disconnected, engine_body, parse, read_body
from shoal.gateway.deadlines import Deadline
from shoal.gateway.errors import ApiError
from shoal.gateway.hold import ClientGone
from shoal.gateway.meter import Meter
from shoal.gateway.relay import EMBEDDINGS, Prepared, Relay, Retry
from shoal.gateway.reply import Reply
from shoal.gateway.upstream import (
    Aborted,
    AbortHandle,
    ConnectFailed,
    GivenUp,
    StaleConnection,
    Target,
    UpstreamError,
)
from shoal.ledger.spool import SpoolUnavailable

if TYPE_CHECKING:
    from shoal.gateway.app import Gateway

log = structlog.get_logger()

COMMENT_SECONDS: Final = 10.0
"""A stream that waits hears a comment so often. Until the first one, a 503 is still possible."""
_TELL_SECONDS: Final = 10.0
"""How long a client may take to take an error."""
_RETRY_AFTER: Final = {"none": 30, "not-ready": 10, "turned-away": 5, "tried": 2, "queue": 2}
_DENIED: Final = {
    "unknown": (401, "Incorrect API key provided.", "invalid_api_key"),
    "disabled": (401, "This API key is disabled.", "disabled_api_key"),
    "expired": (401, "This API key has expired.", "expired_api_key"),
    "suspended": (403, "This account is suspended.", "tenant_suspended"),
}
_NO_HEADERS: Final[dict[bytes, bytes]] = {}


class _Place(NamedTuple):
    """A replica at which the request counts as in flight."""

    replica: Replica
    tokens: int
    paid: bool
    """A retry that the Model's budget was charged for."""


class Request:
    __slots__ = (
        "_abort",
        "_app",
        "_body_bytes",
        "_client_id",
        "_headers",
        "_held_since",
        "_id",
        "_key_hash",
        "_meter",
        "_paid",
        "_path",
        "_raw",
        "_receive",
        "_reply",
        "_scope",
        "_sent",
        "_trace",
    )

    def __init__(self, app: "Gateway", scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._path: str = scope["path"]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._id = ids.uuid7()
        self._client_id = ids.client_request_id(self._headers.get(b"x-request-id"))
        self._reply = Reply(scope, send, self._id, self._client_id, app)
        self._trace: bytes | None = None
        self._key_hash = ""
        self._body_bytes = 0
        self._raw = b""
        self._sent = 0
        self._held_since: float | None = None
        self._paid: RetryBudget | None = None

    async def run(self) -> None:
        try:
            await self._route()
        except ApiError as error:
            self._app.metrics.rejected.labels(error.code or str(error.status)).inc()
            await self._reply.error(error)
        except (Disconnected, ClientGone):
            self._app.metrics.rejected.labels("disconnected").inc()
        except Exception:
            log.exception("request failed", request=self._id)
            if not self._reply.started:
                await self._reply.error(ApiError(500, "The gateway failed.", "internal_error"))

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
        words = self._app.directory.snapshot.words(self._identity())
        if wanted:
            model = words.get(wanted)
            if model is None:
                raise errors.model_not_found(wanted)
            await self._reply.json(200, orjson.dumps(_card(wanted, model)))
            return
        cards = [_card(word, model) for word, model in listed(words)]
        await self._reply.json(200, orjson.dumps({"object": "list", "data": cards}))

    # --- completions ------------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        app = self._app
        identity = self._identity()
        if app.busy:
            raise errors.unavailable("The gateway is serving as many requests as it can. Try again.", "overloaded", 2)
        if app.spool.error is not None:
            # What is not recorded cannot be billed, so it is not served.
            raise _cannot_record()
        try:
            prepared = await self._accept(identity)
            await self._serve(prepared)
        finally:
            app.budget.give(self._body_bytes)

    async def _accept(self, identity: Identity) -> Prepared:
        """Reads the body and opens the usage record. What is not needed while the request waits ends here."""
        app = self._app
        headers, self._headers = self._headers, _NO_HEADERS
        self._trace = ids.traceparent(headers.get(b"traceparent"))
        raw = await read_body(self._receive, headers.get(b"content-length"), app.settings.max_body_bytes, app.budget)
        self._body_bytes = len(raw)
        parsed = parse(raw, self._path)
        model = app.directory.snapshot.words(identity).get(parsed.word)
        if model is None:
            raise errors.model_not_found(parsed.word)
        if model.embeds and self._path != EMBEDDINGS:
            raise errors.makes_embeddings(parsed.word)
        self._meter = meter = Meter(
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
        app.demand.arrived(model.uid)
        self._raw = engine_body(parsed, self._path, model.engine_name, self._id)
        fields = parsed.fields
        bound, choices = fields.get("max_completion_tokens", fields.get("max_tokens")), fields.get("n")
        return Prepared(
            self._path,
            parsed.word,
            parsed.stream,
            parsed.wants_usage,
            parsed.wants_continuous,
            model,
            sse.ModelName(model.engine_name, parsed.word),
            bound if type(bound) is int else None,
            choices if type(choices) is int else 1,
        )

    async def _serve(self, prepared: Prepared) -> None:
        app, meter = self._app, self._meter
        self._abort = abort = AbortHandle()
        watcher: asyncio.Task[None] | None = None
        if DISCONNECT in self._scope:
            if self._scope[DISCONNECT] is GONE:
                abort.abort()
            else:
                self._scope[DISCONNECT] = abort.abort
        else:
            watcher = asyncio.create_task(self._watch(abort))
        try:
            with app.deadlines.start() as deadline:
                await self._attempts(prepared, abort, deadline)
        except ClientGone:
            meter.outcome = "cancelled"
        except TimeoutError:
            meter.outcome = "failed"
            limit = app.settings.request_seconds
            await self._tell(ApiError(504, f"The request took longer than {limit:g} s.", "timeout"))
        except ApiError as error:
            meter.outcome = meter.outcome or ("rejected" if error.status < 500 else "failed")
            await self._tell(error)
        except Exception:
            log.exception("request failed", request=self._id)
            meter.outcome = "failed"
            await self._tell(ApiError(500, "The gateway failed.", "internal_error"))
        finally:
            abort.abort()
            if meter.outcome is None:
                meter.outcome = "failed"
            app.spool.put(meter.final_row())
            self._observe()
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher

    async def _watch(self, abort: AbortHandle) -> None:
        """Waits for the client to leave, and cuts the engine off at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        abort.abort()

    # --- to a replica -------------------------------------------------------------------------------------------------

    async def _attempts(self, prepared: Prepared, abort: AbortHandle, deadline: Deadline) -> None:
        app, meter = self._app, self._meter
        relay = Relay(prepared, meter, self._reply, app.spool, self._began, app.settings.max_answer_bytes)
        tried: set[str] = set()
        in_a_row = lost = 0
        while True:
            place = self._pick(prepared, tried, in_a_row)
            if isinstance(place, NoReplica):
                place = await self._wait(prepared, abort, deadline, place, tried)
                in_a_row = 0
                if place.replica.uid in tried:
                    tried.clear()
            replica = place.replica
            try:
                self._paid = app.holds.budget(prepared.model.uid) if place.paid else None
                tried.add(replica.uid)
                in_a_row += 1
                await self._attempt(prepared, relay, replica, abort)
                return
            except Retry as retry:
                app.metrics.retries.labels(retry.reason).inc()
                log.debug("attempt failed", request=self._id, pod=replica.key, reason=retry.reason)
                # One that was taken and then lost may be what killed the engine: it does not get all of them.
                lost += retry.reason in ("lost", "stalled")
                if lost >= app.settings.attempts:
                    raise self._refusal(prepared, NoReplica("tried")) from None
            finally:
                app.leave(replica, place.tokens)

    def _pick(self, prepared: Prepared, tried: set[str], in_a_row: int) -> _Place | NoReplica:
        """A replica now, without waiting: for who comes first while nobody waits, and for one more try."""
        app, model = self._app, prepared.model
        attempts = self._meter.attempts
        if not attempts and model.uid in app.holds.rooms:
            return NoReplica("queue")
        if in_a_row >= app.settings.attempts:
            return NoReplica("tried")
        choice = app.fleet.choose(app.directory.snapshot, model, tried)
        if not isinstance(choice, Choice):
            return choice
        budget = app.holds.budget(model.uid)
        if attempts:
            if not budget.take(time.monotonic()):
                app.metrics.retries_put_off.inc()
                return NoReplica("tried")
        else:
            budget.sent()
        app.fleet.enter(choice.replica)
        return _Place(choice.replica, 0, bool(attempts))

    async def _wait(
        self, prepared: Prepared, abort: AbortHandle, deadline: Deadline, why: NoReplica, tried: set[str]
    ) -> _Place:
        """Waits until a replica can take the request. A stream hears comments meanwhile.

        Raises:
            ApiError: it may not wait, or has waited as long as it may.
            ClientGone: the client left.
        """
        app, meter, model = self._app, self._meter, prepared.model
        if abort.aborted:
            raise ClientGone
        if not model.limits.max_requests:
            raise self._refusal(prepared, why)
        began = time.monotonic()
        if self._held_since is None:
            self._held_since = began
        longest = longest_wait(model.limits, model.cold_start_seconds, app.settings.hold_seconds)
        until = self._held_since + longest
        # The encoder leaves room for several KiB behind its result.
        self._raw = bytes(memoryview(self._raw))
        size = len(self._raw)
        tokens = estimated_tokens(size, prepared.answer_bound, prepared.choices)
        again = meter.attempts > 0
        try:
            ticket = app.holds.enter(model, meter.tenant, prepared.word, size, tokens, frozenset(tried), again=again)
        except ApiError as error:
            meter.outcome = "refused" if error.status >= 500 else "rejected"
            raise
        try:
            abort.hold(ticket)
            deadline.pause()
            next_comment = until
            if prepared.stream:
                next_comment = (began if self._reply.started else self._held_since) + COMMENT_SECONDS
            while (now := time.monotonic()) < until:
                if now >= next_comment:
                    next_comment = now + COMMENT_SECONDS
                    await self._comment()
                if await ticket.wait(min(until, next_comment) - now):
                    self._check_key()
                    return _Place(ticket.take(), tokens, ticket.paid)
            meter.outcome = "expired"
            raise errors.unavailable(
                f"The model `{prepared.word}` had no free replica within {longest:g} s. Try again.",
                "hold_expired",
                ticket.retry_after,
            )
        except ApiError as error:
            meter.outcome = meter.outcome or ("refused" if error.status >= 500 else "rejected")
            raise
        finally:
            ticket.close()
            deadline.restart()
            waited = time.monotonic() - began
            meter.held_seconds = (meter.held_seconds or 0.0) + waited

    async def _comment(self) -> None:
        self._meter.status = 200
        try:
            await self._reply.comment()
        except TimeoutError:
            raise ClientGone from None

    async def _attempt(self, prepared: Prepared, relay: Relay, replica: Replica, abort: AbortHandle) -> None:
        app, meter = self._app, self._meter
        key = app.key_ring.key_for(replica.install_key, replica.model_uid)
        if key is None:
            log.warning("no install key for a pod", pod=replica.key, fingerprint=replica.install_key)
            raise Retry("no_key")
        heard = app.fleet.heard.get(replica.uid)
        if heard is None:
            app.metrics.fallbacks.inc()
        meter.attempts += 1
        meter.replica = replica
        meter.engine_boot = heard.engine_boot if heard else None
        target = Target(replica.ip or "", app.engine_port(replica))
        there = app.fleet.attempts[replica.uid]
        there.add(abort)
        try:
            try:
                head, body = self._to_send(prepared, relay, target, key)
                answer = await app.upstream.start(target, head, body, abort)
            except StaleConnection:
                head, body = self._to_send(prepared, relay, target, key)
                answer = await app.upstream.start(target, head, body, abort)
            try:
                await relay.run(answer, self._replica_header(replica))
            except ApiError:
                self._began_well()  # the engine judged the request, so it lives
                raise
            finally:
                answer.release()
        except Aborted:
            raise ClientGone from None
        except ConnectFailed:
            raise Retry("connect") from None
        except GivenUp:
            raise Retry("stalled") from None
        except UpstreamError:
            raise Retry("lost") from None
        finally:
            there.discard(abort)

    def _to_send(self, prepared: Prepared, relay: Relay, target: Target, key: str) -> tuple[bytes, bytes]:
        """Each time under another id: an engine refuses one that it still has, and it learns late that we left."""
        raw = self._raw
        self._sent += 1
        if self._sent > 1:
            relay.rid = rid = f"{self._id}.{self._sent}".encode()
            raw = raw.replace(b'"rid":"%b"' % self._id.encode(), b'"rid":"%b"' % rid, 1)
        return self._head(target, key, len(raw), prepared.stream), raw

    def _began(self) -> None:
        """The engine's answer begins to go out."""
        self._abort.answering = True
        self._meter.answer_began()
        if self._paid is not None:
            self._began_well()

    def _began_well(self) -> None:
        if self._paid is not None:
            self._paid.answered()
            self._paid = None

    def _refusal(self, prepared: Prepared, why: NoReplica) -> ApiError:
        meter = self._meter
        meter.outcome = "refused"
        meter.replica = meter.engine_boot = None
        return errors.unavailable(
            f"The model `{prepared.word}` cannot serve right now: {why.message}. Try again.",
            "no_replica",
            _RETRY_AFTER[why.reason],
        )

    # --- answering --------------------------------------------------------------------------------------------------

    def _identity(self) -> Identity:
        header = self._headers.get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized(401, "No API key. Send `Authorization: Bearer <key>`.", "missing_api_key")
        self._key_hash = hashlib.sha256(key).hexdigest()
        return self._check_key()

    def _check_key(self) -> Identity:
        """Whose the key is; again after waiting, for it may have been taken back meanwhile."""
        found = authenticate(self._app.directory.snapshot.keys, self._key_hash, datetime.now(UTC))
        if isinstance(found, Denied):
            raise _unauthorized(*_DENIED[found.reason])
        return found

    def _head(self, target: Target, key: str, length: int, stream: bool) -> bytes:
        host = f"[{target.host}]" if ":" in target.host else target.host
        trace = self._trace
        # The client's headers stay here: some of them would steer the engine.
        return (
            f"POST {self._path} HTTP/1.1\r\nhost: {host}:{target.port}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\naccept: {'text/event-stream' if stream else 'application/json'}\r\n"
            f"x-request-id: {self._id}\r\ncontent-length: {length}\r\n"
            f"{f'traceparent: {trace.decode()}' + chr(13) + chr(10) if trace else ''}\r\n"
        ).encode()

    async def _tell(self, error: ApiError) -> None:
        if not self._reply.started:
            self._meter.status = error.status
        # A client that does not read must not keep the request alive; the server drops its connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                await self._reply.error(error)

    def _replica_header(self, replica: Replica) -> Headers:
        return ((b"x-shoal-replica", replica.key.encode()),) if self._app.settings.replica_header else ()

    def _observe(self) -> None:
        meter = self._meter
        series = self._app.metrics.of(meter.model, self._path)
        series.duration[meter.outcome or "failed"].observe(meter.seconds)
        if (first := meter.seconds_to_first_byte) is not None:
            series.first_token.observe(first)
        if meter.held_seconds is not None:
            series.held.observe(meter.held_seconds)
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
