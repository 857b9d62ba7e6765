"""Copies of requests that go to the mirror of a route's rule. Their answers are thrown away.

A copy never waits and is never sent again: it is dropped where its Model has no replica with free capacity, and where
requests for that Model wait. What engines compute for it is recorded as an attempt, which is billed to nobody, with the
id of the request in `mirrorOf`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from shoal.core.access import KeyIdentity
from shoal.core.routing.choice import Choice, NoReplica
from shoal.core.routing.routes import TargetRef
from shoal.gateway import ids, redact
from shoal.gateway.accepted import AcceptedRequest, InFlight
from shoal.gateway.arrival import Arrival
from shoal.gateway.bigbodies import BIG
from shoal.gateway.dispatch import Dispatch
from shoal.gateway.preparation import ClientBody, Preparation
from shoal.gateway.prepared import Prepared
from shoal.gateway.reply import Reply
from shoal.gateway.routechoice import Routed
from shoal.gateway.shared import Gateway
from shoal.gateway.target import BaseTarget
from shoal.gateway.upstream import AbortHandle, RequestBody
from shoal.gateway.waiter import ClientGone
from shoal.metering.meter import Meter
from shoal.net.errors import ApiError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a request."""

    identity: KeyIdentity
    prepared: Prepared
    raw: RequestBody
    """The body for the engine."""
    meter: Meter


class MirrorTarget(BaseTarget):
    """A Model as the target of a copy: it takes free capacity only."""

    __slots__ = ()

    def choose(self, tried: object, in_a_row: int) -> InFlight | NoReplica:
        request = self._request
        app, model = request.app, request.prepared.model
        if in_a_row:
            return NoReplica("tried")
        if model.uid in app.holds.queues:
            return NoReplica("queue")
        choice = app.fleet.choose(app.directory.snapshot, model, (), request.prepared.prompt)
        if not isinstance(choice, Choice):
            return choice
        if app.fleet.allowance(choice.replica, kv_percent=model.kv_percent, share=1.0).requests <= 0:
            return NoReplica("turned-away")
        app.fleet.enter(choice.replica, pick=choice.pick)
        basis = request.basis(choice.pick, choice.among)
        return InFlight(choice.replica, 0, False, choice.pick, basis)

    async def wait_for(self, why: NoReplica, tried: set[str]) -> InFlight:
        raise self._request.refusal(why)


def copied(
    app: Gateway,
    arrival: Arrival,
    preparation: Preparation,
    identity: KeyIdentity,
    body: ClientBody,
    routed: Routed,
) -> Copy | None:
    """A copy of a request for the mirror of its route's rule; None: the rule has none, or the copy is dropped, because
    the mirror cannot do the request, or because the body is too large to be decoded again."""
    if routed.mirror is None:
        return None
    copy = None
    with contextlib.suppress(ApiError):
        copy = _prepared(app, arrival, preparation, identity, body, routed.route, routed.mirror)
    if copy is None:
        app.metrics.mirrored.labels("dropped").inc()
    return copy


def _prepared(
    app: Gateway,
    arrival: Arrival,
    preparation: Preparation,
    identity: KeyIdentity,
    body: ClientBody,
    route: str,
    mirror: TargetRef,
) -> Copy | None:
    """Raises ApiError."""
    index, original = app.directory.snapshot.model_index, preparation.meter
    declared = index.routes.get(route)
    model = None if declared is None else index.target(declared, mirror, identity)
    if model is None or body.size >= BIG:
        return None
    id = ids.uuid7()
    ready = preparation.again(identity, body, model, Routed(route, mirror), id=id)
    if ready is None:
        return None
    prepared = ready.prepared
    meter = Meter(
        id,
        app.settings.installation,
        identity,
        model,
        endpoint=arrival.path,
        model_name=prepared.model_name,
        stream=prepared.stream,
        gateway=app.boot,
        route=route,
        mirror_of=original.id,
    )
    meter.free, meter.media, meter.repeated_bytes = original.free, original.media, original.repeated_bytes
    return Copy(identity, prepared, ready.body, meter)


def start_copy(app: Gateway, copy: Copy) -> None:
    """Sends a copy in a task of the gateway, or drops it."""
    tenant, size = copy.identity.tenant, len(copy.raw)
    try:
        app.body_budget.take(tenant, size)
    except ApiError:
        app.metrics.mirrored.labels("dropped").inc()
        return
    if not app.copies.start(lambda: _send(app, copy)):
        app.body_budget.give(tenant, size)
        app.metrics.mirrored.labels("dropped").inc()


async def _send(app: Gateway, copy: Copy) -> None:
    meter, abort = copy.meter, AbortHandle()
    identity: Callable[[], KeyIdentity] = lambda: copy.identity  # noqa: E731
    try:
        with app.deadlines_of(copy.prepared.model).start() as deadline:
            reply = Reply(None, _discard, meter.id, None, app)
            request = AcceptedRequest(app, copy.prepared, copy.raw, meter, reply, abort, deadline, None, identity)
            await Dispatch(request, MirrorTarget(request), "").run()
    except (ApiError, ClientGone, TimeoutError):
        meter.outcome = meter.outcome or "failed"
    except Exception as error:
        log.error("a copy failed", request=meter.id, **redact.redact_error(error))
        meter.outcome = "failed"
    finally:
        abort.abort()
        app.body_budget.give(copy.identity.tenant, len(copy.raw))
        app.metrics.mirrored.labels("sent" if meter.attempts else "dropped").inc()
        if meter.count_source != "none":
            app.spool.put(meter.attempt_row())


async def _discard(_message: dict[str, Any]) -> None:
    """Nobody reads the answer."""
