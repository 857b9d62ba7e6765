"""Sends an accepted request to a replica that its target chooses, and to another one after a failure, until the answer
has ended."""

import asyncio
import time
from typing import Final, Literal

import structlog

from shoal.core.hold import retries
from shoal.core.hold.retries import RetryBudget
from shoal.core.routing.choice import NoReplica, has_ended
from shoal.core.routing.replica import Replica
from shoal.core.routing.score import Pick
from shoal.engine.wire import NO_ENDPOINT, EngineCall, SpeculatedAnswers, Wire
from shoal.engine.wires import wire_of
from shoal.gateway.accepted import AcceptedRequest
from shoal.gateway.firsttokens import FirstRequest
from shoal.gateway.prepared import COMPLETIONS
from shoal.gateway.relay import ABORTED, LACKS_ADAPTER, WRONG_MODEL, AnswerRelay, Retry, engine_lost
from shoal.gateway.replicapool import SHORT_ANSWER
from shoal.gateway.target import DispatchTarget
from shoal.gateway.upstream import (
    Aborted,
    BrokenOff,
    ConnectFailed,
    GivenUp,
    RequestBody,
    StaleConnection,
    UpstreamAddress,
    UpstreamError,
)
from shoal.gateway.waiter import ClientGone
from shoal.net import errors
from shoal.net.asgi import Headers
from shoal.net.errors import ApiError

log = structlog.get_logger()

_STALE_SECONDS: Final = 0.5
"""A closed idle connection fails at once. A failure after this time means that the engine had the request."""
UNKNOWN_ENGINE: Final = "unknown_engine"
UNSUPPORTED: Final = "unsupported"
_OTHER_ENGINE: Final = frozenset({UNKNOWN_ENGINE, UNSUPPORTED})
"""Reasons of a retry: the replica's engine is not one that this gateway knows, or that does what is asked for. It got
nothing of the request."""
_ANSWER_SECONDS: Final = 1.0
"""How long an engine whose connection ended may take to answer a readiness check, besides the time to connect."""
_AGENT_SECONDS: Final = 3.0
"""How long the agent of an engine that takes no connection may take to say that it has ended."""
_AGAIN_SECONDS: Final = 0.05


class Dispatch:
    """The attempts of one request. `trace` is the header lines that propagate its trace to the engine."""

    # The target has no reference to the dispatch: a reference cycle would be work for the garbage collector.
    __slots__ = (
        "_app",
        "_cancelling",
        "_first",
        "_id",
        "_meter",
        "_paid",
        "_pick",
        "_relay",
        "_request",
        "_sent",
        "_target",
        "_trace",
    )

    def __init__(self, request: AcceptedRequest, target: DispatchTarget, trace: str) -> None:
        app, meter = request.app, request.meter
        self._request = request
        self._target = target
        self._trace = trace
        self._app = app
        self._meter = meter
        self._id = meter.id
        self._relay = AnswerRelay(request.prepared, meter, request.reply, app.memory.answer, app.answer_budget)
        self._sent = 0
        self._paid: RetryBudget | None = None
        self._pick: Pick | None = None
        """Why the replica of this attempt was chosen."""
        self._first: FirstRequest | None = None
        """This attempt is the first that a new replica gets."""
        self._cancelling: asyncio.Task[None] | None = None
        """The task that asks the engine to end the request after its client left. Once it is set, the request is not
        sent again."""

    async def run(self) -> None:
        """Tries one replica after the other.

        Raises:
            ApiError: the error that the client gets instead of an answer.
            ClientGone: the client left.
        """
        app, meter, request, target = self._app, self._meter, self._request, self._target
        tried = request.out_of_reach()
        in_a_row = lost = 0
        while True:
            place = target.choose(tried, in_a_row)
            waited = isinstance(place, NoReplica)
            since: float | None = None
            if isinstance(place, NoReplica):
                since = time.monotonic()
                place = await target.wait_for(place, tried)
                in_a_row = 0
                if place.replica.uid in tried:
                    tried.clear()
            replica = place.replica
            try:
                if request.carrier is not None and not request.carrier.takes(app.target(replica)):
                    raise request.not_reached()
                self._pick = place.pick
                app.choices.add(self._id, replica, place.pick, place.basis)
                self._paid = app.holds.budget(request.prepared.model.uid) if place.paid else None
                tried.add(replica.uid)
                in_a_row += 1
                if app.fleet.first_tokens.new:
                    self._first = app.fleet.first_tokens.sent(replica, since)
                failure: str | None = None
                target.started(replica)
                try:
                    await self._attempt(replica)
                    if request.prepared.prompt is not None:
                        app.fleet.answered(replica, place.pick, meter, request.prepared)
                    return
                except Retry as retry:
                    failure = retry.reason
                    raise
                finally:
                    target.finished(replica, failure)
            except Retry as retry:
                if self._cancelling is not None:
                    raise ClientGone from None
                boot, how = meter.engine_boot, retry.reason
                if how == NO_ENDPOINT:
                    self._pass_over_alike(replica, tried)
                if how == "lost" and app.fleet.was_dead(replica.uid, boot, meter.seconds_at_replica):
                    how = "unavailable"  # an engine that has died may go on to answer, with errors
                if request.spans is not None:
                    request.spans.attempt_over(how)
                app.choices.fail(self._id, replica, how)
                app.metrics.retries.labels(how).inc()
                log.debug("attempt failed", request=self._id, pod=replica.key, reason=how)
                if meter.count_source != "none" and how in ("lost", "stalled", ABORTED):
                    app.spool.put(meter.attempt_row())
                if how in _OTHER_ENGINE:
                    # The next replica may run the other engine. One that comes after all were tried does not.
                    in_a_row -= 1
                    if waited:
                        raise request.refusal(NoReplica("tried")) from None
                meter.forget_counts()
                lost += how in ("lost", "stalled", ABORTED, LACKS_ADAPTER, WRONG_MODEL)
                blamed = how in ("lost", "stalled") and retries.died(await self._classify_loss(replica, boot, how))
                meter.deaths += blamed
                following = retries.after(meter.deaths, lost, app.settings.attempts)
                if blamed:
                    app.fleet.note_death(replica.uid, boot)
                    app.metrics.suspects.labels("ended" if following == "suspect" else "sent_again").inc()
                    # Other requests were lost with this replica. Prompt affinity would send all of them to the same
                    # next replica.
                    request.prepared = request.prepared._replace(prompt=None)
                if following == "suspect":
                    raise errors.lost_twice() from None
                if request.carrier is not None and request.carrier.sent:
                    raise errors.carried_once() from None
                if following == "tried":
                    raise request.refusal(NoReplica("tried")) from None
            finally:
                if self._first is not None:
                    self._first.ended()
                    self._first = None
                app.leave(replica, place.tokens)

    async def _attempt(self, replica: Replica) -> None:
        app, meter, request = self._app, self._meter, self._request
        abort, prepared = request.abort, request.prepared
        key = app.key_ring.key_for(replica.install_key, replica.model_uid)
        if key is None:
            log.warning("no install key for a pod", pod=replica.key, fingerprint=replica.install_key)
            raise Retry("no_key")
        wire = wire_of(replica.engine)
        if wire is None:
            log.warning("a pod runs an engine that this gateway does not know", pod=replica.key, engine=replica.engine)
            raise Retry(UNKNOWN_ENGINE)
        if not request.suits(replica):
            # A rollout from one engine, version or argument to the other, and the request needs the other one.
            raise Retry(UNSUPPORTED)
        signal = app.fleet.live.get(replica.uid)
        if signal is None:
            app.metrics.fallbacks.inc()
        meter.attempts += 1
        meter.replica = replica
        meter.engine_boot = signal.engine_boot if signal else None
        target = app.target(replica)
        if request.spans is not None:
            self._trace = request.spans.attempt(replica, target, wire.provider, self._pick)
        at_replica = app.fleet.attempts[replica.uid]
        at_replica.add(abort)
        abort.given_up = abort.sent = False
        if wire.aborts and not prepared.stream and prepared.can_cancel and request.carrier is None:
            abort.cancel = self._cancel
        meter.sent(len(request.raw))
        began = time.monotonic()
        try:
            try:
                head, body = self._to_send(wire, target, key)
                answer = await (request.carrier or app.upstream).start(target, head, body, abort)
            except StaleConnection:
                if time.monotonic() - began > _STALE_SECONDS:
                    raise
                head, body = self._to_send(wire, target, key)
                try:
                    answer = await app.upstream.start(target, head, body, abort)
                except ConnectFailed:
                    # Nothing listens any more: the engine is gone, and did not merely close an idle connection.
                    raise Retry("lost") from None
            try:
                await self._relay.run(answer, self._replica_header(replica), self._began)
            except ApiError:
                self._began_well()  # the engine rejected the request, so the engine is alive
                if self._cancelling is not None:
                    raise ClientGone from None
                raise
            finally:
                answer.release()
        except BrokenOff:
            ended = await self._has_ended(replica)
            app.metrics.broken_off.labels("replica_ended" if ended else "unknown").inc()
            if not ended:
                raise ClientGone from None
            if self._relay.answering:
                raise engine_lost() from None
            raise Retry("lost") from None
        except Aborted:
            raise ClientGone from None
        except ConnectFailed:
            raise Retry("connect") from None
        except GivenUp:
            raise Retry("stalled") from None
        except UpstreamError:
            raise Retry("lost") from None
        finally:
            at_replica.discard(abort)
            abort.cancel = None
            if not abort.sent:
                meter.not_taken()
            if self._cancelling is not None:
                app.metrics.cancellations.labels("exact" if meter.count_source == "final" else "estimated").inc()
                await app.cancellations.end(self._cancelling)

    def _pass_over_alike(self, replica: Replica, tried: set[str]) -> None:
        """The replica's engine does not serve the endpoint: adds all that run the same to `tried`. Raises ApiError: no
        replica that takes requests may serve it."""
        app, request = self._app, self._request
        request.lacking |= {replica.runs}
        left = False
        for other in app.fleet.usable(app.directory.snapshot, request.prepared.model):
            if other.runs in request.lacking:
                tried.add(other.uid)
            elif request.suits(other):
                left = left or request.carrier is None or request.carrier.takes(app.target(other))
        if not left:
            self._meter.not_taken()
            self._began_well()  # the engine is alive
            name, path = request.prepared.model_name, request.prepared.path
            text = f"The engine of the model `{name}` does not serve {path}."
            raise ApiError(400, text, "wrong_endpoint", param="model") from None

    def _cancel(self) -> bool:
        """Called when the client leaves while the engine has the request. Returns whether the engine is asked to end
        it."""
        meter, relay = self._meter, self._relay
        if meter.replica is None:
            return False
        rid = self._id if relay.rid is None else relay.rid.decode()
        prepared = self._request.prepared
        listed = prepared.prompts if prepared.path == COMPLETIONS else 0
        self._cancelling = self._app.cancellations.begin(meter.replica.uid, rid, listed, self._request.abort)
        relay.client_gone = self._cancelling is not None
        return relay.client_gone

    async def _classify_loss(self, replica: Replica, boot: str | None, how: str) -> retries.Loss:
        """How the replica was lost; `boot` is the engine's boot id when it got the request."""
        if how == "stalled":
            return retries.Loss(stalled=True)
        fleet, snapshot = self._app.fleet, self._app.directory.snapshot
        pods = snapshot.replicas.get((replica.model, replica.model_uid), ())
        remains = any(pod.uid == replica.uid and not pod.deleting for pod in pods) and replica.uid not in fleet.leaving
        signal = fleet.live.get(replica.uid)
        if not remains or (signal is not None and signal.phase == "draining"):
            return retries.Loss(leaving=True)
        answers = await self._is_ready(replica)
        signal = fleet.live.get(replica.uid)
        same = signal is None or boot is None or signal.engine_boot == boot
        return retries.Loss(answers=answers and same)

    async def _has_ended(self, replica: Replica) -> bool:
        """Whether the replica that was answering has ended, now that the proxy broke its answer off. Where it has not,
        which is so for nearly all clients that leave, this takes one request for its readiness."""
        boot, live = self._meter.engine_boot, self._app.fleet.live
        answers = await self._readiness(replica) != "closed"
        until = time.monotonic() + _AGENT_SECONDS
        while not (ended := has_ended(boot, answers, live.get(replica.uid))):
            if answers or boot is None or time.monotonic() >= until:
                break
            await asyncio.sleep(_AGAIN_SECONDS)
        return ended

    async def _is_ready(self, replica: Replica) -> bool:
        """Whether a replica's engine answers that it is ready, on a new connection.

        Raises:
            ClientGone: the client left.
        """
        return await self._readiness(replica) == "ready"

    async def _readiness(self, replica: Replica) -> Literal["ready", "not_ready", "closed"]:
        """What a replica's engine answers on a new connection; "closed": it takes none, or ends it.

        Raises:
            ClientGone: the client left.
        """
        app, abort = self._app, self._request.abort
        wire, target = wire_of(replica.engine), app.target(replica)
        if wire is None:
            return "not_ready"
        head = f"GET {wire.ready_path} HTTP/1.1\r\nhost: {_host(target)}\r\n\r\n".encode()
        for _ in range(2):
            try:
                async with asyncio.timeout(app.settings.connect_seconds + _ANSWER_SECONDS):
                    answer = await app.upstream.start(target, head, b"", abort)
            except Aborted:
                raise ClientGone from None
            except StaleConnection:
                continue  # the other idle connections are closed by now
            except TimeoutError:
                return "not_ready"
            except UpstreamError:
                return "closed"
            answer.release()
            return "ready" if answer.status == 200 else "not_ready"
        return "closed"

    def _to_send(self, wire: Wire, target: UpstreamAddress, key: str) -> tuple[bytes, RequestBody]:
        """The head and the body of one attempt."""
        prepared = self._request.prepared
        self._sent += 1
        call = EngineCall(
            prepared.path,
            prepared.model.engine_name,
            self._target.adapter_name,
            self._id,
            self._sent,
            prepared.added.get(wire.type) or b"",
            SpeculatedAnswers(prepared.prompts, prepared.choices) if prepared.model.speculates else None,
        )
        self._relay.attempt(wire, call)
        raw = self._request.raw
        body = wire.encode(raw, call) if isinstance(raw, bytes) else raw
        return self._head(target, key, wire.path(call), len(body)), body

    def _began(self) -> None:
        """Called before the first part of the engine's answer is sent to the client."""
        self._request.abort.answering = True
        self._request.abort.cancel = None  # the whole answer is here
        self._meter.answer_began()
        if self._first is not None:
            self._first.answers(shows=self._request.prepared.stream or self._is_short())
        if self._pick is not None:
            self._app.fleet.began(self._pick)
        if self._paid is not None:
            self._began_well()

    def _is_short(self) -> bool:
        """Whether a whole answer is so short that its end is about its first token."""
        counts = self._meter.tokens()
        return self._meter.count_source == "final" and (counts["outputTokens"] or 0) <= SHORT_ANSWER

    def _began_well(self) -> None:
        if self._paid is not None:
            self._paid.answered()
            self._paid = None

    def _head(self, target: UpstreamAddress, key: str, path: str, length: int) -> bytes:
        prepared = self._request.prepared
        # The client's headers are not forwarded: some of them would steer the engine.
        return (
            f"POST {path} HTTP/1.1\r\nhost: {_host(target)}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: {prepared.content_type}\r\n"
            f"accept: {'text/event-stream' if prepared.stream else 'application/json'}\r\n"
            f"x-request-id: {self._id}\r\ncontent-length: {length}\r\n"
            f"{self._trace}\r\n"
        ).encode()

    def _replica_header(self, replica: Replica) -> Headers:
        return ((b"x-shoal-replica", replica.key.encode()),) if self._app.settings.replica_header else ()


def _host(target: UpstreamAddress) -> str:
    return f"[{target.host}]:{target.port}" if ":" in target.host else f"{target.host}:{target.port}"
