"""One accepted request, as its dispatch and its target see it, and how it waits.

A waiting request is in its Model's hold queue, or waits for its adapter (`waiter.py`). A stream gets comments
meanwhile.
"""

import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.core.access import KeyIdentity
from shoal.core.hold.capacity import estimated_tokens
from shoal.core.hold.limits import longest_wait, retry_after
from shoal.core.routing.basis import AdapterStep, Basis, UnscoredChoice, basis_of
from shoal.core.routing.choice import NoReplica
from shoal.core.routing.replica import Replica
from shoal.core.routing.score import Pick
from shoal.gateway.carrier import Carrier
from shoal.gateway.deadlines import Deadline
from shoal.gateway.prepared import Prepared
from shoal.gateway.reply import Reply
from shoal.gateway.shared import Gateway
from shoal.gateway.upstream import AbortHandle, RequestBody
from shoal.gateway.waiter import ClientGone, Waiter
from shoal.metering.meter import Meter
from shoal.net import errors
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.tracing import RequestSpans

COMMENT_SECONDS: Final = 10.0
"""A waiting stream gets a comment at this interval. Until the first one, a 503 is still possible."""
_LOOK_AGAIN_SECONDS: Final = 2.0
"""After this time a waiting request looks again whether a fallback has a replica."""
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
    pick: Pick | None = None
    """Why this replica, if it was chosen by its score."""
    basis: Basis | None = None
    """Why, if it was not, or if an adapter was loaded there for the request."""


class FellBack(Exception):
    """The request leaves its target for another one; `why` as in "it waited 20 s"."""

    def __init__(self, prepared: Prepared, why: str) -> None:
        super().__init__("the request goes to a fallback")
        self.prepared = prepared
        self.why = why


async def _no_fallback() -> Prepared | None:
    """For a request without a route."""
    return None


class AcceptedRequest:
    """What is known of one accepted request. `check_key` raises ApiError when the request's API key was revoked.
    `fall_back` returns the request as one for a fallback of its route that has a replica; None: there is none."""

    __slots__ = (
        "_attempts_before",
        "_look_at",
        "abort",
        "app",
        "beyond_reach",
        "can_fall_back",
        "carrier",
        "check_key",
        "deadline",
        "fall_back",
        "hops",
        "lacking",
        "leave_seconds",
        "meter",
        "prepared",
        "raw",
        "reply",
        "spans",
    )

    def __init__(
        self,
        app: Gateway,
        prepared: Prepared,
        raw: RequestBody,
        meter: Meter,
        reply: Reply,
        abort: AbortHandle,
        deadline: Deadline,
        spans: "RequestSpans | None",
        check_key: Callable[[], KeyIdentity],
        *,
        can_fall_back: Callable[[], Awaitable[bool]] | None = None,
        leave_seconds: float = math.inf,
        fall_back: Callable[[], Awaitable[Prepared | None]] = _no_fallback,
        carrier: Carrier | None = None,
        hops: int = 0,
    ) -> None:
        self.app = app
        self.prepared = prepared
        self.raw = raw
        """The body for the engine; trimmed when the request waits."""
        self.meter = meter
        self.reply = reply
        self.abort = abort
        self.deadline = deadline
        self.spans = spans
        self.check_key = check_key
        self.can_fall_back = can_fall_back
        """Whether a fallback of its route could take it now; None: none is left that was not tried yet."""
        self.leave_seconds = leave_seconds
        """Waiting time, past or expected, after which the request goes to a fallback."""
        self.fall_back = fall_back
        self.carrier = carrier
        """The proxy that carries the request; None: the gateway does it itself."""
        self.lacking: frozenset[tuple[str, str | None]] = frozenset()
        """Types and versions of engines that do not serve the endpoint (`Replica.runs`)."""
        self.beyond_reach = False
        """The proxy cannot send it to a replica of its target."""
        self.hops = hops
        """Gateways of Shoal that have sent the request on, without this one."""
        self._attempts_before = meter.attempts
        self._look_at = -math.inf
        """Until then no fallback has a replica, as far as is known."""

    @property
    def attempts(self) -> int:
        """Attempts at this target. Those at a target that the request has left are none of its retries."""
        return self.meter.attempts - self._attempts_before

    def out_of_reach(self) -> set[str]:
        """The uids of replicas that the request's carrier cannot send it to.

        Raises:
            ApiError: it can send only to some endpoints, and none of them is a replica.
        """
        app, carrier = self.app, self.carrier
        if carrier is None or not carrier.limited:
            return set()
        found = app.directory.snapshot.replicas_of(self.prepared.model)
        beyond = {replica.uid for replica in found if not carrier.takes(app.target(replica))}
        if len(beyond) == len(found):
            raise self.not_reached()
        return beyond

    def suits(self, replica: Replica) -> bool:
        """Whether the replica's engine does what the request asks for, as far as is known."""
        if self.lacking and replica.runs in self.lacking:
            return False
        return self.prepared.suits(replica)

    def not_reached(self) -> ApiError:
        """The error for a request that its carrier can send to no replica."""
        self.beyond_reach = True
        return self.refusal(NoReplica("none"))

    async def wait_in_queue(
        self, why: NoReplica, tried: set[str], recheck: Callable[[], None], *, chooses_again: bool = False
    ) -> InFlight:
        """Waits in the Model's hold queue until a replica can take the request. `recheck` raises ApiError if the client
        lost what it needs. `chooses_again`: the request gives the replica back at once and chooses another one.

        Raises:
            ApiError: the request may not wait, or its time to wait is over.
            ClientGone: the client left.
        """
        app, meter, prepared = self.app, self.meter, self.prepared
        model = prepared.model
        if self.abort.aborted:
            raise ClientGone
        if not model.limits.max_requests:
            raise self.refusal(why)
        size, tokens = self.weight()
        again = self.attempts > 0
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
                reason=why.reason,
                prompt=None if chooses_again else prepared.prompt,
                suits=self.suits,
            )
        except ApiError as error:
            meter.cold = meter.cold or app.holds.starts(model)
            meter.outcome = "refused" if error.status >= 500 else "rejected"
            raise
        ticket.check = recheck
        app.metrics.hold_began(model.key, prepared.path)
        try:
            await self.wait_with(ticket, recheck)
            basis = self.basis(ticket.pick, ticket.among)
            return InFlight(ticket.take(), tokens, ticket.paid, ticket.pick, basis)
        finally:
            ticket.close()

    async def wait_with(self, waiter: Waiter, recheck: Callable[[], None], seconds: float = math.inf) -> bool:
        """Waits until the request may continue, for at most `seconds`; False when they are over. The caller closes
        `waiter`. `recheck` is called at the end of the wait.

        Raises:
            ApiError: the time to wait is over, or the request may not continue.
            ClientGone: the client left.
            FellBack: a fallback of its route takes the request.
        """
        meter, prepared, deadline = self.meter, self.prepared, self.deadline
        began = time.monotonic()
        if deadline.held_since is None:
            deadline.held_since = began
        held_since = deadline.held_since
        longest = self._longest_wait()
        # A replica that comes meanwhile first takes those that have waited longer.
        meter.cold = meter.cold or waiter.starts
        deadline.pause()
        try:
            self.abort.hold(waiter)
            next_comment = math.inf
            if prepared.stream and self.carrier is None:
                next_comment = (began if self.reply.started else held_since) + COMMENT_SECONDS
            # At the end the Model's status is asked again: the class that wakes may be a slower one than the last.
            while (now := time.monotonic()) < held_since + longest or now < held_since + (
                longest := max(longest, self._longest_wait())
            ):
                if now >= next_comment:
                    next_comment = now + COMMENT_SECONDS
                    await self._comment()
                leave_at, why = self._leaves(waiter, held_since, now)
                if now >= leave_at:
                    following = await self.fall_back()
                    if self.abort.aborted:
                        raise ClientGone
                    if following is not None:
                        meter.cold = meter.cold or waiter.starts
                        raise FellBack(following, why)
                    self._look_at = now + _LOOK_AGAIN_SECONDS
                    continue
                going = await waiter.wait(min(held_since + longest, next_comment, began + seconds, leave_at) - now)
                if going or time.monotonic() - began >= seconds:
                    recheck()
                    return going
            meter.outcome = "expired"
            raise errors.unavailable(
                f"The model `{prepared.model_name}` had no free replica within {longest:g} s. Try again.",
                "hold_expired",
                waiter.retry_after,
            )
        except ApiError as error:
            meter.outcome = meter.outcome or ("refused" if error.status >= 500 else "rejected")
            raise
        finally:
            deadline.restart()
            meter.held_seconds = (meter.held_seconds or 0.0) + time.monotonic() - began
            if self.spans is not None:
                ended = meter.outcome or ("left" if self.abort.aborted else "released")
                self.spans.held(began, waiter.reason, ended)

    def _longest_wait(self) -> float:
        """Seconds that the request may be held in all, by what is known of the Model now."""
        model = self.prepared.model
        now = self.app.directory.snapshot.models.get(model.key)
        if now is not None and now.uid == model.uid:
            model = now
        return longest_wait(model.limits, model.cold_start_seconds, self.app.settings.hold_seconds)

    def _leaves(self, waiter: Waiter, held_since: float, now: float) -> tuple[float, str]:
        """When the request leaves for a fallback, and why."""
        limit = self.leave_seconds
        if limit == math.inf:
            return math.inf, ""
        left = waiter.expected_seconds
        if left is not None and left > limit:
            why = f"{left:.0f} s of its measured cold start are left, more than the {limit:g} s of whenWaitSeconds"
            return max(now, self._look_at), why
        return max(held_since + limit, self._look_at), f"the request waited {now - held_since:.0f} s"

    def basis(self, pick: Pick | None, among: int, step: AdapterStep = "ready") -> Basis | None:
        """Why a replica was chosen `among` so many; None: by its score."""
        if pick is not None and step == "ready":
            return None
        return basis_of(
            UnscoredChoice(
                among,
                step,
                scores=self.app.fleet.scores is not None,
                sent_again=self.meter.deaths > 0,
                computes=not self.meter.free,
                prompt=self.prepared.prompt is not None,
            )
        )

    def weight(self) -> tuple[int, int]:
        """Size of a waiting request in bytes, and its estimated tokens."""
        if isinstance(self.raw, bytes):
            # The encoder's result has several KiB of unused capacity.
            self.raw = bytes(memoryview(self.raw))
        size = len(self.raw)
        read = self.meter.read_bytes(size)
        tokens = estimated_tokens(read, self.prepared.answer_bound, self.prepared.choices)
        return size + sum(len(added or b"") for added in self.prepared.added.values()), tokens

    def refusal(self, why: NoReplica) -> ApiError:
        """The error for a request that no replica takes and that may not wait."""
        meter, model = self.meter, self.prepared.model
        meter.outcome = "refused"
        meter.replica = meter.engine_boot = None
        # Nothing has started yet, so a whole cold start lies ahead.
        after = _RETRY_AFTER[why.reason] if why.reason != "none" else retry_after(model.cold_start_seconds, 0.0)
        return errors.unavailable(
            f"The model `{self.prepared.model_name}` cannot serve right now: {why.message}. Try again.",
            "no_replica",
            after,
        )

    async def _comment(self) -> None:
        self.meter.status = 200
        try:
            await self.reply.comment()
        except TimeoutError:
            raise ClientGone from None
