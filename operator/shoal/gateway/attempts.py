"""From an accepted request to the end of its answer: which replica, waiting for one, another one after a failure."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import structlog

from shoal.core.access import Identity
from shoal.core.hold.limits import longest_wait
from shoal.core.hold.retries import RetryBudget
from shoal.core.hold.room import estimated_tokens
from shoal.core.routing import Choice, NoReplica, Replica
from shoal.gateway import errors
from shoal.gateway.asgi import Headers
from shoal.gateway.deadlines import Deadline
from shoal.gateway.errors import ApiError
from shoal.gateway.meter import Meter
from shoal.gateway.relay import LACKS_ADAPTER, Prepared, Relay, Retry
from shoal.gateway.reply import Reply
from shoal.gateway.ticket import ClientGone
from shoal.gateway.upstream import (
    Abortable,
    Aborted,
    AbortHandle,
    ConnectFailed,
    GivenUp,
    StaleConnection,
    Target,
    UpstreamError,
)

if TYPE_CHECKING:
    from shoal.gateway.app import Gateway

log = structlog.get_logger()

COMMENT_SECONDS: Final = 10.0
"""A stream that waits hears a comment so often. Until the first one, a 503 is still possible."""
_RETRY_AFTER: Final = {
    "none": 30,
    "not-ready": 10,
    "turned-away": 5,
    "tried": 2,
    "queue": 2,
    "no-adapters": 5,
    "no-lease": 2,
    "refused": 5,
}


class Place(NamedTuple):
    """A replica at which the request counts as in flight."""

    replica: Replica
    tokens: int
    paid: bool
    """A retry that the Model's budget was charged for."""


class Standing(Abortable, Protocol):
    """Where a request waits."""

    @property
    def retry_after(self) -> int:
        """Seconds after which another try makes sense."""
        ...

    async def wait(self, seconds: float) -> bool:
        """Whether it may go on; False after `seconds`. Raises ApiError, ClientGone."""
        ...


class Attempts:
    """One request's. `check_key` raises ApiError when the key that it came with was taken back."""

    __slots__ = (
        "_abort",
        "_app",
        "_check_key",
        "_deadline",
        "_held_since",
        "_id",
        "_meter",
        "_paid",
        "_path",
        "_prepared",
        "_raw",
        "_relay",
        "_reply",
        "_sent",
        "_trace",
    )

    def __init__(
        self,
        app: "Gateway",
        prepared: Prepared,
        raw: bytes,
        meter: Meter,
        reply: Reply,
        abort: AbortHandle,
        deadline: Deadline,
        trace: bytes | None,
        check_key: Callable[[], Identity],
    ) -> None:
        self._app = app
        self._prepared = prepared
        self._raw = raw
        self._meter = meter
        self._reply = reply
        self._abort = abort
        self._deadline = deadline
        self._trace = trace
        self._check_key = check_key
        self._id = meter.id
        self._path = prepared.path
        self._relay = Relay(prepared, meter, reply, app.spool, app.settings.max_answer_bytes)
        self._sent = 0
        self._held_since: float | None = None
        self._paid: RetryBudget | None = None

    async def run(self) -> None:
        """
        Raises:
            ApiError: what the client has to be told instead of an answer.
            ClientGone: the client left.
        """
        app, prepared = self._app, self._prepared
        tried: set[str] = set()
        in_a_row = lost = 0
        while True:
            place = self._pick(tried, in_a_row)
            if isinstance(place, NoReplica):
                place = await self._wait(place, tried)
                in_a_row = 0
                if place.replica.uid in tried:
                    tried.clear()
            replica = place.replica
            try:
                self._paid = app.holds.budget(prepared.model.uid) if place.paid else None
                tried.add(replica.uid)
                in_a_row += 1
                await self._attempt(replica)
                return
            except Retry as retry:
                app.metrics.retries.labels(retry.reason).inc()
                log.debug("attempt failed", request=self._id, pod=replica.key, reason=retry.reason)
                # One that was taken and then lost may be what killed the engine: it does not get all of them.
                lost += retry.reason in ("lost", "stalled", LACKS_ADAPTER)
                if lost >= app.settings.attempts:
                    raise self._refusal(NoReplica("tried")) from None
            finally:
                app.leave(replica, place.tokens)

    def _pick(self, tried: set[str], in_a_row: int) -> Place | NoReplica:
        """A replica now, without waiting: for who comes first while nobody waits, and for one more try."""
        app, model = self._app, self._prepared.model
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
        return Place(choice.replica, 0, bool(attempts))

    async def _wait(self, why: NoReplica, tried: set[str]) -> Place:
        """Waits until a replica can take the request. A stream hears comments meanwhile.

        Raises:
            ApiError: it may not wait, or has waited as long as it may.
            ClientGone: the client left.
        """
        app, meter, prepared = self._app, self._meter, self._prepared
        model = prepared.model
        if self._abort.aborted:
            raise ClientGone
        if not model.limits.max_requests:
            raise self._refusal(why)
        size, tokens = self._weight()
        again = meter.attempts > 0
        try:
            ticket = app.holds.enter(
                model, meter.tenant, prepared.word, size, tokens, frozenset(tried), prepared.priority, again=again
            )
        except ApiError as error:
            meter.outcome = "refused" if error.status >= 500 else "rejected"
            raise
        try:
            await self._stand(ticket)
            return Place(ticket.take(), tokens, ticket.paid)
        finally:
            ticket.close()

    def _weight(self) -> tuple[int, int]:
        """Bytes of a request that waits, and the tokens that it will hold."""
        # The encoder leaves room for several KiB behind its result.
        self._raw = bytes(memoryview(self._raw))
        size = len(self._raw)
        return size, estimated_tokens(size, self._prepared.answer_bound, self._prepared.choices)

    async def _stand(self, standing: Standing, seconds: float = math.inf) -> bool:
        """Waits there until told to go on, for `seconds` at most; False: they are over.

        Raises:
            ApiError: it has waited as long as it may, or may not go on.
            ClientGone: the client left.
        """
        meter, prepared, deadline = self._meter, self._prepared, self._deadline
        began = time.monotonic()
        if self._held_since is None:
            self._held_since = began
        model = prepared.model
        longest = longest_wait(model.limits, model.cold_start_seconds, self._app.settings.hold_seconds)
        until = self._held_since + longest
        try:
            self._abort.hold(standing)
            deadline.pause()
            next_comment = math.inf
            if prepared.stream:
                next_comment = (began if self._reply.started else self._held_since) + COMMENT_SECONDS
            while (now := time.monotonic()) < until:
                if now >= next_comment:
                    next_comment = now + COMMENT_SECONDS
                    await self._comment()
                going = await standing.wait(min(until, next_comment, began + seconds) - now)
                if going or time.monotonic() - began >= seconds:
                    self._recheck()
                    return going
            meter.outcome = "expired"
            raise errors.unavailable(
                f"The model `{prepared.word}` had no free replica within {longest:g} s. Try again.",
                "hold_expired",
                standing.retry_after,
            )
        except ApiError as error:
            meter.outcome = meter.outcome or ("refused" if error.status >= 500 else "rejected")
            raise
        finally:
            deadline.restart()
            meter.held_seconds = (meter.held_seconds or 0.0) + time.monotonic() - began

    def _recheck(self) -> None:
        """What the client may have lost while it waited: its key, or the use of the Model. Raises ApiError."""
        words, word = self._app.directory.snapshot.words, self._prepared.word
        now, then = words.find(word, self._check_key()), self._prepared.model
        if now is None or now.uid != then.uid or now.address != then.address:
            raise errors.model_not_found(word)

    async def _comment(self) -> None:
        self._meter.status = 200
        try:
            await self._reply.comment()
        except TimeoutError:
            raise ClientGone from None

    async def _attempt(self, replica: Replica) -> None:
        app, meter, abort = self._app, self._meter, self._abort
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
                head, body = self._to_send(target, key)
                answer = await app.upstream.start(target, head, body, abort)
            except StaleConnection:
                head, body = self._to_send(target, key)
                answer = await app.upstream.start(target, head, body, abort)
            try:
                await self._relay.run(answer, self._replica_header(replica), self._began)
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

    def _to_send(self, target: Target, key: str) -> tuple[bytes, bytes]:
        """Each time under another id: an engine refuses one that it still has, and it learns late that we left."""
        raw = self._raw
        self._sent += 1
        if self._sent > 1:
            self._relay.rid = rid = f"{self._id}.{self._sent}".encode()
            raw = raw.replace(b'"rid":"%b"' % self._id.encode(), b'"rid":"%b"' % rid, 1)
        return self._head(target, key, len(raw), self._prepared.stream), raw

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

    def _refusal(self, why: NoReplica) -> ApiError:
        meter = self._meter
        meter.outcome = "refused"
        meter.replica = meter.engine_boot = None
        return errors.unavailable(
            f"The model `{self._prepared.word}` cannot serve right now: {why.message}. Try again.",
            "no_replica",
            _RETRY_AFTER[why.reason],
        )

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

    def _replica_header(self, replica: Replica) -> Headers:
        return ((b"x-shoal-replica", replica.key.encode()),) if self._app.settings.replica_header else ()
