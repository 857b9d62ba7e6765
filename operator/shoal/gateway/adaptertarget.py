"""The target of a request that names an adapter. Such a request is sent only under a lease, only to a replica with a
live stream, and with the adapter's revision at the moment of sending."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from shoal.api import reasons
from shoal.core.hold.limits import FIRST_LOAD_SECONDS
from shoal.core.lora.placement import rendezvous
from shoal.core.lora.placement.rendezvous import digest
from shoal.core.routing.adapterchoice import AdapterCandidate, AdapterChoice, choose_for_adapter
from shoal.core.routing.basis import AdapterStep
from shoal.core.routing.choice import NoReplica
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedAdapter
from shoal.core.routing.score import Pick
from shoal.gateway.accepted import AcceptedRequest, InFlight
from shoal.gateway.leases import WAIT_SECONDS, LeaseRefused
from shoal.gateway.relay import LACKS_ADAPTER
from shoal.gateway.waiter import AdapterWait, ClientGone
from shoal.net import errors

_HOPELESS: Final = reasons.ADAPTER_REASONS | {reasons.LOAD_FAILED, reasons.LOAD_HANGS, reasons.LOAD_ENDED_ENGINE}
"""Refusals that waiting does not resolve."""
_FLIGHT_SECONDS: Final = WAIT_SECONDS + 10.0


class AdapterTarget:
    """An adapter of a Model, as the target of one request."""

    __slots__ = (
        "_adapter",
        "_app",
        "_has_waited",
        "_lease_step",
        "_lease_target",
        "_lease_waits",
        "_model",
        "_paid_for",
        "_refusals",
        "_request",
        "_tokens",
        "_usable",
    )

    def __init__(self, request: AcceptedRequest, adapter: ServedAdapter) -> None:
        self._request = request
        self._adapter = adapter
        self._lease_target: Replica | None = None
        self._lease_step: AdapterStep = "ready"
        self._lease_waits: dict[str, str] = {}
        """The adapter's engine name, by uid of each pod at which the request waited for a lease."""
        self._has_waited = False
        """The request has waited in the Model's hold queue."""
        self._paid_for = False
        """The hold queue already charged the next attempt to the retry budget."""
        self._tokens = 0
        """Estimated tokens of the request, if it waited in the hold queue."""
        self._refusals: list[LeaseRefused] = []
        self._usable = 0
        """Replicas at the last choice."""
        self._app = app = request.app
        prepared = request.prepared
        self._model = model = prepared.model
        missed = request.meter.adapter_missed = not app.fleet.residency.pods(adapter.engine_name)
        app.demand.adapters.arrived(adapter.uid, model.uid, missed=missed)
        app.metrics.adapter_requested(model.key, prepared.path, missed=missed)

    # --- choosing: no await from here to the start of the write -------------------------------------------------------

    def choose(self, tried: set[str], in_a_row: int) -> InFlight | NoReplica:
        app, model, attempts = self._app, self._model, self._request.attempts
        if not attempts and not self._has_waited and model.uid in app.holds.queues:
            return NoReplica("queue")
        if in_a_row >= app.settings.attempts:
            return NoReplica("tried")
        choice = self._choose(tried)
        if isinstance(choice, NoReplica):
            return choice
        if not choice.leased:
            self._lease_target, self._lease_step = choice.replica, choice.step
            return NoReplica("no-lease")
        budget = app.holds.budget(model.uid)
        paid = self._paid_for
        if not attempts:
            if not self._has_waited:
                budget.sent()
        elif not paid and not budget.take(time.monotonic()):
            app.metrics.retries_deferred.inc()
            return NoReplica("tried")
        self._paid_for = False
        app.fleet.enter(choice.replica, self._tokens, choice.pick)
        step = choice.step
        if (wanted := self._lease_target) is not None and wanted.uid == choice.replica.uid:
            step = self._lease_step  # a score among those that have the adapter by now explains nothing
        basis = self._request.basis(choice.pick, self._usable, step)
        return InFlight(choice.replica, self._tokens, bool(attempts), choice.pick, basis)

    def started(self, replica: Replica) -> None:
        app, adapter = self._app, self._adapter
        app.leases.used(replica.uid, adapter)
        for uid, name in self._lease_waits.items():
            if uid != replica.uid:
                app.leases.leave(uid, name)
        self._lease_waits.clear()
        app.fleet.residency.enter(replica.uid, adapter.engine_name)
        app.demand.adapters.sent(adapter.uid, replica.model_uid)
        self._request.meter.use(adapter)

    def _choose(self, tried: set[str]) -> AdapterChoice | NoReplica:
        app, model, name = self._app, self._model, self._adapter.engine_name
        fleet, leases = app.fleet, app.leases
        usable = fleet.live_replicas(app.directory.snapshot, model)
        if isinstance(usable, NoReplica):
            return usable
        self._refusals = []
        self._usable = len(usable)
        have = [
            self._home(usable[uid], loaded=True)
            for uid in fleet.residency.pods(name)
            if uid in usable and uid not in tried and not self._refused(uid)
        ]
        choice = choose_for_adapter(
            have,
            lambda: self._loadable_homes(usable.values(), tried),
            self._prefer,
            fleet.next_sequence(),
            self._request.prepared.head,
            # Of a single replica no score is computed: there is no choice.
            self._cheapest if len(usable) > 1 else lambda _replicas, _waits: None,
            leases.load_seconds,
        )
        if isinstance(choice, NoReplica):
            if self._refusals:
                return NoReplica("refused")
            return NoReplica("tried") if tried else choice
        # A lease may arrive before the stream reports the adapter as loaded.
        return choice if choice.leased else choice._replace(leased=leases.is_valid(choice.replica.uid, name))

    def _cheapest(self, replicas: Sequence[Replica], waits: Mapping[str, float] | None) -> Pick | None:
        prompt, adapter = self._request.prepared.prompt, self._adapter
        if prompt is None:
            return None
        # Engines keep what each adapter computed apart.
        salt = digest(adapter.key)
        apart = prompt._replace(
            head=None if prompt.head is None else prompt.head ^ salt,
            system=None if prompt.system is None else prompt.system ^ salt,
        )
        home = rendezvous.best(adapter.key, [r.uid for r in replicas])
        return self._app.fleet.cheapest(replicas, apart, waits=waits, home=home, alone=True)

    def _loadable_homes(self, replicas: Iterable[Replica], tried: set[str]) -> Iterator[AdapterCandidate]:
        """Replicas that would have to load the adapter, without those that serve no adapters or were already tried or
        refused."""
        fleet = self._app.fleet
        having = fleet.residency.pods(self._adapter.engine_name)
        for replica in replicas:
            uid, report = replica.uid, fleet.report(replica.uid)
            if report is None or report.adapters is None or uid in tried or uid in having or self._refused(uid):
                continue
            yield self._home(replica, loaded=False)

    def _home(self, replica: Replica, *, loaded: bool) -> AdapterCandidate:
        fleet, uid, name = self._app.fleet, replica.uid, self._adapter.engine_name
        report = fleet.report(uid)
        leased = self._app.leases.is_valid(uid, name)
        slot, state = leased, None
        if report is not None:
            known = report.adapter_slots is not None and report.adapter_slots_leased is not None
            slot = leased or not known or (report.adapter_slots_leased or 0) < (report.adapter_slots or 0)
            slot = slot or self._app.leases.spare(uid) > 0
            at = (report.adapters or {}).get(name)
            state = at.state if at is not None else None
        has_capacity = fleet.allowance(replica, kv_percent=self._model.kv_percent, share=1.0).requests > 0
        return AdapterCandidate(replica, loaded, leased, slot, has_capacity, fleet.in_flight(uid), state)

    def _refused(self, uid: str) -> bool:
        refused = self._app.leases.refused(uid, self._adapter.engine_name)
        if refused is not None:
            self._refusals.append(refused)
        return refused is not None

    def _prefer(self, replicas: Sequence[Replica]) -> Replica:
        best = rendezvous.best(self._adapter.key, [r.uid for r in replicas])
        return next(r for r in replicas if r.uid == best)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def wait_for(self, why: NoReplica, tried: set[str]) -> InFlight:
        while True:
            if self._request.abort.aborted:
                raise ClientGone
            if why.reason == "no-lease" and self._lease_target is not None:
                await self._get_lease(self._lease_target)
            elif why.reason == "refused":
                await self._refused_everywhere()
            elif why.reason == "no-adapters":
                await self._wait_for_adapter(why)
            else:
                await self._wait_in_queue(why, tried)
            found = self.choose(tried, 0)
            if isinstance(found, NoReplica) and found.reason == "tried" and self._paid_for:
                tried.clear()
                found = self.choose(tried, 0)
            if not isinstance(found, NoReplica):
                return found
            why = found

    async def _wait_in_queue(self, why: NoReplica, tried: set[str]) -> None:
        """Waits in the Model's hold queue until some replica has capacity. That replica is given back at once: `choose`
        then takes one that suits the adapter."""
        demand, adapter, model = self._app.demand.adapters, self._adapter, self._model
        demand.held(adapter.uid, model.uid)
        try:
            place = await self._request.wait_in_queue(why, tried, self._recheck, chooses_again=True)
        finally:
            demand.released(adapter.uid, model.uid)
        self._has_waited, self._paid_for, self._tokens = True, place.paid, place.tokens
        self._app.leave(place.replica, place.tokens)

    async def _get_lease(self, replica: Replica) -> None:
        """Waits for a lease at a replica. All requests for the adapter share one call to the replica's agent."""
        leases, name = self._app.leases, self._adapter.engine_name
        if leases.ask(replica.uid, self._adapter).done:
            return
        wait = self._enter_wait(NoReplica("no-lease"), at=replica.uid)
        # Any running call for the adapter may end the wait: another pod's agent may grant an earlier call first.
        flights = leases.under_way(name)
        for flight in flights:
            flight.waiting[wait.wake] = None
        self._lease_waits[replica.uid] = name
        try:
            await self._wait_counted(wait, _FLIGHT_SECONDS)
        finally:
            for flight in flights:
                flight.waiting.pop(wait.wake, None)

    async def _refused_everywhere(self) -> None:
        """No replica can be used, and at least one refused a lease: waits until a replica may be asked again. Raises
        ApiError if waiting cannot help."""
        word, refusals = self._request.prepared.model_name, self._refusals
        if refusals and all(r.never for r in refusals):
            self._request.meter.outcome = "rejected"
            raise errors.adapter_unusable(word, refusals[0].reason, self._adapter.key)
        if refusals and all(r.never or r.reason in _HOPELESS for r in refusals):
            self._request.meter.outcome = "refused"
            raise errors.adapter_waits(word, next(r.reason for r in refusals if not r.never), self._adapter.key)
        again = min((r.until for r in refusals), default=0.0) - time.monotonic()
        await self._wait_for_adapter(NoReplica("refused"), at="", seconds=max(0.05, again))

    async def _wait_for_adapter(
        self, why: NoReplica, *, at: str | None = None, seconds: float = _FLIGHT_SECONDS
    ) -> None:
        if not self._model.limits.max_requests:
            raise self._request.refusal(why)
        await self._wait_counted(self._enter_wait(why, at=at), seconds)

    async def _wait_counted(self, wait: AdapterWait, seconds: float) -> None:
        demand, adapter, model = self._app.demand.adapters, self._adapter, self._model
        demand.held(adapter.uid, model.uid)
        try:
            await self._request.wait_with(wait, self._recheck, seconds)
        finally:
            demand.released(adapter.uid, model.uid)
            wait.close()

    def _enter_wait(self, why: NoReplica, *, at: str | None) -> AdapterWait:
        """Begins a wait for the pod with uid `at`; None: for any pod that serves adapters; "": for no pod, only for
        time to pass.

        Raises:
            ApiError: no replica will come, or the hold limits are reached.
        """
        app, prepared, meter = self._app, self._request.prepared, self._request.meter
        if at is not None and meter.adapter_missed:
            adapter = self._adapter
            waited = app.fleet.residency.waited_for(adapter.uid, adapter.engine_name, time.monotonic())
            # The first load says nothing of how the adapter is served. One that does not come about has failed, even if
            # no agent says so: the engine may die of each.
            meter.cold = meter.cold or waited <= FIRST_LOAD_SECONDS
        refusal = app.holds.wait_refusal(self._model, prepared.model_name)
        if refusal is None:
            size, tokens = self._request.weight()
            wait = app.holds.adapter_waits.enter(
                self._model,
                meter.tenant,
                size,
                tokens,
                reason=why.reason,
                adapter=self._adapter.uid,
                at=at,
                may_continue=self._may_continue,
            )
            if isinstance(wait, AdapterWait):
                return wait
            refusal = app.holds.full_error(prepared.model_name, wait, 5)
        meter.outcome = "refused" if refusal.status >= 500 else "rejected"
        raise refusal

    def _may_continue(self) -> bool:
        """Whether the wait may continue: the adapter is unchanged, and a replica may come."""
        try:
            return self._current_adapter() == self._adapter and self._app.holds.dead_end(self._model) is None
        except errors.ApiError:
            return False

    def _current_adapter(self) -> ServedAdapter:
        """The adapter's current revision.

        Raises:
            ApiError: the adapter is gone, or the client may no longer use it.
        """
        prepared, identity = self._request.prepared, self._request.check_key()
        index = self._app.directory.snapshot.model_index
        current = index.find(prepared.meaning, identity)
        if current is not None and current.uid == self._model.uid and current.adapter is not None:
            if current.adapter.uid == self._adapter.uid:
                return current.adapter
        elif current is None and (unserved := index.why_not(prepared.meaning, identity)) is not None:
            raise errors.adapter_waits(prepared.model_name, unserved.reason, unserved.adapter)
        raise errors.model_not_found(prepared.model_name)

    def _recheck(self) -> None:
        self._adapter = self._current_adapter()

    # --- sending ------------------------------------------------------------------------------------------------------

    def finished(self, replica: Replica, failure: str | None) -> None:
        app, adapter = self._app, self._adapter
        if failure == LACKS_ADAPTER:
            app.leases.adapter_missing(replica.uid, adapter.engine_name)
        app.fleet.residency.leave(replica.uid, adapter.engine_name)
        app.demand.adapters.ended(adapter.uid, replica.model_uid)

    @property
    def adapter_name(self) -> str | None:
        return self._adapter.engine_name
