"""Handles one request from its arrival to its end; `GatewayRequest.run` is the entry point."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from shoal.api.names import LOGS_PATH, USAGE_PATH
from shoal.core.access import KeyIdentity
from shoal.core.fields import remote
from shoal.core.fields.table import FORMS, TABLE
from shoal.core.layers import refusals
from shoal.core.routing.external import DOUBTFUL, NOT_SENT
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routes import DeclaredCanary
from shoal.core.routing.routestats import TargetKey
from shoal.gateway import ids, modellist, redact
from shoal.gateway.accepted import AcceptedRequest, FellBack
from shoal.gateway.adaptertarget import AdapterTarget
from shoal.gateway.arrival import Arrival
from shoal.gateway.bigbodies import BIG
from shoal.gateway.body import Disconnected, admit_body, read_body
from shoal.gateway.costchoice import CostNote
from shoal.gateway.deadlines import Deadline
from shoal.gateway.dialects import dialect_of_errors
from shoal.gateway.dispatch import Dispatch
from shoal.gateway.externaldispatch import ExternalDispatch
from shoal.gateway.fallbacks import Fallbacks
from shoal.gateway.mirrors import copied, start_copy
from shoal.gateway.preparation import ClientBody, Fetched, Incomplete, Preparation, Ready
from shoal.gateway.prepared import Prepared
from shoal.gateway.quota import SHARE_WAIT_SECONDS
from shoal.gateway.quotamessages import MayFitSoon
from shoal.gateway.reply import Reply
from shoal.gateway.requester import Requester
from shoal.gateway.routechoice import RouteChoice, Routed
from shoal.gateway.shared import Gateway
from shoal.gateway.target import BaseTarget
from shoal.gateway.upstream import AbortHandle, RequestBody
from shoal.gateway.waiter import ClientGone
from shoal.metering.meter import Meter
from shoal.metering.spool import SpoolUnavailable
from shoal.net import errors
from shoal.net.asgi import DIRECT, DISCONNECT, GONE, DirectExchange, Receive, Scope, Send
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.tracing import RequestSpans

log = structlog.get_logger()

_SEND_ERROR_SECONDS: Final = 10.0
"""How long a client may take to read an error."""
_REFUSED_BY_TARGET: Final = frozenset(
    {
        "no_replica",
        "external_unavailable",
        "hold_expired",
        "hold_full",
        "model_unavailable",
        "adapter_unavailable",
        "adapter_unusable",
        "model_not_found",
    }
)
"""Codes of errors that say that no replica of a target takes the request. An engine's own errors are none of them: what
ends the replicas of one Model must not go on to another."""
_NOT_HELD: Final = frozenset({"hold_expired", "hold_full"})
"""Of these, those that say that the request may not wait, or not for longer."""
_OF_PROXIES: Final = frozenset({502, 503, 504})
"""What proxies answer where they get no answer."""
_MODELS: Final = "/v1/models"
READ_PATHS: Final = (_MODELS, LOGS_PATH, USAGE_PATH)
"""What a client reads with GET, besides one model below the list."""


class GatewayRequest:
    __slots__ = (
        "_app",
        "_arrival",
        "_body",
        "_body_bytes",
        "_canary",
        "_direct",
        "_doubtful",
        "_fallbacks",
        "_preparation",
        "_receive",
        "_reply",
        "_requester",
        "_routed",
        "_routes",
        "_scope",
        "_spans",
        "_trace",
    )

    def __init__(self, app: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._arrival = arrival = Arrival(scope)
        # Removed from the scope: there it would be a cycle, and work for the garbage collector.
        self._direct: DirectExchange | None = scope.pop(DIRECT, None)
        dialect = dialect_of_errors(arrival.path)
        self._reply = Reply(self._direct, send, arrival.id, arrival.client_id, app, dialect=dialect)
        self._requester = requester = Requester(app)
        self._routes = routes = RouteChoice(app, arrival)
        self._preparation = Preparation(app, arrival, requester, routes)
        self._fallbacks: Fallbacks | None = None
        self._trace = ""
        """Trace header lines of the request to the engine."""
        self._spans: RequestSpans | None = None
        self._body_bytes = 0
        """Bytes of the budget for bodies that the request has."""
        self._body: RequestBody = b""
        """The engine's body, until it is sent."""
        self._routed: Routed | None = None
        """What a route chose."""
        self._canary: DeclaredCanary | None = None
        """The request counts for this canary."""
        self._doubtful = False
        """If it fails there, it may be the reason itself."""

    async def run(self) -> None:
        began = time.monotonic()
        try:
            await self._route()
        except ApiError as error:
            self._app.metrics.rejected.labels(*_labels(error)).inc()
            requester = self._requester
            if error.status == 429 and (quota := requester.quota or requester.route_quota) is not None:
                self._app.metrics.tenants.refused(quota.tenant, error.code or "429")
            self._app.choices.refuse(self._arrival.id, error)
            await self._reply.error(error)
        except (Disconnected, ClientGone):
            self._app.metrics.rejected.labels("disconnected", refusals.refusal("client_left_early").layer).inc()
            self._app.choices.client_left(self._arrival.id, "client_left_early", time.monotonic() - began)
        except Exception as error:
            log.error("request failed", request=self._arrival.id, **redact.redact_error(error))
            if not self._reply.started:
                failed = ApiError(500, "The gateway failed.", "internal_error")
                self._app.metrics.rejected.labels(*_labels(failed)).inc()
                self._app.choices.refuse(self._arrival.id, failed)
                await self._reply.error(failed)
        finally:
            if self._spans is not None:
                self._spans.end()

    def _route(self) -> Awaitable[None]:
        """What answers the request, by its path and method. Raises ApiError."""
        path, method = self._arrival.path, self._scope["method"]
        if path in TABLE or self._arrival.dialect is not None:
            if method != "POST":
                raise self._with_limits(errors.wrong_method(method, "POST"))
            return self._complete()
        if path in READ_PATHS or path.startswith(f"{_MODELS}/"):
            if method != "GET":
                raise self._with_limits(errors.wrong_method(method, "GET"))
            return self._read(self._identity(), path)
        raise self._with_limits(ApiError(404, f"Unknown path: {path[:200]}", "unknown_path"))

    def _with_limits(self, error: ApiError) -> ApiError:
        """Returns `error`, which does not depend on a key. If the request has a valid key, the answer gets the tenant's
        rate limit headers, as every answer does."""
        with contextlib.suppress(ApiError):
            self._identity()
        return error

    # --- reading usage, logs and models -------------------------------------------------------------------------------

    async def _read(self, identity: KeyIdentity, path: str) -> None:
        query: bytes = self._scope.get("query_string", b"")
        if path == USAGE_PATH:
            page = await self._app.usage.page(identity.tenant, query, self._arrival.headers.get(b"accept", b""))
            await self._reply.page(200, page.body, page.headers)
        elif path == LOGS_PATH:
            await self._reply.json(200, await self._app.logs.page(identity.tenant, query))
        else:
            await self._reply.json(200, self._models(identity, path))

    def _models(self, identity: KeyIdentity, path: str) -> bytes:
        words, wanted = self._app.directory.snapshot.model_index, path[len(_MODELS) + 1 :]
        if not wanted:
            return modellist.listed(words, identity)
        model = words.described(wanted, identity)
        if model is None:
            raise self._routes.unknown(identity, wanted)
        return modellist.one(wanted, model)

    # --- completions --------------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        app, arrival = self._app, self._arrival
        identity = self._identity()
        if app.traces is None:
            self._trace = ids.trace_lines(arrival.headers)
        else:
            # Only requests with a valid key are traced.
            self._trace, self._spans = app.traces.begin(arrival.headers, arrival.engine_path, arrival.id, identity)
            self._reply.spans = self._spans
        if app.busy:
            raise errors.unavailable("The gateway is serving as many requests as it can. Try again.", "overloaded", 2)
        if app.spool.refusing is not None:
            # A request that cannot be recorded cannot be billed, so it is not served.
            raise errors.cannot_record()
        try:
            await self._serve(await self._accept(identity))
        finally:
            app.body_budget.give(identity.tenant, self._body_bytes)
            if self._requester.reserved is not None:
                self._requester.reserved.settle(self._preparation.meter)

    async def _accept(self, identity: KeyIdentity) -> Prepared:
        """Reads and checks the body, and opens the usage record. Frees everything that the request does not need while
        it waits."""
        app, arrival = self._app, self._arrival
        body = ClientBody(await self._read_body(identity))
        ready = await self._admitted(identity, body)
        if isinstance(ready, Incomplete):
            body = ClientBody(body.raw, Fetched(ready.model, await self._fetch(identity, ready.media)))
            ready = await self._admitted(self._requester.same_tenant(identity), body)
            if isinstance(ready, Incomplete):
                raise RuntimeError("a request without remote media is incomplete")
        prepared, note, self._reply.log = self._take(ready), ready.note, ready.entry
        copy = None
        if (routed := ready.routed) is not None:
            self._canary = routed.canary
            copy = copied(app, arrival, self._preparation, identity, body, routed)
            self._fallbacks = Fallbacks(app, arrival, self._requester, self._routes, self._preparation)
            self._body_bytes += self._fallbacks.keep(identity, body, ready)
        del body, ready
        arrival.forget_headers()
        await self._record()
        self._tell_cost(prepared, note)
        if prepared.model.external is None:
            app.demand.arrived(prepared.model.uid)
        if copy is not None:
            start_copy(app, copy)
        return prepared

    async def _read_body(self, identity: KeyIdentity) -> bytes:
        """Raises ApiError, and Disconnected."""
        app, arrival = self._app, self._arrival
        most = app.memory.form if arrival.engine_path in FORMS else app.memory.body
        raw = None if self._direct is None else self._direct.body()
        if raw is None:
            length = arrival.headers.get(b"content-length")
            raw = await read_body(self._receive, length, most, app.body_budget, identity.tenant)
        else:
            admit_body(raw, most, app.body_budget, identity.tenant)
        self._body_bytes = len(raw)
        return raw

    def _take(self, ready: Ready) -> Prepared:
        """The request now goes to this target."""
        self._body, self._routed = ready.body, ready.routed
        return ready.prepared

    async def _record(self) -> None:
        """Opens the usage record: no request goes to an engine before this is on disk. Raises ApiError."""
        app, meter = self._app, self._preparation.meter
        try:
            kept = app.spool.commit(meter.open_row())
        except SpoolUnavailable:
            self._drop_log_entry()
            raise errors.cannot_record() from None
        try:
            await kept
        except SpoolUnavailable:
            # The open row may have reached the disk: a final row records that nothing was served.
            meter.outcome, meter.status = "refused", 503
            app.spool.put(meter.final_row())
            self._drop_log_entry()
            raise errors.cannot_record() from None

    async def _admitted(self, identity: KeyIdentity, body: ClientBody) -> Ready | Incomplete:
        """Prepares the request. One that fits its tenant's limits, but not this gateway's share of them, waits for the
        next share, and one that other gateways' requests leave no room for, until it is known whether they have ended:
        a client that sends one request after the other gets all of its limit. A large body first waits for the decoding
        slot. Raises ApiError, and Disconnected."""
        since, until = 0.0, None
        while True:
            try:
                if body.size < BIG:
                    return self._preparation.admit(identity, body)
                async with self._app.big_bodies.slot(identity.tenant, body.size):
                    if self._scope.get(DISCONNECT) is GONE:
                        raise Disconnected
                    return self._preparation.admit(identity, body)
            except MayFitSoon as refused:
                requester = self._requester
                quota = requester.quota if refused.over.route is None else requester.route_quota
                if quota is None:
                    raise
                if until is None:
                    since = self._app.quotas.clock()
                    until = asyncio.get_running_loop().time() + SHARE_WAIT_SECONDS
                    self._app.metrics.share_waits.inc()
                await quota.wait_for_reports(refused, since, until, lambda: self._scope.get(DISCONNECT) is GONE)
                if self._scope.get(DISCONNECT) is GONE:
                    raise Disconnected from None
                identity = self._requester.same_tenant(identity)

    def _tell_cost(self, prepared: Prepared, note: CostNote | None) -> None:
        """Notes why the accepted request goes to a cheaper fallback, or stays with its target all the same."""
        app = self._app
        if note is None:
            return
        if note.trigger is None:
            app.choices.stay(self._arrival.id, note.left, note.why)
        else:
            app.metrics.fallbacks_taken.labels(note.trigger).inc()
            app.choices.leave(self._arrival.id, note.left, prepared.model.address, note.why)

    async def _fetch(self, identity: KeyIdentity, media: Sequence[remote.Wanted]) -> list[str]:
        """Fetches the media as `data:` URLs, whose bytes count as part of the body. Raises ApiError, and Disconnected
        when the client leaves."""
        app, scope = self._app, self._scope
        most = app.memory.body

        def take(size: int) -> None:
            if self._body_bytes + size > most:
                text = f"The body is larger than {most} bytes with its media."
                raise ApiError(413, text, "request_too_large")
            app.body_budget.take(identity.tenant, size)
            self._body_bytes += size

        if scope.get(DISCONNECT) is GONE:
            raise Disconnected
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as until:
                if DISCONNECT in scope:
                    scope[DISCONNECT] = lambda: until.reschedule(loop.time())
                return await app.media.fetch(identity.tenant, media, take)
        except TimeoutError:
            raise Disconnected from None
        finally:
            if DISCONNECT in scope and scope[DISCONNECT] is not GONE:
                scope[DISCONNECT] = None

    def _drop_log_entry(self) -> None:
        """Drops the log entry of a request that is not served."""
        if (logged := self._reply.log) is not None:
            self._reply.log = None
            self._app.logs.logger.forget(logged)

    async def _serve(self, prepared: Prepared) -> None:
        app, meter = self._app, self._preparation.meter
        abort, deadline = AbortHandle(), app.deadlines_of(prepared.model).start()
        bounding = prepared.model  # its limit is the deadline
        watcher: asyncio.Task[None] | None = None
        if DISCONNECT in self._scope:
            if self._scope[DISCONNECT] is GONE:
                abort.abort()
            else:
                self._scope[DISCONNECT] = abort.abort
        else:
            watcher = asyncio.create_task(self._watch(abort))
        try:
            if self._spans is not None:
                self._spans.accepted(meter, prepared, None if self._routed is None else self._routed.role)
            leave: float | None = None if self._routed is None else self._routed.leave_seconds
            with deadline:
                while True:
                    try:
                        await self._dispatch(prepared, abort, deadline, leave)
                        break
                    except FellBack as left:
                        former, prepared, why, reason = prepared.model, left.prepared, left.why, "wait"
                        self._spare_canary()
                    except ApiError as error:
                        self._doubtful = error.outcome in DOUBTFUL or self._may_be_proxys(error)
                        if not error.about_target or error.outcome in NOT_SENT:
                            self._canary = None
                        if error.code == "adapter_unusable" and self._routed is not None:
                            meter.outcome = "refused"  # the route named the adapter, not the client
                        if error.code in _NOT_HELD:
                            self._spare_canary()
                        if error.code not in _REFUSED_BY_TARGET or meter.first_byte is not None:
                            raise
                        following = await self._fall_back(needs_replica=False)
                        if abort.aborted:
                            raise ClientGone from None
                        if following is None:
                            if self._fallbacks is not None:
                                self._fallbacks.refuse_loop()
                            raise
                        former, prepared, reason = prepared.model, following, "refused"
                        why = f"it refused the request ({error.code})"
                    # All targets together have the time of the first one.
                    if deadline.shorten(app.deadlines_of(prepared.model).seconds):
                        bounding = prepared.model
                    app.choices.leave(self._arrival.id, former.address, prepared.model.address, why)
                    self._left(prepared, reason)
        except ClientGone:
            meter.outcome = "cancelled"
            app.choices.client_left(
                self._arrival.id,
                "client_left_answering"
                if meter.first_byte is not None
                else ("client_left_waiting" if meter.replica is None else "client_left_working"),
                meter.seconds,
                _model_key(prepared.model),
            )
        except TimeoutError:
            meter.outcome = "failed"
            # A long answer. A stream that has not begun says that nothing answers.
            self._doubtful = not prepared.stream or meter.first_byte is not None
            await self._send_error(_took_too_long(deadline, bounding), prepared.model)
        except ApiError as error:
            meter.outcome = meter.outcome or ("rejected" if error.status < 500 else "failed")
            await self._send_error(error, prepared.model)
        except Exception as error:
            log.error("request failed", request=self._arrival.id, **redact.redact_error(error))
            meter.outcome = "failed"
            await self._send_error(ApiError(500, "The gateway failed.", "internal_error"), prepared.model)
        finally:
            abort.abort()
            if meter.outcome is None:
                meter.outcome = "failed"
            app.spool.put(meter.final_row())
            if self._canary is not None:
                app.canaries.ended(self._canary, meter, doubtful=self._doubtful)
            if (logged := self._reply.log) is not None:
                self._reply.log = None
                app.logs.logger.end(logged, meter, app.directory.snapshot.keys.get(self._requester.key_hash))
            app.metrics.observe(meter, self._arrival.engine_path)
            app.traffic.add(meter, prepared)
            self._note_route(meter, prepared)
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher

    async def _fall_back(self, *, needs_replica: bool) -> Prepared | None:
        """The request for its next fallback (`Fallbacks.next`)."""
        if self._fallbacks is None:
            return None
        ready = await self._fallbacks.next(needs_replica=needs_replica)
        return None if ready is None else self._take(ready)

    def _may_be_proxys(self, error: ApiError) -> bool:
        """Whether the proxy that carries the request may have made the error itself: its own time is over, or it does
        not reach the replica. A replica that ended in the midst of its stream is none of that."""
        carrier = self._arrival.carrier
        if carrier is None or (carrier.broke_off and self._preparation.meter.first_byte is not None):
            return False
        return carrier.sent and error.status in _OF_PROXIES

    def _spare_canary(self) -> None:
        """The request did not get a place at its target. While that has no replica yet, or has not loaded its adapter,
        this says nothing of how it serves."""
        if self._preparation.meter.cold:
            self._canary = None

    def _left(self, prepared: Prepared, reason: str) -> None:
        """The request leaves its target for a fallback. `reason`: label of the metric."""
        app, meter = self._app, self._preparation.meter
        if self._canary is not None:
            meter.outcome = "refused"
            app.canaries.ended(self._canary, meter, doubtful=self._doubtful)
        self._canary = None
        app.metrics.fallbacks_taken.labels(reason).inc()
        meter.reroute(prepared.model)
        if self._spans is not None:
            self._spans.accepted(meter, prepared, "fallback")
        if self._requester.reserved is not None:
            self._requester.reserved.reprice(prepared.model, meter.fields.get("plan"))
        if prepared.model.external is None:
            app.demand.arrived(prepared.model.uid)

    def _note_route(self, meter: Meter, prepared: Prepared) -> None:
        """Counts the request for its route, at the target that it went to last."""
        routed = self._routed
        if routed is None:
            return
        key = TargetKey(routed.route, routed.target.key, routed.role)
        first = meter.seconds_to_first_byte if prepared.stream else None
        tokens = meter.tokens()["outputTokens"] or 0
        self._app.routes.note(time.monotonic(), key, meter.outcome, tokens, first)

    async def _dispatch(
        self, prepared: Prepared, abort: AbortHandle, deadline: Deadline, leave_seconds: float | None
    ) -> None:
        """Sends the request to replicas of its target until the answer has ended. Raises as `Dispatch.run`, and
        FellBack."""
        app, meter = self._app, self._preparation.meter
        raw, self._body = self._body, b""  # the accepted request keeps the only copy, trimmed if it waits
        request = AcceptedRequest(
            app,
            prepared,
            raw,
            meter,
            self._reply,
            abort,
            deadline,
            self._spans,
            self._requester.check_key,
            can_fall_back=self._fallbacks.can_take if self._fallbacks else None,
            leave_seconds=leave_seconds if leave_seconds is not None and self._fallbacks else math.inf,
            fall_back=lambda: self._fall_back(needs_replica=True),
            carrier=self._arrival.carrier,
            hops=self._arrival.hops,
        )
        del raw
        if prepared.model.external is not None:
            await self._dispatch_outside(request)
            return
        adapter = prepared.model.adapter
        # An adapter has the tokens of its base.
        target = BaseTarget(request) if adapter is None or meter.free else AdapterTarget(request, adapter)
        dispatch = Dispatch(request, target, self._trace)
        app.checkpoints.add(meter)
        try:
            await dispatch.run()
        except ApiError:
            if request.beyond_reach:
                self._canary = None  # a proxy's endpoints say nothing of how the canary serves
            raise
        finally:
            app.checkpoints.discard(meter)

    async def _dispatch_outside(self, request: AcceptedRequest) -> None:
        """The same for an external target."""
        meter = self._preparation.meter
        self._app.checkpoints.add(meter)
        try:
            await (outside := ExternalDispatch(request)).run()
            self._doubtful = outside.doubtful
        finally:
            self._app.checkpoints.discard(meter)

    async def _watch(self, abort: AbortHandle) -> None:
        """Waits for the client to leave, and then aborts the request at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        abort.abort()

    # --- answering ----------------------------------------------------------------------------------------------------

    def _identity(self) -> KeyIdentity:
        """Authenticates the request; its answer then has the tenant's limits. Raises ApiError."""
        identity = self._requester.identify(self._arrival.headers)
        self._reply.quota = self._requester.quota
        return identity

    async def _send_error(self, error: ApiError, model: ServedModel) -> None:
        self._app.metrics.errors.labels(*_labels(error)).inc()
        self._app.choices.refuse(self._arrival.id, error, _model_key(model))
        if not self._reply.started:
            self._preparation.meter.status = error.status
        # A client that does not read must not keep the request alive; the server closes its connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEND_ERROR_SECONDS):
                await self._reply.error(error)


def _labels(error: ApiError) -> tuple[str, str]:
    """Reason and layer of an error, for metrics."""
    return refusals.label(error.code, error.status), refusals.refusal(error.code, error.outcome).layer


def _model_key(model: ServedModel) -> str | None:
    """`namespace/name` of the Model; None: it is an external target."""
    return model.key if model.external is None else None


def _took_too_long(deadline: Deadline, model: ServedModel) -> ApiError:
    """The error at the end of a deadline that began or was shortened for `model`. The message names the
    route, which the client has named, and no target."""
    text = f"The request took longer than {deadline.seconds:g} s"
    if model.request_seconds is None or model.request_seconds > deadline.seconds:
        return errors.timeout(f"{text}.", f"the gateways' own requestSeconds, {deadline.seconds:g} s")
    if (route := model.request_seconds_route) is None:
        return errors.timeout(f"{text}.", f"requestSeconds of Model {model.key}, {deadline.seconds:g} s")
    limit = f"requestSeconds of ModelRoute {route}, {deadline.seconds:g} s"
    return errors.timeout(f"{text}, which is `requestSeconds` of the route {route}.", limit)
