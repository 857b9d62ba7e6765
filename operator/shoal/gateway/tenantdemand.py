"""Usage per tenant with limits, at this gateway and at its peers: a part of the demand stream's messages
(`api/demand.py`, TenantUse)."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import orjson

from shoal.api.demand import TenantUse
from shoal.core.quota.account import Account

MAX_COUNT: Final = (1 << 63) - 1


class TenantUsageState:
    """Accounts by name of the Tenant. `due` is called when there is something for the next message, `freed` when there
    is something for `take_freed`. An account lives as long as the process: its counters must never decrease."""

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
            self.of(tenant).peer_usage.update(boot, use, now, unknown_before=new_boot)

    def retain(self, pods: Collection[str]) -> None:
        """Drops peers whose pods (by uid) are gone."""
        for pod in [pod for pod in self._boots if pod not in pods]:
            self._gone(self._boots.pop(pod), self._clock())

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
        return orjson.dumps({t: _row(self.accounts[t].own_use()) for t in self._published | self._changed})

    def _report(self, tenants: Collection[str]) -> bytes:
        self._published.update(tenants)
        now = self._clock()
        return orjson.dumps({tenant: _row(self.accounts[tenant].report(now)) for tenant in tenants})


def _row(use: TenantUse) -> Mapping[str, object]:
    """`TenantUse` as JSON, without zeros. Money is capped at 64 bits, as in the ledger: a mistyped price must not break
    the stream."""
    row = use.model_dump(by_alias=True, exclude_defaults=True)
    return {name: min(value, MAX_COUNT) if isinstance(value, int) else value for name, value in row.items()}
