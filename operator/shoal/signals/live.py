"""The operator's signals: a live stream to every agent and every gateway, as decisions read them.

The caller reports which pods exist (`listen_to_replica`, `listen_to_gateway`, `forget`) and is called with each Model
whose signals changed. A message is only stored; everything else is computed when it is read.
"""

import time
from collections.abc import Callable, Collection, Mapping

from shoal.api.demand import AdapterDemand, FirstToken, ModelDemand
from shoal.api.replica import ReplicaKeys
from shoal.core.routing.canary import CanaryHalt
from shoal.core.scaling import Demand, Load
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.signals.demand import DemandStreams
from shoal.signals.rates import CounterRate
from shoal.signals.replica import ReplicaStreams

Changed = Callable[[str | None, bool], None]
"""Called with the uid of a Model whose signals changed, or None for every Model; and whether a decision is urgent: a
replica was added, removed or changed its phase, or requests began to wait in an engine or a gateway."""

FirstTokensReported = Callable[[str, Mapping[str, FirstToken]], None]
"""Called with the uid of a Model and, by uid of the pod, the first tokens of its replicas that one gateway tells of; as
often as it tells of the Model."""


class LiveSignals:
    """Streams to all agents and gateways. Not for threads."""

    def __init__(
        self,
        changed: Changed,
        identity: ListenerIdentity = ListenerIdentity(),  # noqa: B008 - immutable
        repriced: Callable[[], None] = lambda: None,
        canaries_halted: Callable[[], None] = lambda: None,
        first_tokens: FirstTokensReported = lambda _model, _told: None,
    ) -> None:
        """`repriced` is called when `currency` or `prices_refused` changes, `canaries_halted` when `canaries` does."""
        self._changed, self._repriced, self._canaries_halted = changed, repriced, canaries_halted
        self._first_tokens = first_tokens
        self._canaries: Mapping[str, CanaryHalt] = {}
        self._prices: tuple[str | None, str | None] = (None, None)
        """`currency` and `prices_refused`."""
        self._model: dict[str, str] = {}
        """Pod's uid -> Model's."""
        self._marks: dict[str, tuple[str | None, str | None, bool]] = {}
        """Pod's uid -> its phase, its engine's boot, whether requests wait there."""
        self._held: dict[tuple[str, str], bool] = {}
        """(gateway's uid, Model's) -> whether it holds requests."""
        self._tokens: dict[str, CounterRate] = {}
        self._arrivals: dict[str, dict[str, CounterRate]] = {}
        """Model's uid -> gateway's -> requests."""
        self.replicas = ReplicaStreams(self._replica, identity)
        self.gateways = DemandStreams(self._gateway, identity)

    def start(self) -> None:
        """Before the first pod is named."""
        self.replicas.start()
        self.gateways.start()

    async def close(self) -> None:
        await self.replicas.close()
        await self.gateways.close()

    # --- who there is -------------------------------------------------------------------------------------------------

    def listen_to_replica(self, model_uid: str, peer: StreamPeer) -> None:
        """An engine pod of a Model; again when its address or key changed."""
        self._model[peer.uid] = model_uid
        self.replicas.put(peer)

    def listen_to_gateway(self, peer: StreamPeer) -> None:
        """A gateway's pod; again when its address or key changed."""
        self.gateways.put(peer)

    def forget(self, uid: str) -> None:
        """A pod, of either kind, that is gone."""
        self.replicas.drop(uid)
        self.gateways.drop(uid)
        for table in (self._model, self._marks, self._tokens):
            table.pop(uid, None)
        for model in [model for model, rates in self._arrivals.items() if rates.pop(uid, None) and not rates]:
            del self._arrivals[model]

    # --- what decisions read ------------------------------------------------------------------------------------------

    def load(self, pod_uid: str) -> Load | None:
        """The agent's report, None while its stream is not live. Its values are passed on unchanged: the decision
        judges impossible values."""
        keys = self.keys(pod_uid)
        return None if keys is None else load_of(keys)

    def keys(self, pod_uid: str) -> ReplicaKeys | None:
        """Everything the agent says, None while its stream is not live."""
        stream = self.replicas.get(pod_uid)
        return stream.keys if stream else None

    def agent_boot(self, pod_uid: str) -> str | None:
        """The agent's boot id, None while its stream is not live."""
        stream = self.replicas.get(pod_uid)
        return stream.boot if stream else None

    def demand(self, gateway_uid: str, model_uid: str) -> Demand | None:
        """What a gateway has of a Model: zeros when it names it not, None while its stream is not live."""
        stream = self.gateways.get(gateway_uid)
        return None if stream is None else demand_of(stream.demand(model_uid), stream.busy_adapters(model_uid))

    def adapter_demand(self, gateway_uid: str) -> Mapping[str, AdapterDemand] | None:
        """What a gateway has of adapters, by uid of the LoRAAdapter: a state that is replaced and not changed. None
        while its stream is not live, and of a gateway that does not tell."""
        stream = self.gateways.get(gateway_uid)
        return None if stream is None else stream.adapters

    def boot(self, gateway_uid: str) -> str | None:
        """The gateway's boot id, None while its stream is not live."""
        stream = self.gateways.get(gateway_uid)
        return stream.boot if stream else None

    def currency(self) -> str | None:
        """Of the price list in force, as gateways report it; None: no gateway with a live stream knows one, or they do
        not agree yet."""
        found = {stream.currency for stream in self.gateways.live() if stream.currency is not None}
        return found.pop() if len(found) == 1 else None

    def prices_refused(self) -> str | None:
        """Why the ledger refuses price lists, as gateways report it; None: it does not, or none reports it."""
        return max((stream.prices_refused for stream in self.gateways.live() if stream.prices_refused), default=None)

    def canaries(self) -> Mapping[str, CanaryHalt]:
        """Canaries that a gateway with a live stream has halted, by revision."""
        found: dict[str, CanaryHalt] = {}
        for stream in self.gateways.live():
            found |= stream.canaries
        return found

    # --- for people ---------------------------------------------------------------------------------------------------

    def age(self, uid: str) -> float | None:
        """Seconds since the last message of a pod of either kind; None while its stream is not live."""
        stream = self.replicas.get(uid) or self.gateways.get(uid)
        return time.monotonic() - stream.received_at if stream else None

    def tokens_per_second(self, pod_uid: str) -> float | None:
        """Prompt and generated tokens per second of a replica over the last 15 to 30 s; None: not known."""
        rate = self._tokens.get(pod_uid)
        return None if rate is None or self.replicas.get(pod_uid) is None else rate.per_second(time.monotonic())

    def arrivals_per_second(self, model_uid: str) -> float | None:
        """Accepted requests per second over the last 15 to 30 s at the gateways with a live stream; None: not known."""
        now = time.monotonic()
        rates = [r.per_second(now) for uid, r in self._arrivals.get(model_uid, {}).items() if self.gateways.get(uid)]
        known = [rate for rate in rates if rate is not None]
        if known:
            return sum(known)
        return 0.0 if self.gateways.live() and not rates else None

    # --- messages -----------------------------------------------------------------------------------------------------

    def _replica(self, uid: str, keys: ReplicaKeys | None) -> None:
        model = self._model.get(uid)
        if model is None:
            return
        if keys is None:
            self._marks.pop(uid, None)
            self._changed(model, True)
            return
        before = self._marks.get(uid)
        mark = self._marks[uid] = (keys.phase, keys.engine_boot, bool(keys.waiting))
        if keys.prompt_tokens_total is not None and keys.generation_tokens_total is not None:
            rate = self._tokens.get(uid)
            if rate is None:
                rate = self._tokens[uid] = CounterRate()
            rate.note(time.monotonic(), keys.engine_boot, keys.prompt_tokens_total + keys.generation_tokens_total)
        self._changed(model, mark != before)

    def _gateway(self, uid: str, models: Collection[str] | None) -> None:
        if models is None and (prices := (self.currency(), self.prices_refused())) != self._prices:
            self._prices = prices
            self._repriced()
        if models is None and (canaries := self.canaries()) != self._canaries:
            self._canaries = canaries
            self._canaries_halted()
        stream = self.gateways.get(uid)
        if stream is None:
            for key in [key for key in self._held if key[0] == uid]:
                del self._held[key]
            self._changed(None, True)
            return
        now = time.monotonic()
        for model in stream.models if models is None else models:
            told = stream.models.get(model)
            if told is None:
                self._held.pop((uid, model), None)
                continue
            rates = self._arrivals.setdefault(model, {})
            rate = rates.get(uid)
            if rate is None:
                rate = rates[uid] = CounterRate()
            rate.note(now, stream.boot, told.demand.arrivals)
            if told.demand.first_tokens:
                self._first_tokens(model, told.demand.first_tokens)
            holds = told.demand.held > 0
            begins = holds and not self._held.get((uid, model), False)
            self._held[uid, model] = holds
            if models is not None:
                self._changed(model, begins)
        if models is None:
            self._changed(None, True)


def load_of(keys: ReplicaKeys) -> Load:
    """An agent's keys, as far as decisions read them."""
    return Load(
        engine_boot=keys.engine_boot,
        phase=keys.phase,
        running=keys.running,
        max_running=keys.max_running,
        waiting=keys.waiting,
        waiting_tokens=keys.waiting_tokens,
        kv_tokens_used=keys.kv_tokens_used,
        kv_tokens_total=keys.kv_tokens_total,
        prompt_tokens_total=keys.prompt_tokens_total,
        generation_tokens_total=keys.generation_tokens_total,
        adapter_slots=keys.adapter_slots,
        tokens_per_step=keys.tokens_per_step,
    )


def demand_of(demand: ModelDemand, adapters: frozenset[str] | None = None) -> Demand:
    """A gateway's figures of one Model, as decisions read them."""
    return Demand(
        demand.arrivals,
        demand.in_flight,
        demand.held,
        demand.held_tokens,
        demand.oldest_seconds,
        adapters,
        complete=demand.whole,
    )
