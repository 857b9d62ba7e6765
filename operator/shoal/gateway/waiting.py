"""How a request waits: in its Model's room, or for its adapter; a stream hears comments meanwhile."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from shoal.core.access import Identity
from shoal.core.hold.limits import longest_wait, retry_after
from shoal.core.hold.room import estimated_tokens
from shoal.core.routing import NoReplica, Replica
from shoal.gateway import errors
from shoal.gateway.deadlines import Deadline
from shoal.gateway.errors import ApiError
from shoal.gateway.meter import Meter
from shoal.gateway.relay import Prepared
from shoal.gateway.reply import Reply
from shoal.gateway.upstream import Abortable, AbortHandle
from shoal.gateway.waiter import ClientGone

if TYPE_CHECKING:
    from shoal.gateway.app import Gateway
    from shoal.gateway.tracing import RequestSpans

COMMENT_SECONDS: Final = 10.0
"""A stream that waits hears a comment so often. Until the first one, a 503 is still possible."""
_RETRY_AFTER: Final = {
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


class Waiting:
    """One request, as far as it waits."""

    __slots__ = (
        "_abort",
        "_app",
        "_check_key",
        "_deadline",
        "_held_since",
        "_meter",
        "_prepared",
        "_raw",
        "_reply",
        "_spans",
    )

    # Set by Attempts: one more call would be a hundredth of what a small request costs here.
    _app: "Gateway"
    _prepared: Prepared
    _raw: bytes
    _meter: Meter
    _reply: Reply
    _abort: AbortHandle
    _deadline: Deadline
    _check_key: Callable[[], Identity]
    _held_since: float | None
    _spans: "RequestSpans | None"

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
        ticket.check = self._recheck
        app.metrics.waits(model.key, prepared.path)
        try:
            await self._stand(ticket, why.reason)
            return Place(ticket.take(), tokens, ticket.paid)
        finally:
            ticket.close()

    def _weight(self) -> tuple[int, int]:
        """Bytes of a request that waits, and the tokens that it will hold."""
        # The encoder leaves room for several KiB behind its result.
        self._raw = bytes(memoryview(self._raw))
        size = len(self._raw)
        return size, estimated_tokens(size, self._prepared.answer_bound, self._prepared.choices)

    async def _stand(self, standing: Standing, why: str, seconds: float = math.inf) -> bool:
        """Waits there until told to go on, for `seconds` at most; False: they are over. `why` is a reason of NoReplica.

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
            if self._spans is not None:
                self._spans.held(began, why, meter.outcome or ("left" if self._abort.aborted else "released"))

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

    def _refusal(self, why: NoReplica) -> ApiError:
        meter, model = self._meter, self._prepared.model
        meter.outcome = "refused"
        meter.replica = meter.engine_boot = None
        # Nothing has started yet, so a whole cold start is to come.
        after = _RETRY_AFTER[why.reason] if why.reason != "none" else retry_after(model.cold_start_seconds, 0.0)
        return errors.unavailable(
            f"The model `{self._prepared.word}` cannot serve right now: {why.message}. Try again.", "no_replica", after
        )
