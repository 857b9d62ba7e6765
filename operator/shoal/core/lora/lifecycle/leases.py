"""Leases: which gateways may use which adapters of a replica, so that no more of them run at once than it has slots.

A lease lasts 10 s from the gateway's last sign of use: its grant, or an acknowledgement that lists the adapter as
running. If that acknowledgement was the gateway's last message, the lease lasts for as long as its silence may be a
delay. A gateway gives back one that it does not use where callers wait for a slot.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shoal.api.adapters import LEASE_SECONDS
from shoal.core import drain

Key = tuple[str, str]
"""Name and boot id of a gateway."""


@dataclass(slots=True)
class _Lease:
    used: float
    running: bool = False
    grant: int = 0
    """Number of its last grant; 0: this agent granted none."""

    def ends(self) -> float:
        return self.used + (drain.CLAIM_SECONDS if self.running else LEASE_SECONDS)


class EngineLeases:
    """Leases of one boot of an engine."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Key, _Lease]] = {}
        self._grants = 0

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        """Number of distinct adapters with a lease."""
        return len(self._of)

    def grant(self, name: str, key: Key, now: float) -> int:
        """Gives a gateway a lease, or renews it. Returns the number of the grant."""
        lease = self._of.setdefault(name, {}).setdefault(key, _Lease(now))
        self._grants += 1
        lease.used, lease.grant = now, self._grants
        return lease.grant

    def given_back(self, key: Key, grants: Mapping[str, int]) -> None:
        """Ends leases that a gateway does not use, by adapter. One that was granted to it again meanwhile has another
        number, and stays."""
        for name, number in grants.items():
            leases = self._of.get(name, {})
            lease = leases.get(key)
            if lease is not None and lease.grant == number and not lease.running:
                del leases[key]
                if not leases:
                    del self._of[name]

    def acked(self, key: Key, running: Collection[str], now: float) -> None:
        """Takes a gateway's list of running adapters. Each gets a lease even if this agent did not grant one: a former
        process of the agent may have."""
        for name in running:
            lease = self._of.setdefault(name, {}).setdefault(key, _Lease(now))
            lease.used, lease.running = now, True
        for name, leases in self._of.items():
            if key in leases and name not in running:
                leases[key].running = False

    def lapse(self, now: float) -> None:
        """Ends expired leases."""
        for name, leases in list(self._of.items()):
            for key in [key for key, lease in leases.items() if lease.ends() <= now]:
                del leases[key]
            if not leases:
                del self._of[name]

    def drop(self, name: str) -> None:
        """Ends the leases of an adapter that the engine no longer has."""
        self._of.pop(name, None)

    def clear(self) -> None:
        """Ends all leases: the engine has started again."""
        self._of.clear()
