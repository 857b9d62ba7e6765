"""Handles one request from its arrival to its end; `GatewayRequest.run` is the entry point."""

import asyncio
import contextlib
import hashlib
import math
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from shoal.api.names import HEADER_HOPS, LOGS_PATH, USAGE_PATH
from shoal.core.access import Denied, KeyIdentity, authenticate
from shoal.core.advice.marks import Marks, prompt_marks
from shoal.core.fields import remote
from shoal.core.fields.chat import write_turns
from shoal.core.fields.kinds import Facts
from shoal.core.fields.mediasize import media_size
from shoal.core.fields.pairs import pairs_of, repeated, write_documents
from shoal.core.fields.table import ALIASES, CHAT, FORMS, GENERATING, PAIRS, RERANK, TABLE, TOKENIZING
from shoal.core.layers import refusals
from shoal.core.nativeapi import NativeApi
from shoal.core.routing.affinity import SHARED, conversation_of, prefix_space, prompt_of
from shoal.core.routing.cost import CostConditions, PricedRequest, Trigger, decide_by_cost
from shoal.core.routing.external import DOUBTFUL, MOST_HOPS, hops_of
from shoal.core.routing.prefixes import points_of
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.routes import (
    DeclaredCanary,
    DeclaredRoute,
    NoTarget,
    RequestFacts,
    RouteRole,
    TargetRef,
    decide,
)
from shoal.core.routing.routestats import TargetKey
from shoal.engine.wires import added_of
from shoal.gateway import audioform, ids, modellist, redact
from shoal.gateway.ability import needs_salt, refuse_begun_answer, refuse_incapable, takes_salt
from shoal.gateway.accepted import AcceptedRequest, FellBack
from shoal.gateway.adaptertarget import AdapterTarget
from shoal.gateway.bigbodies import BIG
from shoal.gateway.body import (
    Disconnected,
    admit_body,
    bound_answer,
    bound_native,
    check_size,
    checked,
    engine_body,
    lowered,
    parse,
    prompts,
    read_body,
    translated,
    untranslated,
)
from shoal.gateway.carrier import CARRIER
from shoal.gateway.deadlines import Deadline
from shoal.gateway.dialects import DIALECTS
from shoal.gateway.dispatch import Dispatch
from shoal.gateway.externaldispatch import ExternalDispatch
from shoal.gateway.externalwire import external_body, native_body
from shoal.gateway.mirrors import Copy, start_copy
from shoal.gateway.prepared import Prepared
from shoal.gateway.quota import SHARE_WAIT_SECONDS, Quota, Reserved, reserved_tokens
from shoal.gateway.quotamessages import MayFitSoon
from shoal.gateway.reply import Reply
from shoal.gateway.shared import Gateway
from shoal.gateway.target import BaseTarget
from shoal.gateway.upstream import AbortHandle, PartedBody, RequestBody
from shoal.gateway.waiter import ClientGone
from shoal.metering.meter import Meter, Units
from shoal.metering.spool import SpoolUnavailable
from shoal.net import errors
from shoal.net.asgi import DIRECT, DISCONNECT, GONE, DirectExchange, Receive, Scope, Send
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.tracing import RequestSpans

log = structlog.get_logger()

_SEND_ERROR_SECONDS: Final = 10.0
"""How long a client may take to read an error."""
_DENIED: Final = {
    "unknown": (401, "Incorrect API key provided.", "invalid_api_key"),
    "disabled": (401, "This API key is disabled.", "disabled_api_key"),
    "expired": (401, "This API key has expired.", "expired_api_key"),
    "suspended": (403, "This account is suspended.", "tenant_suspended"),
}
_REFUSED_BY_TARGET: Final = frozenset(
    {
        "no_replica",
        "external_unavailable",
        "hold_expired",
        "hold_full",
        "model_unavailable",
        "adapter_unavailable",
        "model_not_found",
    }
)
"""Codes of errors that say that no replica of a target takes the request. An engine's own errors are none of them: what
ends the replicas of one Model must not go on to another."""
_NO_HOSTS: Final[frozenset[str]] = frozenset()
_MODELS: Final = "/v1/models"
_JSON: Final = "application/json"
_API_KEY: Final = b"x-api-key"
"""Where Anthropic's SDK puts the key."""
_HOPS: Final = HEADER_HOPS.encode()
_NO_HEADERS: Final[dict[bytes, bytes]] = {}


class _Incomplete(NamedTuple):
    """A request whose media must still be fetched. Its tenant's limits count it, but its full cost is not yet
    reserved."""

    model: ServedModel
    media: Sequence[remote.Wanted]


class _Fetched(NamedTuple):
    """The request's media as `data:` URLs, in order."""

    model: ServedModel
    media: Sequence[str]


class _Routed(NamedTuple):
    """What a route chose."""

    route: str
    """`namespace/name`."""
    target: TargetRef
    fallback: tuple[TargetRef, ...] = ()
    leave_seconds: int | None = None
    mirror: TargetRef | None = None
    role: RouteRole = "target"
    cost: CostConditions | None = None

    def moved_to(self, ref: TargetRef) -> "_Routed":
        """The same for a request that goes to a cheaper fallback. If that refuses it, the request goes to its first
        target, as if there had been no cheaper one, and then to the others."""
        others = (each for each in self.fallback if each != ref)
        mirror = None if self.mirror == ref else self.mirror
        return self._replace(target=ref, fallback=(self.target, *others), mirror=mirror, role="fallback", cost=None)


class _TooCostly(NamedTuple):
    """A request that leaves its target for a cheaper fallback, if one can do it."""

    left: ServedModel
    cheaper: Sequence[tuple[ServedModel, _Routed]]
    """In order; each has a replica now, and fits the Tenant's limits if the target or any of them does."""
    trigger: Trigger
    why: str


class _CostNote(NamedTuple):
    """What became of a request whose route has conditions on costs."""

    left: str
    """`namespace/name` of its target."""
    trigger: Trigger | None
    """The condition for which it went to a fallback; None: it stayed."""
    why: str


class _Size(NamedTuple):
    """What a request may use, whatever target it goes to."""

    path: str
    """Of the engine."""
    read: int
    """Bytes of its prompt."""
    answers: int
    bound: int | None
    """Longest answer that the client allows; None: not bounded."""
    units: Units

    def at(self, model: ServedModel) -> PricedRequest:
        """What it may use at one target."""
        bound = lowered(self.bound, self.path, model.max_output_tokens)
        tokens = reserved_tokens(self.read, self.answers, bound, model.max_output_tokens)
        adapter = None if model.adapter is None else model.adapter.key
        return PricedRequest(model.key, adapter, *tokens, **self.units._asdict())


class _Kept(NamedTuple):
    """What a fallback needs of a request: its body as the client sent it."""

    raw: bytes
    fetched: _Fetched | None
    route: str
    targets: list[TargetRef]
    """Fallbacks that were not tried yet, in order."""


class GatewayRequest:
    __slots__ = (
        "_app",
        "_body_bytes",
        "_canary",
        "_client_id",
        "_content_type",
        "_copy",
        "_cost_note",
        "_dialect",
        "_direct",
        "_doubtful",
        "_draw",
        "_engine_path",
        "_headers",
        "_hops",
        "_id",
        "_kept",
        "_key_hash",
        "_meter",
        "_mirror_draw",
        "_path",
        "_quota",
        "_raw",
        "_receive",
        "_reply",
        "_reserved",
        "_routed",
        "_scope",
        "_spans",
        "_trace",
    )

    def __init__(self, app: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._path: str = ALIASES.get(scope["path"], scope["path"])
        self._dialect = DIALECTS.get(self._path)
        self._engine_path = self._path if self._dialect is None else self._dialect.engine_path
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._id = ids.uuid7()
        self._client_id = ids.client_request_id(self._headers.get(b"x-request-id"))
        # Removed from the scope: there it would be a cycle, and work for the garbage collector.
        self._direct: DirectExchange | None = scope.pop(DIRECT, None)
        self._reply = Reply(self._direct, send, self._id, self._client_id, app, dialect=self._dialect)
        self._hops = hops_of(self._headers.get(_HOPS))
        self._trace = ""
        """Trace header lines of the request to the engine."""
        self._spans: RequestSpans | None = None
        self._key_hash = ""
        self._quota: Quota | None = None
        self._reserved: Reserved | None = None
        self._body_bytes = 0
        self._canary: DeclaredCanary | None = None
        """The request goes to this canary."""
        self._doubtful = False
        """If it fails there, it may be the reason itself."""
        self._draw: float | None = None
        """The random number by which a route chooses: one for the whole request, however often it is prepared."""
        self._routed: _Routed | None = None
        """What a route chose."""
        self._kept: _Kept | None = None
        """The request for its fallbacks; None: it has none."""
        self._mirror_draw = 1.0
        self._cost_note: _CostNote | None = None
        """What its cost has decided."""
        self._copy: Copy | None = None
        """A copy for the mirror of the route's rule."""
        self._raw: RequestBody = b""
        """The engine's body."""
        self._content_type: bytes | None = None

    async def run(self) -> None:
        began = time.monotonic()
        try:
            await self._route()
        except ApiError as error:
            self._app.metrics.rejected.labels(*_labels(error)).inc()
            if error.status == 429 and self._quota is not None:
                self._app.metrics.tenants.refused(self._quota.tenant, error.code or "429")
            self._app.choices.refuse(self._id, error)
            await self._reply.error(error)
        except (Disconnected, ClientGone):
            self._app.metrics.rejected.labels("disconnected", refusals.refusal("client_left_early").layer).inc()
            self._app.choices.client_left(self._id, "client_left_early", time.monotonic() - began)
        except Exception as error:
            log.error("request failed", request=self._id, **redact.redact_error(error))
            if not self._reply.started:
                failed = ApiError(500, "The gateway failed.", "internal_error")
                self._app.metrics.rejected.labels(*_labels(failed)).inc()
                self._app.choices.refuse(self._id, failed)
                await self._reply.error(failed)
        finally:
            if self._spans is not None:
                self._spans.end()

    def _route(self) -> Awaitable[None]:
        """What answers the request, by its path and method. Raises ApiError."""
        path, method = self._path, self._scope["method"]
        if path in TABLE or self._dialect is not None:
            if method != "POST":
                raise self._with_limits(errors.wrong_method(method, "POST"))
            return self._complete()
        if path in (LOGS_PATH, USAGE_PATH, _MODELS) or path.startswith(f"{_MODELS}/"):
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

    # --- reading usage, logs and models
    # ---------------------------------------------------------------------------------------

    async def _read(self, identity: KeyIdentity, path: str) -> None:
        query: bytes = self._scope.get("query_string", b"")
        if path == USAGE_PATH:
            page = await self._app.usage.page(identity.tenant, query, self._headers.get(b"accept", b""))
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
            raise self._unknown(identity, wanted)
        return modellist.one(wanted, model)

    def _unknown(self, identity: KeyIdentity, model_name: str) -> ApiError:
        """The error for a name that belongs to no model."""
        unserved = self._app.directory.snapshot.model_index.why_not(model_name, identity)
        if unserved is None:
            return errors.model_not_found(model_name)
        return errors.adapter_waits(model_name, unserved.reason, unserved.adapter)

    # --- completions --------------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        app = self._app
        identity = self._identity()
        if app.traces is None:
            self._trace = ids.trace_lines(self._headers)
        else:
            # Only requests with a valid key are traced.
            self._trace, self._spans = app.traces.begin(self._headers, self._engine_path, self._id, identity)
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
            if self._reserved is not None:
                self._reserved.settle(self._meter)

    async def _accept(self, identity: KeyIdentity) -> Prepared:
        """Reads and checks the body, and opens the usage record. Frees everything that the request does not need while
        it waits."""
        app = self._app
        headers = self._headers
        raw = None if self._direct is None else self._direct.body()
        most = app.memory.form if self._engine_path in FORMS else app.memory.body
        budget = app.body_budget
        if raw is None:
            raw = await read_body(self._receive, headers.get(b"content-length"), most, budget, identity.tenant)
        else:
            admit_body(raw, most, budget, identity.tenant)
        self._body_bytes = len(raw)
        self._content_type = headers.get(b"content-type")
        prepared = await self._prepared_within_shares(identity, raw)
        if isinstance(prepared, _Incomplete):
            fetched = _Fetched(prepared.model, await self._fetch(identity, prepared.media))
            now = self._same_tenant(identity)
            prepared = await self._prepared_within_shares(now, raw, fetched)
            if isinstance(prepared, _Incomplete):
                raise RuntimeError("a request without remote media is incomplete")
            self._keep(identity, raw, fetched)
            del fetched
        else:
            self._keep(identity, raw, None)
        del raw
        self._headers = _NO_HEADERS
        meter = self._meter
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
        self._tell_cost(prepared)
        if prepared.model.external is None:
            app.demand.arrived(prepared.model.uid)
        if self._copy is not None:
            start_copy(app, self._copy)
            self._copy = None
        return prepared

    def _keep(self, identity: KeyIdentity, raw: bytes, fetched: _Fetched | None) -> None:
        """Keeps the body for the fallbacks of the request's route, if there is memory for it, and makes a copy for its
        mirror."""
        routed = self._routed
        if routed is not None and routed.mirror is not None:
            self._copy = self._copied(identity, raw, fetched, routed.route, routed.mirror)
            if self._copy is None:
                self._app.metrics.mirrored.labels("dropped").inc()
        if routed is None or not routed.fallback:
            return
        # A form for an engine is a view of the body, which was counted when it was read.
        size = 0 if isinstance(self._raw, PartedBody) else len(raw)
        size += 0 if fetched is None else sum(map(len, fetched.media))
        try:
            self._app.body_budget.take(identity.tenant, size)
        except ApiError:
            return
        self._body_bytes += size
        self._kept = _Kept(raw, fetched, routed.route, list(routed.fallback))

    def _copied(
        self, identity: KeyIdentity, raw: bytes, fetched: _Fetched | None, route: str, ref: TargetRef
    ) -> Copy | None:
        """A copy of the request for a mirror; None: the mirror cannot do it, or it is too large to be made again."""
        app, index = self._app, self._app.directory.snapshot.model_index
        declared = index.routes.get(route)
        model = None if declared is None else index.target(declared, ref, identity)
        if model is None or len(raw) + (0 if fetched is None else sum(map(len, fetched.media))) >= BIG:
            return None
        kept = self._id, self._raw, self._routed
        self._id = ids.uuid7()
        try:
            prepared = self._prepare(identity, raw, fetched, (model, _Routed(route, ref)))
            if not isinstance(prepared, Prepared):
                return None
            meter = Meter(
                self._id,
                app.settings.installation,
                identity,
                model,
                endpoint=self._path,
                model_name=prepared.model_name,
                stream=prepared.stream,
                gateway=app.boot,
                route=route,
                mirror_of=kept[0],
            )
            meter.free, meter.media = self._meter.free, self._meter.media
            meter.repeated_bytes = self._meter.repeated_bytes
            return Copy(identity, prepared, self._raw, meter)
        except ApiError:
            return None
        finally:
            self._id, self._raw, self._routed = kept

    async def _fall_back(self, *, needs_replica: bool) -> Prepared | None:
        """The request as one for the next fallback that the tenant may use and that can do it; None: there is none.
        `needs_replica`: only for one that has a replica now. A large body first waits for the decoding slot: where a
        Model loses its replicas, all that wait for it leave at once. A request under which a replica died goes to no
        other target: what ends the replicas of one Model would end those of the next."""
        app, kept = self._app, self._kept
        if kept is None or self._meter.deaths:
            return None
        size = len(kept.raw) + (0 if kept.fetched is None else sum(map(len, kept.fetched.media)))
        if size < BIG:
            return self._next_fallback(kept, needs_replica=needs_replica)
        async with app.big_bodies.slot(self._meter.tenant, size):
            return self._next_fallback(kept, needs_replica=needs_replica)

    def _next_fallback(self, kept: _Kept, *, needs_replica: bool) -> Prepared | None:
        app, waiting = self._app, list[TargetRef]()
        snapshot = app.directory.snapshot
        route = snapshot.model_index.routes.get(kept.route)
        try:
            identity = self._check_key()
        except ApiError:
            return None
        while route is not None and kept.targets:
            ref = kept.targets.pop(0)
            model = snapshot.model_index.target(route, ref, identity)
            if model is None:
                if needs_replica:
                    waiting.append(ref)  # its adapter, or its pool, may be back in a moment
                continue
            if not self._reaches(model):
                continue
            if model.external is not None:
                if self._hops >= MOST_HOPS:
                    waiting.append(ref)
                    continue
                if not app.externals.usable(model, identity.tenant):
                    if needs_replica:
                        waiting.append(ref)
                    continue
            elif app.holds.dead_end(model) is not None:
                if needs_replica:
                    waiting.append(ref)  # a node may come for it
                continue
            elif needs_replica and not app.fleet.usable(snapshot, model):
                waiting.append(ref)
                continue
            try:
                prepared = self._prepare(
                    identity, kept.raw, kept.fetched, (model, _Routed(kept.route, ref, role="fallback"))
                )
            except ApiError:
                continue  # it cannot do what the first target could
            if not isinstance(prepared, Prepared):
                continue
            kept.targets[:0] = waiting
            return prepared
        kept.targets[:0] = waiting
        return None

    def _refuse_loop(self) -> None:
        """For a request without another fallback: raises the error of a circle where it only lacks one because it has
        come through other gateways. Else these would believe that this gateway fails."""
        if self._hops >= MOST_HOPS and self._kept is not None and any(r.kind == "External" for r in self._kept.targets):
            raise errors.route_loop() from None

    def _left(self, prepared: Prepared, reason: str, *, starts: bool) -> None:
        """The request leaves its target for a fallback. `reason`: label of the metric; `starts`: the target has no
        replica yet, which is no failure of a canary."""
        app, meter = self._app, self._meter
        if self._canary is not None and not starts:
            meter.outcome = "refused"
            app.canaries.ended(self._canary, meter, doubtful=self._doubtful)
        self._canary = None
        app.metrics.fallbacks_taken.labels(reason).inc()
        meter.reroute(prepared.model)
        if self._spans is not None:
            self._spans.accepted(meter, prepared, "fallback")
        if self._reserved is not None:
            self._reserved.reprice(prepared.model, meter.fields.get("plan"))
        if prepared.model.external is None:
            app.demand.arrived(prepared.model.uid)

    def _admit(self, identity: KeyIdentity, raw: bytes, fetched: _Fetched | None) -> Prepared | _Incomplete:
        """Prepares the request for its target, or for a fallback that is cheaper by the conditions of its route: the
        first one that can do it. Limits and budget reserve for the one that it goes to. Raises ApiError."""
        self._cost_note = None
        found = self._prepare(identity, raw, fetched)
        if not isinstance(found, _TooCostly):
            return found
        before = self._reserved
        for instead in found.cheaper:
            try:
                prepared = self._prepare(identity, raw, fetched, instead, recorded=False)
            except ApiError as error:
                if error.status == 429 or self._reserved is not before:
                    raise
                continue  # it cannot do what the target could
            if isinstance(prepared, Prepared):
                self._canary = None
                self._cost_note = _CostNote(found.left.address, found.trigger, found.why)
                return prepared
        self._cost_note = _CostNote(
            found.left.address, None, f"{found.why}, but no cheaper fallback can do the request"
        )
        prepared = self._prepare(identity, raw, fetched, stays=True)
        if isinstance(prepared, _TooCostly):
            raise RuntimeError("a request that stays with its target leaves it")
        return prepared

    def _too_costly(self, identity: KeyIdentity, model: ServedModel, routed: _Routed, size: _Size) -> _TooCostly | None:
        """The cheaper fallbacks of a request, by the conditions of its route, which have a replica now and for which
        its Tenant's limits have room; None: it stays with its target."""
        app, conditions, index = self._app, routed.cost, self._app.directory.snapshot.model_index
        route = index.routes.get(routed.route)
        if conditions is None or route is None:
            return None
        targets = [(index.target(route, ref, identity), routed.moved_to(ref)) for ref in routed.fallback]
        options = [(one, moved) for one, moved in targets if one is not None and self._reaches(one)]
        percent = None if conditions.budget_percent is None or self._quota is None else self._quota.budget_percent()
        decision = decide_by_cost(
            conditions,
            app.quotas.ledger.rate_table,
            identity.plan,
            size.at(model),
            [size.at(one) for one, _ in options],
            percent,
        )
        cheaper = [options[place] for place in decision.cheaper]
        ready = [each for each in cheaper if self._has_replica(each[0])]
        fitting = [each for each in ready if self._fits(identity, size.at(each[0]))]
        # Where the limits have no room at the target either, a fallback refuses the request, or it waits for a share.
        if ready and not fitting and not self._fits(identity, size.at(model)):
            fitting = ready
        if fitting and decision.trigger is not None:
            return _TooCostly(model, fitting, decision.trigger, decision.why)
        why = decision.why
        if cheaper:
            missing = "fits the limits of its Tenant" if ready else "has a replica now"
            why += f", but no cheaper fallback {missing}"
        if why:
            self._cost_note = _CostNote(model.address, None, why)
        return None

    def _has_replica(self, model: ServedModel) -> bool:
        """Whether a fallback could take the request now."""
        app = self._app
        if model.external is not None:
            return self._hops < MOST_HOPS and app.externals.usable(model, self._meter.tenant)
        return app.holds.dead_end(model) is None and bool(app.fleet.usable(app.directory.snapshot, model))

    def _fits(self, identity: KeyIdentity, request: PricedRequest) -> bool:
        """Whether the Tenant's limits and budget have room for the request now."""
        return self._quota is None or self._quota.fits(request, identity.plan, begun=self._reserved is not None)

    def _tell_cost(self, prepared: Prepared) -> None:
        """Notes why the accepted request goes to a cheaper fallback, or stays with its target all the same."""
        app, note = self._app, self._cost_note
        if note is None:
            return
        if note.trigger is None:
            app.choices.stay(self._id, note.left, note.why)
        else:
            app.metrics.fallbacks_taken.labels(note.trigger).inc()
            app.choices.leave(self._id, note.left, prepared.model.address, note.why)

    async def _prepared_within_shares(
        self, identity: KeyIdentity, raw: bytes, fetched: _Fetched | None = None
    ) -> Prepared | _Incomplete:
        """Calls `_admit`. A request that fits its tenant's limits, but not this gateway's share of them, waits for
        the next share, and one that other gateways' requests leave no room for, until it is known whether they have
        ended: a client that sends one request after the other gets all of its limit. A large body first waits for the
        decoding slot."""
        size = len(raw) if fetched is None else len(raw) + sum(map(len, fetched.media))
        since, until = 0.0, None
        while True:
            try:
                if size < BIG:
                    return self._admit(identity, raw, fetched)
                async with self._app.big_bodies.slot(identity.tenant, size):
                    if self._scope.get(DISCONNECT) is GONE:
                        raise Disconnected
                    return self._admit(identity, raw, fetched)
            except MayFitSoon as refused:
                quota = self._quota
                if quota is None:
                    raise
                if until is None:
                    since = self._app.quotas.clock()
                    until = asyncio.get_running_loop().time() + SHARE_WAIT_SECONDS
                    self._app.metrics.share_waits.inc()
                await quota.wait_for_reports(refused, since, until, lambda: self._scope.get(DISCONNECT) is GONE)
                if self._scope.get(DISCONNECT) is GONE:
                    raise Disconnected from None
                identity = self._same_tenant(identity)

    def _prepare(
        self,
        identity: KeyIdentity,
        raw: bytes,
        fetched: _Fetched | None,
        instead: "tuple[ServedModel, _Routed] | None" = None,
        *,
        recorded: bool = True,
        stays: bool = False,
    ) -> Prepared | _Incomplete | _TooCostly:
        """Checks the body and makes the engine's body from it, or returns the media that must be fetched first, or the
        cheaper fallbacks that the request may go to. The decoded body is not kept. `instead`: a fallback, for a request
        that was prepared for another Model, and also recorded unless `recorded` is False. `stays`: cheaper fallbacks
        are not looked for. Raises ApiError."""
        app = self._app
        first = instead is None or not recorded
        form = None
        if self._engine_path in FORMS:
            form = audioform.read(self._content_type, raw)
            parsed = form.parsed
        else:
            check_size(raw, app.json_bounds)
            parsed = parse(raw, self._engine_path)
            if self._engine_path == RERANK:
                write_documents(parsed.fields)
        asked, translatable = parsed, True
        if self._dialect is not None:
            try:
                parsed = translated(asked, self._dialect)
            except ApiError:
                translatable = False  # an external target may serve this API itself
        fields = parsed.fields
        model, routed = instead or self._resolve(identity, parsed.model_name, fields, len(raw))
        native = self._native(model)
        if native is None and not translatable and self._dialect is not None:
            translated(asked, self._dialect)  # raises again
        if instead is None and fetched is not None and not self._means_the_same(fetched.model, model, routed):
            raise self._unknown(identity, parsed.model_name)
        if native is None:
            refuse_incapable(model, self._engine_path, parsed.model_name)
            if self._dialect is not None:
                refuse_begun_answer(model, fields)
        size, wanted, facts = len(raw), (), model.facts
        if fields.get("tools") and not facts.compiles_tools and self._has_compiling_replica(model):
            facts = replace(facts, compiles_tools=True)
        if native is not None:
            asked = untranslated(asked, native)
        elif fetched is not None:
            # The body now contains the media and is checked as if it had arrived so. No host is allowed any more: only
            # `data:` URLs pass.
            size += remote.put(fields, fetched.media)
            checked(fields, self._engine_path, _without_hosts(facts), size, self._dialect)
        elif model.facts.media_hosts and app.settings.media_egress and self._engine_path == CHAT:
            checked(fields, self._engine_path, facts, size, self._dialect)
            wanted = remote.wanted(fields, model.facts.media_hosts)
        else:
            checked(fields, self._engine_path, _without_hosts(facts), size, self._dialect)
        if native is None and (turns := fields.get("messages")) is not None:
            write_turns(turns, engine=model.external is None)
        if fetched is None and first:
            self._meter = Meter(
                self._id,
                app.settings.installation,
                identity,
                model,
                endpoint=self._path,
                model_name=parsed.model_name,
                stream=parsed.stream,
                client_request_id=self._client_id,
                gateway=app.boot,
                route=None if routed is None else routed.route,
            )
            self._meter.free = self._engine_path in TOKENIZING
            if self._engine_path in PAIRS:
                self._meter.reads(len(pairs_of(fields)[1]), repeated(fields))
            elif form is not None:
                self._meter.hears(form.recording.most_seconds, form.recording.milliseconds)
        elif first:
            self._meter.reroute(model)
        if first and self._engine_path == CHAT and model.facts.media and translatable:
            self._meter.sees(media_size(fields))
        if native is None:
            wished = bound_answer(fields, self._engine_path, None)
            bound = bound_answer(fields, self._engine_path, model.max_output_tokens)
        else:
            wished = bound_native(asked.fields, native.bound, self._engine_path, None)
            bound = bound_native(asked.fields, native.bound, self._engine_path, model.max_output_tokens)
        choices, prompt_count = fields.get("n"), prompts(fields)
        choices = choices if type(choices) is int else 1
        answers = max(1, choices) * prompt_count if self._engine_path in GENERATING else 0
        if instead is None and not stays and not wanted and routed is not None and routed.cost is not None:
            costly = None
            if not self._meter.free:
                read = self._meter.read_bytes(size)
                asks = _Size(self._engine_path, read, answers, wished, self._meter.units())
                costly = self._too_costly(identity, model, routed, asks)
            if costly is not None:
                return costly
        if self._quota is not None and first:
            read = 0 if self._meter.free else self._meter.read_bytes(size)
            self._reserved = self._quota.reserve(
                model,
                identity.plan,
                read,
                answers,
                bound,
                units=self._meter.units(),
                grows=bool(wanted),
                begun=self._reserved,
            )
        if wanted:
            return _Incomplete(model, wanted)
        # `engine_body` runs before the usage record is opened, so that its errors leave no record to close.
        space = prefix_space(model, identity)
        salt = None
        if space != SHARED and takes_salt(self._engine_path, model):
            salt = app.key_ring.cache_salt(model.uid, space)
        content_type, dialect = _JSON, self._dialect
        if native is not None:
            self._raw, dialect = native_body(asked.fields, model.engine_name), None
        elif model.external is not None:
            translated_body = self._dialect is not None
            self._raw = external_body(parsed, self._engine_path, model.engine_name, translated=translated_body)
        elif form is None:
            self._raw = engine_body(parsed, self._engine_path, model.engine_name, self._id, salt)
        else:
            self._raw, content_type = audioform.engine_form(form, raw, model.engine_name)
            fields = audioform.loggable(fields)
            dialect = audioform.STREAM if parsed.stream else None
        marks = self._marks(space, fields, model)
        prepared = Prepared(
            self._engine_path if native is None else self._path,
            parsed.model_name,
            parsed.stream,
            parsed.wants_usage,
            parsed.wants_continuous,
            model,
            bound,
            choices,
            identity.priority,
            prompt_count,
            self._prompt(space, fields, model, size, marks),
            dialect=dialect,
            native=native,
            content_type=content_type,
            top_n=fields.get("top_n"),
            documents=fields.get("return_documents") is not False,
            pairs=len(pairs_of(fields)[1]) if self._engine_path in PAIRS else 0,
            plain=form is not None and fields.get("response_format") == "text",
            added=added_of(self._engine_path, fields),
            salted=salt is not None and needs_salt(self._engine_path, model),
            target=None if routed is None else routed.target,
            marks=marks if app.traffic.most else None,
        )
        self._routed = routed
        if identity.logging is not None and first:
            original = raw if fetched is None and self._dialect is None and form is None else None
            self._reply.log = app.logs.logger.begin(identity, self._key_hash, original, fields)
        return prepared

    def _has_compiling_replica(self, model: ServedModel) -> bool:
        """Whether a replica makes grammars of tools, although the Model's engine does not: by the chart's settings, or
        while it is replaced."""
        return any(replica.compiles_tools for replica in self._app.directory.snapshot.replicas_of(model))

    def _native(self, model: ServedModel) -> NativeApi | None:
        """The API of the client, where the external target serves it itself; None: it is chat completions, or is
        translated into them."""
        native = None if self._dialect is None else self._dialect.native
        if native is None or model.external is None or native.endpoint not in model.external.endpoints:
            return None
        return native

    def _resolve(
        self, identity: KeyIdentity, name: str, fields: dict[str, Any], size: int
    ) -> "tuple[ServedModel, _Routed | None]":
        """What the name in the body means, and what chose it if that was a route. Raises ApiError."""
        index = self._app.directory.snapshot.model_index
        found = index.meaning(name, identity)
        if found is None:
            raise self._unknown(identity, name)
        if not isinstance(found, DeclaredRoute):
            return found, None
        if self._draw is None:
            self._draw, self._mirror_draw = random.random(), random.random()  # noqa: S311 - shares, no secrets
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in self._headers.items()}
        facts = RequestFacts(
            identity.tenant,
            self._path,
            headers,
            size,
            lambda: conversation_of(fields),
            # Asked by each rule for lengths; reading media takes long.
            cache(lambda: media_size(fields).text_bytes(size) if self._engine_path == CHAT else size),
        )

        def usable(ref: TargetRef) -> bool:
            target = index.target(found, ref, identity)
            return target is not None and self._reaches(target)

        def permitted(ref: TargetRef) -> bool:
            target = index.target(found, ref, identity)
            return target is not None and self._reaches(target) and self._app.externals.permitted(target)

        halted = self._app.canaries.is_halted
        chosen = decide(found, facts, permitted, self._draw, halted, self._mirror_draw)
        if isinstance(chosen, NoTarget):
            # The error then says what an external target lacks.
            chosen = decide(found, facts, usable, self._draw, halted, self._mirror_draw)
        if isinstance(chosen, NoTarget):
            raise errors.no_rule(name) if chosen.reason == "no-rule" else errors.no_target(name, found.key)
        model = index.target(found, chosen.target, identity)
        if model is None:
            raise errors.no_target(name, found.key)
        if model.external is not None and self._hops >= MOST_HOPS:
            raise errors.route_loop()
        self._canary = chosen.canary
        return model, _Routed(
            found.key, chosen.target, chosen.fallback, chosen.leave_seconds, chosen.mirror, chosen.role, chosen.cost
        )

    def _means_the_same(self, before: ServedModel, model: ServedModel, routed: _Routed | None) -> bool:
        """Whether the name that meant a Model before media were fetched still does. A route may choose another one, by
        the same draw: meanwhile a canary may have halted, or a weight may have changed."""
        if routed is not None and routed.route == self._meter.fields.get("route"):
            return True
        return _identity_of(model) == _identity_of(before)

    def _reaches(self, model: ServedModel) -> bool:
        """Whether the request can go there: a proxy that carries it takes it to replicas only."""
        return model.external is None or CARRIER not in self._scope

    def _prompt(
        self, space: str, fields: dict[str, Any], model: ServedModel, size: int, marks: Marks | None
    ) -> Prompt | None:
        """What the choice of a replica goes by. `size`: bytes of the body with its media."""
        app = self._app
        # While the Model has no replica, the request waits for several, maybe.
        if model.external is not None or self._meter.free or len(app.directory.snapshot.replicas_of(model)) == 1:
            return None
        points = () if app.fleet.scores is None else points_of(marks)
        meter = self._meter
        prompt = prompt_of(f"{model.uid} {space}", fields, meter.read_bytes(size), points, medium=meter.media.each)
        return prompt if model.keeps_prefixes else Prompt(prompt.tokens)

    def _marks(self, space: str, fields: dict[str, Any], model: ServedModel) -> Marks | None:
        """Checksums of the prompt's beginnings, for advice and for the choice among several replicas."""
        app = self._app
        if model.external is not None or self._engine_path not in GENERATING or not model.keeps_prefixes:
            return None
        chosen = app.fleet.scores is not None and len(app.directory.snapshot.replicas_of(model)) != 1
        if not app.traffic.most and not chosen:
            return None
        adapter = "" if model.adapter is None else model.adapter.uid
        return prompt_marks(app.key_ring.mark_secret(model.uid, adapter, space), fields)

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
        app, meter = self._app, self._meter
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
                        starts = left.starts
                    except ApiError as error:
                        self._doubtful = error.outcome in DOUBTFUL
                        if error.code not in _REFUSED_BY_TARGET or meter.first_byte is not None:
                            raise
                        following = await self._fall_back(needs_replica=False)
                        if abort.aborted:
                            raise ClientGone from None
                        if following is None:
                            self._refuse_loop()
                            raise
                        former, prepared, reason, starts = prepared.model, following, "refused", False
                        why = f"it refused the request ({error.code})"
                    # All targets together have the time of the first one.
                    if deadline.shorten(app.deadlines_of(prepared.model).seconds):
                        bounding = prepared.model
                    app.choices.leave(self._id, former.address, prepared.model.address, why)
                    self._left(prepared, reason, starts=starts)
        except ClientGone:
            meter.outcome = "cancelled"
            app.choices.client_left(
                self._id,
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
            log.error("request failed", request=self._id, **redact.redact_error(error))
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
                app.logs.logger.end(logged, meter, app.directory.snapshot.keys.get(self._key_hash))
            app.metrics.observe(meter, self._engine_path)
            app.traffic.add(meter, prepared)
            self._note_route(meter, prepared)
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher

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
        app, meter = self._app, self._meter
        raw, self._raw = self._raw, b""  # the accepted request keeps the only copy, trimmed if it waits
        request = AcceptedRequest(
            app,
            prepared,
            raw,
            meter,
            self._reply,
            abort,
            deadline,
            self._spans,
            self._check_key,
            leave_seconds=math.inf if leave_seconds is None or self._kept is None else leave_seconds,
            fall_back=lambda: self._fall_back(needs_replica=True),
            carrier=self._scope.get(CARRIER),
            hops=self._hops,
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
        finally:
            app.checkpoints.discard(meter)

    async def _dispatch_outside(self, request: AcceptedRequest) -> None:
        """The same for an external target."""
        self._app.checkpoints.add(self._meter)
        try:
            await (outside := ExternalDispatch(request)).run()
            self._doubtful = outside.doubtful
        finally:
            self._app.checkpoints.discard(self._meter)

    async def _watch(self, abort: AbortHandle) -> None:
        """Waits for the client to leave, and then aborts the request at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        abort.abort()

    # --- answering ----------------------------------------------------------------------------------------------------

    def _identity(self) -> KeyIdentity:
        header = self._headers.get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        key = key.strip()
        if not header:
            key = self._headers.get(_API_KEY, b"").strip()
        elif scheme.lower() != b"bearer":
            key = b""
        if not key:
            raise errors.unauthorized(
                401, "No API key. Send `Authorization: Bearer <key>` or `x-api-key: <key>`.", "missing_api_key"
            )
        if not self._app.directory.complete:
            # A gateway that has not read all keys must not reject one: SDKs do not retry a 401.
            raise errors.starting()
        self._key_hash = hashlib.sha256(key).hexdigest()
        identity = self._check_key()
        self._quota = self._reply.quota = self._app.quotas.of(identity)
        return identity

    def _same_tenant(self, before: KeyIdentity) -> KeyIdentity:
        """Authenticates the key again after a wait. A key that another tenant has now is refused: what was reserved
        belongs to the previous tenant."""
        now = self._check_key()
        if now.tenant != before.tenant:
            raise errors.unauthorized(*_DENIED["unknown"])
        return now

    def _check_key(self) -> KeyIdentity:
        """Authenticates the key. Called again after a wait, in case the key was revoked or the budget was used up."""
        found = authenticate(self._app.directory.snapshot.keys, self._key_hash, datetime.now(UTC))
        if isinstance(found, Denied):
            raise errors.unauthorized(*_DENIED[found.reason])
        if self._reserved is not None and self._app.quotas.of(found) is not None:
            self._reserved.recheck()
        return found

    async def _send_error(self, error: ApiError, model: ServedModel) -> None:
        self._app.metrics.errors.labels(*_labels(error)).inc()
        self._app.choices.refuse(self._id, error, _model_key(model))
        if not self._reply.started:
            self._meter.status = error.status
        # A client that does not read must not keep the request alive; the server closes its connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEND_ERROR_SECONDS):
                await self._reply.error(error)


def _labels(error: ApiError) -> tuple[str, str]:
    """Reason and layer of an error, for metrics."""
    return refusals.label(error.code, error.status), refusals.refusal(error.code, error.outcome).layer


def _identity_of(model: ServedModel) -> tuple[str, str]:
    """What identifies a Model, or a Model with an adapter."""
    return model.uid, model.address


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


def _without_hosts(facts: Facts) -> Facts:
    return replace(facts, media_hosts=_NO_HOSTS) if facts.media_hosts else facts
