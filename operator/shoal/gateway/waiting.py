"""How a request waits: in its Model's hold queue, or for its adapter. A stream gets comments meanwhile."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from shoal.core.access import KeyIdentity
from shoal.core.hold.capacity import estimated_tokens
from shoal.core.hold.limits import longest_wait, retry_after
from shoal.core.routing.choice import NoReplica, Replica
from shoal.gateway.deadlines import Deadline
from shoal.gateway.relay import Prepared
from shoal.gateway.reply import Reply
from shoal.gateway.upstream import Abortable, AbortHandle
from shoal.gateway.waiter import ClientGone
from shoal.metering.meter import Meter
from shoal.net import errors
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.app import Gateway
    from shoal.gateway.tracing import RequestSpans

COMMENT_SECONDS: Final = 10.0
"""A waiting stream gets a comment at this interval. Until the first one, a 503 is still possible."""
_RETRY_AFTER: Final = {
    "not-ready": 10,
    "turned-away": 5,
    "tried": 2,
    "queue": 2,
    "no-adapters": 5,
    "no-lease": 2,
    "refused": 5,
}


class InFlight(NamedTuple):
    """A replica at which the request counts as in flight."""

    replica: Replica
    tokens: int
    paid: bool
    """The attempt is a retry, charged to the Model's retry budget."""


class WaitingPlace(Abortable, Protocol):
    """Where a request waits."""

    @property
    def retry_after(self) -> int:
        """Seconds after which the client should try again."""
        ...

    async def wait(self, seconds: float) -> bool:
        """True when the request may continue; False after `seconds`. Raises ApiError, ClientGone."""
        ...


class Waiting:
    """The waiting part of one request's attempts."""

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

    # Set by Attempts: a call of `super().__init__` would be a hundredth of a small request's cost.
    _app: "Gateway"
    _prepared: Prepared
    _raw: bytes
    _meter: Meter
    _reply: Reply
    _abort: AbortHandle
    _deadline: Deadline
    _check_key: Callable[[], KeyIdentity]
    _held_since: float | None
    _spans: "RequestSpans | None"

    async def _wait(self, why: NoReplica, tried: set[str]) -> InFlight:
        """Waits until a replica can take the request. A stream gets comments meanwhile.

        Raises:
            ApiError: the request may not wait, or its time to wait is over.
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
                model,
                meter.tenant,
                prepared.model_name,
                size,
                tokens,
                frozenset(tried),
                prepared.priority,
                is_retry=again,
            )
        except ApiError as error:
            meter.outcome = "refused" if error.status >= 500 else "rejected"
            raise
        ticket.check = self._recheck
        app.metrics.hold_began(model.key, prepared.path)
        try:
            await self._wait_at(ticket, why.reason)
            return InFlight(ticket.take(), tokens, ticket.paid)
        finally:
            ticket.close()

    def _weight(self) -> tuple[int, int]:
        """Size of a waiting request in bytes, and its estimated tokens."""
        # The encoder's result has several KiB of unused capacity.
        self._raw = bytes(memoryview(self._raw))
        size = len(self._raw)
        return size, estimated_tokens(size, self._prepared.answer_bound, self._prepared.choices)

    async def _wait_at(self, place: WaitingPlace, why: str, seconds: float = math.inf) -> bool:
        """Waits at `place` until the request may continue, for at most `seconds`; False when they are over. `why` is a
        reason of NoReplica.

        Raises:
            ApiError: the time to wait is over, or the request may not continue.
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
            self._abort.hold(place)
            deadline.pause()
            next_comment = math.inf
            if prepared.stream:
                next_comment = (began if self._reply.started else self._held_since) + COMMENT_SECONDS
            while (now := time.monotonic()) < until:
                if now >= next_comment:
                    next_comment = now + COMMENT_SECONDS
                    await self._comment()
                going = await place.wait(min(until, next_comment, began + seconds) - now)
                if going or time.monotonic() - began >= seconds:
                    self._recheck()
                    return going
            meter.outcome = "expired"
            raise errors.unavailable(
                f"The model `{prepared.model_name}` had no free replica within {longest:g} s. Try again.",
                "hold_expired",
                place.retry_after,
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
        """Checks again what the client may have lost while it waited: its key, or the use of the Model. Raises
        ApiError."""
        index, name = self._app.directory.snapshot.model_index, self._prepared.model_name
        now, then = index.find(name, self._check_key()), self._prepared.model
        if now is None or now.uid != then.uid or now.address != then.address:
            raise errors.model_not_found(name)

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
        # Nothing has started yet, so a whole cold start lies ahead.
        after = _RETRY_AFTER[why.reason] if why.reason != "none" else retry_after(model.cold_start_seconds, 0.0)
        return errors.unavailable(
            f"The model `{self._prepared.model_name}` cannot serve right now: {why.message}. Try again.",
            "no_replica",
            after,
        )
