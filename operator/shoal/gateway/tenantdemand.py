"""What this gateway has of each tenant that has limits, and what the others have: a part of the demand stream's
messages (`api/demand.py`, TenantUse)."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import orjson

from shoal.api.demand import TenantUse
from shoal.core.quota.account import Account

MOST: Final = (1 << 63) - 1


class TenantBook:
    """Accounts by name of the Tenant. `due` hears that there is something to tell with the next message. An account
    lives as long as the process: its counters must never go back."""

    def __init__(
        self, due: Callable[[], None] = lambda: None, me: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.me = me
        """This gateway's boot id."""
        self.accounts: dict[str, Account] = {}
        self.opened: Callable[[str, Account], None] = lambda _tenant, _account: None
        """Hears of a new account."""
        self._due = due
        self._clock = clock
        self._told: set[str] = set()
        self._changed: set[str] = set()
        self._boots: dict[str, str] = {}
        """By uid of another gateway's pod: its process, as it was heard last."""

    def of(self, tenant: str) -> Account:
        found = self.accounts.get(tenant)
        if found is None:
            found = self.accounts[tenant] = Account(self.me)
            self.opened(tenant, found)
        return found

    def note(self, tenant: str) -> None:
        """An account of this gateway's own changed."""
        if tenant not in self._changed:
            self._changed.add(tenant)
            self._due()

    # --- the others ---------------------------------------------------------------------------------------------------

    def hear(self, pod: str, boot: str, uses: Mapping[str, TenantUse | None]) -> None:
        """What the gateway in a pod (by uid) said."""
        now = self._clock()
        before = self._boots.get(pod)
        anew = boot != before
        if anew:
            if before is not None:
                self._gone(before, now)
            self._boots[pod] = boot
        for tenant, use in uses.items():
            self.of(tenant).others.hear(boot, use, now, anew=anew)

    def retain(self, pods: Collection[str]) -> None:
        """Pods (by uid) of gateways that there are."""
        for pod in [pod for pod in self._boots if pod not in pods]:
            self._gone(self._boots.pop(pod), self._clock())

    def boot_of(self, pod: str) -> str | None:
        """The process in a pod, as it was heard last."""
        return self._boots.get(pod)

    def _gone(self, boot: str, now: float) -> None:
        for account in self.accounts.values():
            account.others.tidy(now)
            account.others.gone(boot, now)

    # --- telling ------------------------------------------------------------------------------------------------------

    def take(self) -> bytes | None:
        """What changed, as JSON; None when nothing did. It counts as told."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, set()
        self._told |= changed
        return self._encode(changed)

    def full(self) -> bytes:
        """Everything, as JSON."""
        return self._encode(self._told | self._changed)

    def _encode(self, tenants: Iterable[str]) -> bytes:
        return orjson.dumps({tenant: _row(self.accounts[tenant].told()) for tenant in tenants})


def _row(use: TenantUse) -> Mapping[str, object]:
    """`TenantUse` as JSON has it, zeros left out. Money stops at what 64 bits hold, as in the ledger: a mistyped price
    must not end the stream of everybody."""
    row = use.model_dump(by_alias=True, exclude_defaults=True)
    return {name: min(value, MOST) if isinstance(value, int) else value for name, value in row.items()}
