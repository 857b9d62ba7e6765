"""What the ledger says (`GET /v1/totals`): each tenant's month, and the price list in force.

Silent for 12 s: unknown. What it said last is kept all the same, for those who go on counting from there.
"""

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import aiohttp

from shoal.api import ledger as api
from shoal.api.meta import JsonObject
from shoal.api.names import LEDGER_PORT, TOTALS_PATH
from shoal.core.quota.month import MonthTotal
from shoal.core.rating.price import RateTable
from shoal.net.stream import Follower, ListenerIdentity, PeerStreams, StreamPeer
from shoal.net.tls import TLSCredentials, ledger_name

Changed = Callable[[str | None], None]
"""Called with the name of a Tenant whose total changed; None: of all of them."""

_PEER = "ledger"


class TotalsStream(Follower):
    """Listens to the ledger."""

    path = TOTALS_PATH
    field = "tenants"
    what = "ledger"

    def __init__(
        self, peer: StreamPeer, session: aiohttp.ClientSession, identity: ListenerIdentity, kept: "TotalsFollower"
    ) -> None:
        super().__init__(peer, session, identity)
        self._kept = kept

    def _keep(self, content: JsonObject, *, full: bool) -> None:
        """Nothing yet: `_keep_more` takes the totals, with the rest of the message."""

    def _keep_more(self, message: JsonObject, *, full: bool) -> None:
        """Checks all of it before it takes any: what it takes remains when the stream breaks."""
        said = api.TotalsMessage.model_validate(message)
        totals = {name: row or api.TenantTotal() for name, row in (said.tenants or {}).items()}
        self._kept.keep(totals, full=full)
        if full or said.month is not None:
            self._kept.month = said.month or ""
        if full:
            self._kept.prices_refused(said.prices_refused)
        if full or "prices" in said.model_fields_set:
            self._kept.priced(said.prices)

    def _notify(self, content: JsonObject | None) -> None:
        if self.boot is not None:
            self._kept.notify(content)

    def _forget(self) -> None:
        pass


class TotalsFollower:
    """The ledger at `url`, such as http://shoal-ledger:8500. `keys` are what this gateway says to it, the newest
    install key's first.

    Raises:
        ValueError: no http URL with a host.
    """

    def __init__(
        self,
        url: str,
        keys: Callable[[], Iterable[str]],
        identity: ListenerIdentity = ListenerIdentity(),  # noqa: B008 - immutable
        credentials: TLSCredentials | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a ledger: write http://host:port, or https:// for mutual TLS")
        self.changed: Changed = lambda _tenant: None
        self.repriced: Callable[[str | None], None] = lambda _currency: None
        """Called with the currency of the price list in force, whenever the ledger names it; None: there is no list."""
        self.prices_refused: Callable[[str | None], None] = lambda _why: None
        """Called with every full message: why the ledger refuses price lists, None: it does not."""
        self.month = ""
        self.rate_table: RateTable | None = None
        self._host, self._port = parts.hostname, parts.port or LEDGER_PORT
        self._server_name, self._credentials = ledger_name(url), credentials
        self._keys = keys
        self._totals: dict[str, api.TenantTotal] = {}
        self._made: dict[str, MonthTotal] = {}
        self._streams = PeerStreams(lambda peer, session: TotalsStream(peer, session, identity, self))

    def start(self) -> None:
        """Opens the session; `follow` needs it."""
        self._streams.start()

    def follow(self) -> None:
        """Listens to the ledger; again after the install key changed."""
        own = tuple(self._keys())
        if own:
            self._streams.put(
                StreamPeer(
                    _PEER, self._host, self._host, own[0], self._port, own[1:], self._server_name, self._credentials
                )
            )

    async def close(self) -> None:
        await self._streams.close()

    @property
    def live(self) -> bool:
        """Whether the totals are known now: the ledger's stream is live, and the ledger has read its database."""
        return bool(self.month) and self._streams.get(_PEER) is not None

    def total(self, tenant: str) -> MonthTotal | None:
        """The last report; None: the ledger never reported. A tenant that it does not name has used nothing."""
        if not self.month:
            return None
        found = self._made.get(tenant)
        if found is None:
            said = self._totals.get(tenant)
            if said is None:
                return MonthTotal(self.month)
            gateways = {boot: (counted.tokens, counted.spent) for boot, counted in said.gateways.items()}
            found = self._made[tenant] = MonthTotal(self.month, said.tokens, said.spent, gateways)
        return found

    def keep(self, totals: dict[str, api.TenantTotal], *, full: bool) -> None:
        if full:
            self._totals = totals
            self._made.clear()
            return
        self._totals.update(totals)
        for tenant in totals:
            self._made.pop(tenant, None)

    def priced(self, prices: api.Prices | None) -> None:
        self.rate_table = None if prices is None else RateTable.of(prices)
        self.repriced(None if prices is None else prices.currency)

    def notify(self, content: JsonObject | None) -> None:
        for tenant in (None,) if content is None else content:
            self.changed(tenant)
