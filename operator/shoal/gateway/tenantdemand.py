"""Usage per tenant with limits, and per tenant and ModelRoute with limits, at this gateway and at its peers: a part of
the demand stream's messages (`api/demand.py`, TenantUse)."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import orjson

from shoal.api.demand import TenantUse
from shoal.core.quota.account import Account

MAX_COUNT: Final = (1 << 63) - 1
_OF_ROUTE: Final = "@"
"""No name of a Tenant has it."""


def route_account(tenant: str, route_uid: str) -> str:
    """Name of the account of what a tenant sends under a route. By the route's uid: the counters of a route that is
    deleted and created again begin anew at each gateway, at another time."""
    return f"{tenant}{_OF_ROUTE}{route_uid}"


class TenantUsageState:
    """Accounts by name of the Tenant, or by `route_account`. `due` is called when there is something for the next
    message, `freed` when there is something for `take_freed`. An account lives as long as the process, or as its route:
    its counters must never decrease."""

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

    def of(self, tenant: str) -> Account:
        found = self.accounts.get(tenant)
        if found is None:
            found = self.accounts[tenant] = Account(self.boot)
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

    def peer_reported(self, pod: str, boot: str, uses: Mapping[str, TenantUse | None]) -> None:
        """Stores the usage that the gateway in a pod (by uid) published."""
        now = self._clock()
        before = self._boots.get(pod)
        new_boot = boot != before
        if new_boot:
            if before is not None:
                self._gone(before, now)
            self._boots[pod] = boot
        for tenant, use in uses.items():
            if use is None and tenant not in self.accounts:
                continue  # of a route that is gone here too
            self.of(tenant).peer_usage.update(boot, use, now, unknown_before=new_boot)

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
            del self.accounts[name]
            self._freed.discard(name)
            if name in self._published:
                self._published.discard(name)
                self.note(name)
            else:
                self._changed.discard(name)
        return gone

    def boot_of(self, pod: str) -> str | None:
        """The boot id of a peer's process, as last reported."""
        return self._boots.get(pod)

    def _gone(self, boot: str, now: float) -> None:
        for account in self.accounts.values():
            account.peer_usage.tidy(now)
            account.peer_usage.mark_gone(boot, now)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def take(self) -> bytes | None:
        """What changed since the last call, as JSON; None when nothing did."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, set()
        return self._report(changed)

    def take_freed(self) -> bytes | None:
        """What tenants have whose limit on concurrent requests the others take for used up, when it no longer is, as
        JSON; None when there are none. Counts as published."""
        freed, self._freed = self._freed, set()
        # A client that asked again meanwhile has its place again.
        freed = {tenant for tenant in freed if self.accounts[tenant].frees_place}
        self._changed -= freed
        return self._report(freed) if freed else None

    def full(self) -> bytes:
        """Everything, as JSON."""
        known = (self._published | self._changed) & self.accounts.keys()
        return orjson.dumps({name: _row(self.accounts[name].own_use()) for name in known})

    def _report(self, names: Collection[str]) -> bytes:
        """Of an account that was dropped: null."""
        now, rows = self._clock(), dict[str, Mapping[str, object] | None]()
        for name in names:
            account = self.accounts.get(name)
            rows[name] = None if account is None else _row(account.report(now))
            if account is not None:
                self._published.add(name)
        return orjson.dumps(rows)


def _row(use: TenantUse) -> Mapping[str, object]:
    """`TenantUse` as JSON, without zeros. Money is capped at 64 bits, as in the ledger: a mistyped price must not break
    the stream."""
    row = use.model_dump(by_alias=True, exclude_defaults=True)
    return {name: min(value, MAX_COUNT) if isinstance(value, int) else value for name, value in row.items()}
