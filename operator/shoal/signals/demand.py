"""The gateways' demand (`GET /v1/demand`): a stream to each gateway pod."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
from pydantic import TypeAdapter

from shoal.api import demand as api
from shoal.api.meta import JsonObject
from shoal.api.names import DEMAND_PATH
from shoal.api.replica import LONGEST_ID
from shoal.core.routing.canary import CanaryCounts, CanaryHalt
from shoal.net.stream import BOOT_LETTERS, Follower, ListenerIdentity, PeerStreams, StreamPeer

Changed = Callable[[str, Collection[str] | None], None]
"""Called with the uid of a gateway's pod, and the uids of the Models whose demand changed there; None: all of them,
since its stream began or ended."""

GoneUses = Mapping[str, Mapping[str, api.RecentUse]]
"""`DemandMessage.tenants_gone`."""
Uses = Callable[[str, str, Mapping[str, api.TenantUse | None], bool, bool, GoneUses], None]
"""Called with the uid of a gateway's pod, the boot id of its process, its use by tenants with limits, by name, whether
these are all of them (a full message), whether they are a part of all (a full message with `tenantsPartial`), and what
it knows of gateways whose streams to it have ended."""
Lost = Callable[[str], None]
"""Called with the uid of a gateway's pod whose stream has ended."""

CanariesCounted = Callable[[str, Mapping[str, CanaryCounts]], None]
"""Called with the boot id of a gateway's process, and what it has counted of canaries since its start, by revision:
first of all of them, later of those that changed."""

_GONE: Final[TypeAdapter[dict[api.Id, dict[api.Id, api.RecentUse]]]] = TypeAdapter(
    dict[api.Id, dict[api.Id, api.RecentUse]]
)

_NOBODY: Final[GoneUses] = {}
_Row = TypeVar("_Row")
NOTHING = api.ModelDemand(arrivals=0, in_flight=0, held=0)
"""What a live gateway has of a Model that it does not name."""


@dataclass(frozen=True, slots=True)
class ReportedDemand:
    """A gateway's demand for one Model, and when the report arrived (time.monotonic())."""

    demand: api.ModelDemand
    at: float


class DemandStream(Follower):
    """Listens to one gateway."""

    path = DEMAND_PATH
    field = "models"
    what = "gateway"

    def __init__(
        self,
        peer: StreamPeer,
        session: aiohttp.ClientSession,
        changed: Changed,
        identity: ListenerIdentity,
        uses: Uses | None = None,
        counted: CanariesCounted | None = None,
        lost: Lost | None = None,
    ) -> None:
        super().__init__(peer, session, identity)
        self.models: dict[str, ReportedDemand] = {}
        """By uid of the Model; means something only while the stream is live."""
        self.adapters: Mapping[str, api.AdapterDemand] | None = None
        """By uid of the LoRAAdapter, those that were ever asked for; never changed, but replaced by another. None: the
        gateway is of a version that does not tell."""
        self.reports_tenants = False
        """The gateway is of a version that tells what it has of tenants."""
        self.currency: str | None = None
        """Of the price list in force; None: the gateway knows none."""
        self.prices_refused: str | None = None
        """Why the ledger refuses price lists; None: it does not, or the gateway does not know."""
        self.canaries: Mapping[str, CanaryHalt] = {}
        """Canaries that the gateway has halted, by revision."""
        self.canary_counts: Mapping[str, CanaryCounts] = {}
        """What the gateway's process has counted of canaries since its start, by revision. Kept only for who asks for
        it (`counted`)."""
        self._busy: dict[str, set[str]] = {}
        self._changed = changed
        self._uses = uses
        self._counted = counted
        self._lost = lost

    def demand(self, model_uid: str, now: float | None = None) -> api.ModelDemand:
        """The gateway's demand for the Model. The age of its oldest waiting request includes the time since the
        report."""
        reported = self.models.get(model_uid)
        if reported is None:
            return NOTHING
        if not reported.demand.held:
            return reported.demand
        grown = max(0.0, (time.monotonic() if now is None else now) - reported.at)
        return reported.demand.model_copy(update={"oldest_seconds": reported.demand.oldest_seconds + grown})

    def busy_adapters(self, model_uid: str) -> frozenset[str] | None:
        """Adapters of the Model's pool that have requests in flight or held, by uid; None: the gateway does not
        tell."""
        return None if self.adapters is None else frozenset(self._busy.get(model_uid, ()))

    def _keep(self, content: JsonObject, *, full: bool) -> None:
        if full:
            self.models = {}
        now = time.monotonic()
        for uid, said in content.items():
            if said is None:
                self.models.pop(uid, None)
            else:
                self.models[uid] = ReportedDemand(api.ModelDemand.model_validate(said), now)
        _require_few(self.models)

    def _keep_more(self, message: JsonObject, *, full: bool) -> None:
        """Checks all of it before it takes any: what it passes on remains when the stream breaks."""
        adapters: JsonObject | None = message.get("adapters")
        changed = _adapters(adapters or {})
        after = _merged({} if full else self.adapters or {}, changed)
        halted = _halted(message.get("canaries") or {}) if full else {}
        tenants: JsonObject | None = message.get("tenants")
        uses = None if tenants is None or self._uses is None else _tenant_uses(tenants)
        gone = _gone(message.get("tenantsGone") or {}) if full and uses is not None else _NOBODY
        rows: JsonObject = {} if self._counted is None else message.get("canaryCounts") or {}
        counts = {revision: None if row is None else _canary_counts(row) for revision, row in rows.items()}
        canary_counts = _merged({} if full else self.canary_counts, counts)
        boot = str(message["boot"])[:BOOT_LETTERS]

        self._take_adapters(changed, after, full=full, told=adapters is not None)
        self.canary_counts = canary_counts
        if full:
            self.reports_tenants = tenants is not None
            currency: object = message.get("currency")
            self.currency = currency if isinstance(currency, str) else None
            refused: object = message.get("pricesRefused")
            self.prices_refused = refused if isinstance(refused, str) else None
            self.canaries = halted
        if uses is not None and self._uses is not None:
            partial = full and bool(message.get("tenantsPartial"))
            self._uses(self.peer.uid, boot, uses, full and not partial, partial, gone)
        if self._counted is not None and (told := {at: count for at, count in counts.items() if count is not None}):
            self._counted(boot, told)

    def _take_adapters(
        self,
        changed: Mapping[str, api.AdapterDemand | None],
        after: Mapping[str, api.AdapterDemand],
        *,
        full: bool,
        told: bool,
    ) -> None:
        """`after`: all of them, with those that changed. `told`: the message says something of adapters."""
        if full:
            self._busy = {}
            self.adapters = {} if told else None
        if not changed:
            return
        before = self.adapters or {}
        for uid, adapter in changed.items():
            if (old := before.get(uid)) is not None:
                self._busy.get(old.model, set()).discard(uid)
            if adapter is not None and (adapter.in_flight or adapter.held):
                self._busy.setdefault(adapter.model, set()).add(uid)
        self.adapters = after

    def _notify(self, content: JsonObject | None) -> None:
        self._changed(self.peer.uid, None if content is None else content.keys())

    def _forget(self) -> None:
        # What tenants used is not forgotten: it was used.
        if self._lost is not None:
            self._lost(self.peer.uid)
        self.models = {}
        self.reports_tenants = False
        self.currency = None
        self.prices_refused = None
        self.canaries = {}
        self.canary_counts = {}
        self.adapters = None
        self._busy = {}


def _merged(before: Mapping[str, _Row], changed: Mapping[str, _Row | None]) -> Mapping[str, _Row]:
    """What is known by name after a message; None: nothing any more. Raises ValueError where it is too much."""
    if not changed:
        return before
    merged = dict(before)
    for name, row in changed.items():
        if row is None:
            merged.pop(name, None)
        else:
            merged[name] = row
    _require_few(merged)
    return merged


def _adapters(rows: JsonObject) -> dict[str, api.AdapterDemand | None]:
    return {uid: None if row is None else api.AdapterDemand.model_validate(row) for uid, row in rows.items()}


def _halted(rows: JsonObject) -> dict[str, CanaryHalt]:
    _require_few(rows)
    found = {at: api.HaltedCanary.model_validate(row) for at, row in rows.items()}
    return {at: CanaryHalt(one.reason, one.bad, one.of) for at, one in found.items()}


def _canary_counts(row: object) -> CanaryCounts:
    one = api.CanaryCount.model_validate(row)
    return CanaryCounts(one.requests, one.failed, one.streams, one.slow, one.left)


def _tenant_uses(rows: JsonObject) -> dict[str, api.TenantUse | None]:
    _require_few(rows)
    _require_short(rows)
    _require_few_recent(row.get("recent") for row in rows.values() if row is not None)
    return {name: None if row is None else api.TenantUse.model_validate(row) for name, row in rows.items()}


def _require_few(named: Sized) -> None:
    """Raises ValueError where a gateway names more than there can be."""
    if len(named) > api.MOST_NAMED:
        raise ValueError(f"more than {api.MOST_NAMED} are named")


def _require_short(named: Collection[str]) -> None:
    """Raises ValueError where a name is longer than readers take: it may be sent on to another gateway."""
    if max(map(len, named), default=0) > LONGEST_ID:
        raise ValueError(f"a name is longer than {LONGEST_ID} letters")


def _require_few_recent(found: Iterable[Sized | None]) -> None:
    """Raises ValueError where a message has more entries of the last minute than a reader takes at once."""
    if sum(len(each) for each in found if each is not None) > api.MOST_RECENT:
        raise ValueError(f"more than {api.MOST_RECENT} entries of the last minute")


def _gone(raw: JsonObject) -> GoneUses:
    if len(raw) > api.MOST_GONE:
        raise ValueError(f"more than {api.MOST_GONE} processes are gone")
    rows = [row for rows in raw.values() for row in rows.values()]
    _require_few(rows)
    _require_few_recent(rows)
    return _GONE.validate_python(raw)


class DemandStreams(PeerStreams[DemandStream]):
    """A stream to every gateway that is named. Without `uses` nobody asks for what tenants use, and without `counted`
    for counts of canaries."""

    def __init__(
        self,
        changed: Changed,
        identity: ListenerIdentity = ListenerIdentity(),  # noqa: B008 - immutable
        uses: Uses | None = None,
        counted: CanariesCounted | None = None,
        lost: Lost | None = None,
    ) -> None:
        super().__init__(lambda peer, session: DemandStream(peer, session, changed, identity, uses, counted, lost))
