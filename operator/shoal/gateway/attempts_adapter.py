"""The same for a request that names an adapter: only under a lease, only where the stream is live, and with the
revision that answers at the moment of sending."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from shoal.api import reasons
from shoal.core.adapters import rendezvous
from shoal.core.resolve import ServedAdapter
from shoal.core.routing import NoReplica, Replica
from shoal.core.routing_adapters import AdapterChoice, Home, choose_home
from shoal.gateway import errors
from shoal.gateway.attempts import Attempts
from shoal.gateway.leases import WAIT_SECONDS, Refused
from shoal.gateway.relay import LACKS_ADAPTER, Retry
from shoal.gateway.stay import Stay
from shoal.gateway.upstream import Target
from shoal.gateway.waiter import ClientGone
from shoal.gateway.waiting import Place

_HOPELESS: Final = reasons.ADAPTER_REASONS | {reasons.LOAD_FAILED, reasons.LOAD_HANGS}
"""Refusals that waiting does not mend."""
_FLIGHT_SECONDS: Final = WAIT_SECONDS + 10.0


class AdapterAttempts(Attempts):
    """One request's."""

    __slots__ = ("_adapter", "_ask", "_asked", "_paid_for", "_passed", "_refusals", "_tokens")

    def start(self, adapter: ServedAdapter) -> None:
        """Says which adapter, before `run`."""
        self._adapter = adapter
        self._ask: Replica | None = None
        self._asked: dict[str, str] = {}
        """Pods that it waited at for a lease, and for which adapter."""
        self._passed = False
        """It has waited its turn in the Model's room."""
        self._paid_for = False
        """The next try is a retry that was paid there."""
        self._tokens = 0
        """What it is assumed to hold, if it waited in the room."""
        self._refusals: list[Refused] = []
        missed = not self._app.fleet.residency.pods(adapter.engine_name)
        prepared = self._prepared
        self._app.demand.adapters.arrived(adapter.uid, prepared.model.uid, missed=missed)
        self._app.metrics.adapter_asked(prepared.model.key, prepared.path, missed=missed)

    # --- choosing: no await from here to the start of the write ------------------------------------------------------

    def _pick(self, tried: set[str], in_a_row: int) -> Place | NoReplica:
        app, model, attempts = self._app, self._prepared.model, self._meter.attempts
        if not attempts and not self._passed and model.uid in app.holds.rooms:
            return NoReplica("queue")
        if in_a_row >= app.settings.attempts:
            return NoReplica("tried")
        choice = self._choose(tried)
        if isinstance(choice, NoReplica):
            return choice
        if not choice.leased:
            self._ask = choice.replica
            return NoReplica("no-lease")
        budget = app.holds.budget(model.uid)
        paid = self._paid_for
        if not attempts:
            if not self._passed:
                budget.sent()
        elif not paid and not budget.take(time.monotonic()):
            app.metrics.retries_put_off.inc()
            return NoReplica("tried")
        self._paid_for = False
        return self._enter(choice.replica, bool(attempts))

    def _enter(self, replica: Replica, paid: bool) -> Place:
        app, adapter = self._app, self._adapter
        app.leases.used(replica.uid, adapter)
        for uid, name in self._asked.items():
            if uid != replica.uid:
                app.leases.leave(uid, name)
        self._asked.clear()
        app.fleet.enter(replica, self._tokens)
        app.fleet.residency.enter(replica.uid, adapter.engine_name)
        app.demand.adapters.sent(adapter.uid, replica.model_uid)
        self._meter.use(adapter)
        return Place(replica, self._tokens, paid)

    def _choose(self, tried: set[str]) -> AdapterChoice | NoReplica:
        app, model, name = self._app, self._prepared.model, self._adapter.engine_name
        fleet, leases = app.fleet, app.leases
        usable = fleet.heard_replicas(app.directory.snapshot, model)
        if isinstance(usable, NoReplica):
            return usable
        self._refusals = []
        have = [
            self._home(usable[uid], loaded=True)
            for uid in fleet.residency.pods(name)
            if uid in usable and uid not in tried and not self._refused(uid)
        ]
        choice = choose_home(
            have,
            lambda: self._elsewhere(usable.values(), tried),
            self._prefer,
            fleet.next_turn(),
            self._prepared.head,
        )
        if isinstance(choice, NoReplica):
            if self._refusals:
                return NoReplica("refused")
            return NoReplica("tried") if tried else choice
        # A lease may be here before the stream says that the adapter is.
        return choice if choice.leased else AdapterChoice(choice.replica, leases.good(choice.replica.uid, name))

    def _elsewhere(self, replicas: Iterable[Replica], tried: set[str]) -> Iterator[Home]:
        """Replicas that would have to load the adapter, without those that serve none or were asked in vain."""
        fleet = self._app.fleet
        having = fleet.residency.pods(self._adapter.engine_name)
        for replica in replicas:
            uid, said = replica.uid, fleet.said(replica.uid)
            if said is None or said.adapters is None or uid in tried or uid in having or self._refused(uid):
                continue
            yield self._home(replica, loaded=False)

    def _home(self, replica: Replica, *, loaded: bool) -> Home:
        fleet, uid, name = self._app.fleet, replica.uid, self._adapter.engine_name
        said = fleet.said(uid)
        leased = self._app.leases.good(uid, name)
        slot, state = leased, None
        if said is not None:
            known = said.adapter_slots is not None and said.adapter_slots_leased is not None
            slot = leased or not known or (said.adapter_slots_leased or 0) < (said.adapter_slots or 0)
            at = (said.adapters or {}).get(name)
            state = at.state if at is not None else None
        room = fleet.allowance(replica, kv_percent=self._prepared.model.kv_percent, share=1.0).requests > 0
        return Home(replica, loaded, leased, slot, room, fleet.in_flight(uid), state)

    def _refused(self, uid: str) -> bool:
        refused = self._app.leases.refused(uid, self._adapter.engine_name)
        if refused is not None:
            self._refusals.append(refused)
        return refused is not None

    def _prefer(self, replicas: Sequence[Replica]) -> Replica:
        best = rendezvous.best(self._adapter.key, [r.uid for r in replicas])
        return next(r for r in replicas if r.uid == best)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _wait(self, why: NoReplica, tried: set[str]) -> Place:
        while True:
            if self._abort.aborted:
                raise ClientGone
            if why.reason == "no-lease" and self._ask is not None:
                await self._fly(self._ask)
            elif why.reason == "refused":
                await self._refused_everywhere()
            elif why.reason == "no-adapters":
                await self._stay(why)
            else:
                await self._in_the_room(why, tried)
            found = self._pick(tried, 0)
            if isinstance(found, NoReplica) and found.reason == "tried" and self._paid_for:
                tried.clear()
                found = self._pick(tried, 0)
            if not isinstance(found, NoReplica):
                return found
            why = found

    async def _in_the_room(self, why: NoReplica, tried: set[str]) -> None:
        """Waits with the Model's other requests until a replica has room; which one gets this, its adapter says."""
        book, adapter, model = self._app.demand.adapters, self._adapter, self._prepared.model
        book.held(adapter.uid, model.uid)
        try:
            place = await super()._wait(why, tried)
        finally:
            book.unheld(adapter.uid, model.uid)
        self._passed, self._paid_for, self._tokens = True, place.paid, place.tokens
        self._app.leave(place.replica, place.tokens)

    async def _fly(self, replica: Replica) -> None:
        """Gets a lease there, with all who want it."""
        leases, name = self._app.leases, self._adapter.engine_name
        if leases.ask(replica.uid, self._adapter).done:
            return
        stay = self._enter_stay(NoReplica("no-lease"), at=replica.uid)
        # With all calls for the adapter: it may have waited for a slot elsewhere before, and have its turn there first.
        flights = leases.under_way(name)
        for flight in flights:
            flight.waiting[stay.wake] = None
        self._asked[replica.uid] = name
        try:
            await self._stay_at(stay, "no-lease", _FLIGHT_SECONDS)
        finally:
            for flight in flights:
                flight.waiting.pop(stay.wake, None)

    async def _refused_everywhere(self) -> None:
        """Waits until a replica may be asked again, where waiting can help."""
        word, refusals = self._prepared.word, self._refusals
        if refusals and all(r.never for r in refusals):
            self._meter.outcome = "rejected"
            raise errors.adapter_unusable(word, refusals[0].reason)
        if refusals and all(r.never or r.reason in _HOPELESS for r in refusals):
            self._meter.outcome = "refused"
            raise errors.adapter_waits(word, next(r.reason for r in refusals if not r.never))
        again = min((r.until for r in refusals), default=0.0) - time.monotonic()
        await self._stay(NoReplica("refused"), at="", seconds=max(0.05, again))

    async def _stay(self, why: NoReplica, *, at: str | None = None, seconds: float = _FLIGHT_SECONDS) -> None:
        if not self._prepared.model.limits.max_requests:
            raise self._refusal(why)
        await self._stay_at(self._enter_stay(why, at=at), why.reason, seconds)

    async def _stay_at(self, stay: Stay, why: str, seconds: float) -> None:
        book, adapter, model = self._app.demand.adapters, self._adapter, self._prepared.model
        book.held(adapter.uid, model.uid)
        try:
            await self._stand(stay, why, seconds)
        finally:
            book.unheld(adapter.uid, model.uid)
            stay.close()

    def _enter_stay(self, why: NoReplica, *, at: str | None) -> Stay:
        """A place to wait in: at a pod, by uid; "" at none; None for any that serves adapters.

        Raises:
            ApiError: no replica will come, or too much waits already.
        """
        app, prepared, meter = self._app, self._prepared, self._meter
        refusal = app.holds.no_use(prepared.model)
        if refusal is None:
            size, tokens = self._weight()
            stay = app.holds.stays.enter(
                prepared.model, meter.tenant, size, tokens, adapter=self._adapter.uid, at=at, still=self._still
            )
            if isinstance(stay, Stay):
                return stay
            refusal = app.holds.full(prepared.word, stay, 5)
        meter.outcome = "refused" if refusal.status >= 500 else "rejected"
        raise refusal

    def _still(self) -> bool:
        """Whether it may go on waiting as it is."""
        try:
            return self._now() == self._adapter and self._app.holds.no_use(self._prepared.model) is None
        except errors.ApiError:
            return False

    def _now(self) -> ServedAdapter:
        """The revision that answers now.

        Raises:
            ApiError: the adapter is gone, or this client's use of it.
        """
        prepared, identity = self._prepared, self._check_key()
        words = self._app.directory.snapshot.words
        now = words.find(prepared.word, identity)
        if now is not None and now.uid == prepared.model.uid and now.adapter is not None:
            if now.adapter.uid == self._adapter.uid:
                return now.adapter
        elif now is None and (reason := words.why_not(prepared.word, identity)) is not None:
            raise errors.adapter_waits(prepared.word, reason)
        raise errors.model_not_found(prepared.word)

    def _recheck(self) -> None:
        self._adapter = self._now()

    # --- sending ------------------------------------------------------------------------------------------------------

    async def _attempt(self, replica: Replica) -> None:
        app, adapter = self._app, self._adapter
        try:
            await super()._attempt(replica)
        except Retry as retry:
            if retry.reason == LACKS_ADAPTER:
                app.leases.lacking(replica.uid, adapter.engine_name)
            raise
        finally:
            app.fleet.residency.leave(replica.uid, adapter.engine_name)
            app.demand.adapters.ended(adapter.uid, replica.model_uid)

    def _to_send(self, target: Target, key: str) -> tuple[bytes, bytes]:
        _, body = super()._to_send(target, key)
        # The engine reads the adapter's name from `lora_path`, which no client's body brings along (`body.ALLOWED`).
        named = b'{"lora_path":"%b",' % self._adapter.engine_name.encode() + body[1:]
        return self._head(target, key, len(named), self._prepared.stream), named
