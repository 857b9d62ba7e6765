"""Usage per tenant with limits, and per tenant and ModelRoute with limits, at this gateway and at its peers: a part of
the demand stream's messages (`api/demand.py`, TenantUse)."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import orjson
import structlog

from shoal.api.demand import MOST_GONE, MOST_NAMED, MOST_RECENT, RecentUse, TenantUse
from shoal.api.replica import MOST_TALLY
from shoal.core.quota.account import COUNTS, Account
from shoal.core.quota.gatewayusage import GatewayUsage
from shoal.core.quota.recent import Recent
from shoal.core.quota.window import WINDOW_SECONDS
from shoal.net.stream import LONGEST_MESSAGE

log = structlog.get_logger()

MAX_COUNT: Final = (1 << 63) - 1
MOST_BYTES = LONGEST_MESSAGE // 2
"""Of a full message, for accounts: the other half is for Models and adapters."""
MOST_CHANGED = 5_000
"""Accounts that one message of changes may name, each with 600 bytes at most."""
MOST_GONE_BYTES: Final = MOST_BYTES // 16
"""Of the first message of a stream, for gateways whose streams to this one have ended."""
MOST_LOOKED = 20_000
"""What that part of the message is chosen from, in accounts of such gateways: to look at more would delay requests."""
_ENCODED: Final = 500
"""Accounts that are encoded at once."""
SWEPT: Final = 2000
"""Accounts of routes that one sweep looks at: it must not delay requests."""
NOBODY: Final[Mapping[str, Mapping[str, RecentUse]]] = {}
_NAMES: Final = [TenantUse.model_fields[name].alias or name for name in COUNTS]
"""Of `COUNTS`, in messages."""
_OF_ROUTE: Final = "@"
"""No name of a Tenant has it."""


def route_account(tenant: str, route_uid: str) -> str:
    """Name of the account of what a tenant sends under a route. By the route's uid: the counters of a route that is
    deleted and created again begin anew at each gateway, at another time."""
    return f"{tenant}{_OF_ROUTE}{route_uid}"


class TenantUsageState:
    """Accounts by name of the Tenant, or by `route_account`. `due` is called when there is something for the next
    message, `freed` when there is something for `take_freed`. The account of a Tenant lives
    as long as the process. That of a route lives until no limit needs it (`sweep`), or as long as its route."""

    def __init__(
        self,
        due: Callable[[], None] = lambda: None,
        boot: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self.boot = boot
        """This gateway's boot id."""
        self.accounts: dict[str, Account] = {}
        self.opened: Callable[[str, Account], None] = lambda _tenant, _account: None
        """Called with each new account."""
        self._due = due
        self._due_freed = freed
        self._clock = clock
        self._published: set[str] = set()
        self._changed: set[str] = set()
        self._freed: set[str] = set()
        """Tenants with fewer requests here than was reported, where that matters."""
        self._boots: dict[str, str] = {}
        """Boot id of each peer by uid of its pod, as last reported."""
        self._disconnected: dict[str, float] = {}
        """Boot ids of processes whose streams have ended, and since when: for as long as what is known of them may
        count. A gateway that starts now learns it from this one."""
        self._to_sweep: list[str] = []
        self._epoch = 0
        """Of new accounts. It grows with each account that is dropped or restarted with counts: a gateway that missed
        the end of the former counters must not take the difference to them."""
        self.left_out = 0
        """Accounts that the last `full` did not name."""

    def of(self, tenant: str) -> Account:
        found = self.accounts.get(tenant)
        if found is None:
            found = self.accounts[tenant] = Account(self.boot, self._epoch)
            self.opened(tenant, found)
        return found

    def note(self, tenant: str) -> None:
        """This gateway's own account of a tenant changed."""
        if tenant not in self._changed:
            self._changed.add(tenant)
            self._due()

    def ended(self, tenant: str) -> None:
        """A request of the tenant has ended here."""
        self.note(tenant)
        if tenant not in self._freed and self.accounts[tenant].frees_place:
            self._freed.add(tenant)
            self._due_freed()

    # --- peers --------------------------------------------------------------------------------------------------------

    def peer_reported(
        self,
        pod: str,
        boot: str,
        uses: Mapping[str, TenantUse | None],
        full: bool = False,
        partial: bool = False,
        gone: Mapping[str, Mapping[str, RecentUse]] = NOBODY,
    ) -> None:
        """Stores the usage that the gateway in a pod (by uid) published. `full`: it has nothing of routes that it does
        not name. `partial`: it has left out some routes, those with running requests last. `gone`: what it knows of
        gateways whose streams to it have ended, by boot id; only that of its first report counts."""
        now = self._clock()
        before = self._boots.get(pod)
        new_boot = boot != before
        if new_boot:
            if before is not None:
                self._gone(before, now)
            self._boots[pod] = boot
        self._disconnected.pop(boot, None)
        if new_boot and gone:
            self._relayed(gone, now)
        for tenant, use in uses.items():
            if use is None and tenant not in self.accounts:
                continue  # of a route that is gone here too
            self.of(tenant).peer_usage.update(boot, use, now, unknown_before=new_boot)
        if full:
            for name, account in self.accounts.items():
                if _OF_ROUTE in name and name not in uses:
                    account.peer_usage.update(boot, None, now)
        elif partial and any(_OF_ROUTE in name and use and not use.in_flight for name, use in uses.items()):
            # Then all with running requests are named. The message that those of another have ended may be lost.
            for name, account in self.accounts.items():
                if _OF_ROUTE in name and name not in uses:
                    account.peer_usage.end_all(boot, now)

    def peer_lost(self, pod: str) -> None:
        """The stream of the gateway in a pod (by uid) has ended."""
        if (boot := self._boots.get(pod)) is not None:
            self._note_disconnected(boot, self._clock())

    def retain(self, pods: Collection[str]) -> None:
        """Drops peers whose pods (by uid) are gone."""
        for pod in [pod for pod in self._boots if pod not in pods]:
            self._gone(self._boots.pop(pod), self._clock())

    def retain_routes(self, uids: Collection[str]) -> Collection[str]:
        """Drops the accounts of routes that are gone, whose uids are not among these, and returns their names. One with
        running requests stays."""
        gone = [
            name
            for name, account in self.accounts.items()
            if _OF_ROUTE in name and name.partition(_OF_ROUTE)[2] not in uids and not account.busy
        ]
        for name in gone:
            self._drop(name)
        return gone

    def sweep(self) -> Collection[str]:
        """Drops accounts of routes that no limit needs any more, and returns their names. Called every second; looks at
        some of them each time.

        First each gateway tells the others that its own counters begin at zero again (`_report`), as soon as nothing
        runs and its windows are empty. An account is dropped when this is so for all gateways. Thus the first
        counters that a new account gets from a peer began at zero, and are not taken for older use."""
        if not self._to_sweep:
            self._to_sweep = [name for name in self.accounts if _OF_ROUTE in name]
        now, unused = self._clock(), list[str]()
        for name in self._to_sweep[-SWEPT:]:
            if (account := self.accounts.get(name)) is None:
                continue
            if account.unused(now):
                unused.append(name)
            elif account.counted and account.idle(now):
                self.note(name)
        del self._to_sweep[-SWEPT:]
        for name in unused:
            self._drop(name)
        return unused

    def _drop(self, name: str) -> None:
        self._epoch += self.accounts.pop(name).counted
        self._freed.discard(name)
        if name in self._published:
            self._published.discard(name)
            self.note(name)
        else:
            self._changed.discard(name)

    def boot_of(self, pod: str) -> str | None:
        """The boot id of a peer's process, as last reported."""
        return self._boots.get(pod)

    def _relayed(self, gone: Mapping[str, Mapping[str, RecentUse]], now: float) -> None:
        live = {boot for boot in self._boots.values() if boot not in self._disconnected}
        for boot, uses in gone.items():
            if boot in live:
                continue
            self._note_disconnected(boot, now)
            for tenant, recent in uses.items():
                self.of(tenant).peer_usage.relay(boot, recent, now)

    def _note_disconnected(self, boot: str, now: float) -> None:
        disconnected = self._disconnected
        disconnected.pop(boot, None)  # to the end: the oldest is the first
        disconnected[boot] = now
        for old in list(disconnected):
            if len(disconnected) <= MOST_GONE and now - disconnected[old] <= WINDOW_SECONDS + 1:
                break
            del disconnected[old]

    def _gone(self, boot: str, now: float) -> None:
        self._note_disconnected(boot, now)
        for account in self.accounts.values():
            account.peer_usage.tidy(now)
            account.peer_usage.mark_gone(boot, now)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def take(self) -> bytes | None:
        """What changed since the last call, as JSON; None when nothing did. Of very many a part: `due` is called for
        the others."""
        if not self._changed:
            return None
        if len(self._changed) <= MOST_CHANGED:
            changed, self._changed = self._changed, set()
        else:
            changed = set(islice(self._changed, MOST_CHANGED))
            self._changed -= changed
            self._due()
        return self._report(changed)

    def take_freed(self) -> bytes | None:
        """What tenants have whose limit on concurrent requests the others take for used up, when it no longer is, as
        JSON; None when there are none. Counts as published."""
        freed, self._freed = self._freed, set()
        # A client that asked again meanwhile has its place again.
        freed = {tenant for tenant in freed if self.accounts[tenant].frees_place}
        self._changed -= freed
        return self._report(freed) if freed else None

    def full(self, *, recent: bool = False) -> bytes:
        """Everything, as JSON; `recent`: with the last minute by age, unless more than `MOST_RECENT` accounts have any.
        More than a reader takes would end its stream, and with it all that it learns of this gateway: then the last
        minute is left out, and routes, first those without requests in progress (`left_out`)."""
        known = (self._published | self._changed) & self.accounts.keys()
        if recent and (content := self._with_recent(known)) is not None:
            self.left_out = 0
            return content
        rows, size, named = list[bytes](), 1, 0
        for names in _some(self._by_need(known)):
            many = _encoded({name: _row(self.accounts[name]) for name in names})
            if named + len(names) > MOST_NAMED or size + len(many) + 1 > MOST_BYTES:
                fit = self._first_of(names, MOST_BYTES - size, MOST_NAMED - named)
                rows += fit
                named += len(fit)
                break
            rows.append(many)
            size += len(many) + 1
            named += len(names)
        self.left_out = len(known) - named
        if self.left_out:
            log.warning(
                "more tenants use limits of routes than a full message may name: of those left out, other gateways "
                "know what they knew before, and learn the rest with the next request",
                left_out=self.left_out,
            )
        return b"{" + b",".join(rows) + b"}"

    def _by_need(self, known: Collection[str]) -> list[str]:
        """Tenants, then routes, those with running requests first."""
        routes = [name for name in known if _OF_ROUTE in name]
        busy = {name for name in routes if self.accounts[name].busy}
        return [name for name in known if _OF_ROUTE not in name] + [*busy] + [n for n in routes if n not in busy]

    def _first_of(self, names: Iterable[str], most_bytes: int, most: int) -> list[bytes]:
        """As many of these accounts as fit, each with a comma, as JSON."""
        rows = list[bytes]()
        for name in names:
            row = _encoded({name: _row(self.accounts[name])})
            most_bytes -= len(row) + 1
            if most_bytes < 0 or len(rows) >= most:
                break
            rows.append(row)
        return rows

    def _with_recent(self, known: Collection[str]) -> bytes | None:
        """With the last minute of each account, as JSON; None: that would be too long."""
        if len(known) > MOST_NAMED:
            return None
        now, accounts, active = self._clock(), self.accounts, 0
        for name in known:
            active += accounts[name].used_recently(now)
            if active > MOST_RECENT:
                return None
        most = MOST_RECENT // max(1, active)
        rows, size = list[bytes](), 1
        for names in _some(list(known)):
            rows.append(_encoded({n: {**_row(accounts[n]), "recent": accounts[n].recent(now, most)} for n in names}))
            size += len(rows[-1]) + 1
            if size > MOST_BYTES:
                return None
        return b"{" + b",".join(rows) + b"}"

    def gone(self, size: int) -> bytes | None:
        """What is known of the last minute at gateways whose streams have ended, by boot id and account, as JSON;
        None: nothing. Of very much the largest part, of the gateways that have ended last, in what `size` bytes of
        accounts leave of a full message."""
        now = self._clock()
        found: list[tuple[int, int, str, str, GatewayUsage]] = []
        boots = [boot for boot, since in self._disconnected.items() if now - since <= WINDOW_SECONDS + 1]
        boots = boots[-max(1, MOST_LOOKED // max(1, len(self.accounts))) :]
        if boots:
            for name, account in self.accounts.items():
                for boot, use in account.peer_usage.of(boots):
                    requests, tokens = use.used("requests", now), use.used("tokens", now)
                    if requests or tokens:
                        found.append((requests, tokens, boot, name, use))
        if not found:
            return None
        found.sort(key=lambda each: each[:2], reverse=True)
        most = max(1, MOST_RECENT // len(found))
        left = min(MOST_GONE_BYTES, MOST_BYTES - size)
        rows = dict[str, dict[str, Recent]]()
        for _, _, boot, name, use in found[:MOST_RECENT]:
            recent = [(age, min(n, MOST_TALLY), min(used, MOST_TALLY)) for age, n, used in use.recent(now, most)]
            left -= len(name) + len(boot) + 12 + len(orjson.dumps(recent))
            if left < 0:
                break
            rows.setdefault(boot, {})[name] = recent
        return orjson.dumps(rows)

    def _report(self, names: Collection[str]) -> bytes:
        """Of an account that was dropped, or of a route that no limit needs here: null."""
        now, rows = self._clock(), dict[str, Mapping[str, object] | None]()
        for name in names:
            account = self.accounts.get(name)
            if account is None:
                rows[name] = None
                continue
            account.note_reported(now)
            rows[name] = _row(account)
            if _OF_ROUTE in name and account.idle(now):
                # Here, and not in `sweep`: a request that comes between would be lost in the others' difference.
                self._epoch += 1
                account.restart(self._epoch)
                rows[name] = None
                self._published.discard(name)
            else:
                self._published.add(name)
        return orjson.dumps(rows)


def _some(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """In parts: of a message that becomes too long, no more is encoded than one of them."""
    return (names[at : at + _ENCODED] for at in range(0, len(names), _ENCODED))


def _encoded(rows: Mapping[str, Mapping[str, object]]) -> bytes:
    """As JSON, without braces."""
    return orjson.dumps(rows)[1:-1]


def _row(account: Account) -> Mapping[str, object]:
    """`Account.own_use` as JSON, without zeros. Money is capped at 64 bits, as in the ledger: a mistyped price must not
    break the stream."""
    return {
        name: value if value < MAX_COUNT else MAX_COUNT
        for name, value in zip(_NAMES, account.counts(), strict=True)
        if value
    }
