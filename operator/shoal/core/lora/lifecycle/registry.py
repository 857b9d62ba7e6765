"""State of one replica's adapters: what the engine has, what it should have, and who waits for which, and
what the agent's stream reports of it.

The registry records; `planstep.py` decides what to do next. All that is in an engine belongs to one boot of it. Times
are monotonic seconds.

States of an adapter. In the engine it takes one of the places in host memory:

    staging         its files are being fetched and verified
    staged          they are in their folder
    loading         the engine was asked to load it                                          takes a place
    loaded          requests may use it, under a lease                                       takes a place
    retiring        no new requests; waits for the gateways' acknowledgements                takes a place
    unloading       its files are removed, and the engine was asked to unload it             takes a place
    load_unknown    a load without an answer: the engine may have it now, or later           takes a place
    unload_pending  an unload without an answer, or a former agent's: it is repeated         takes a place
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from shoal.api import reasons
from shoal.api.adapters import AdapterWanted, DesiredAdapter
from shoal.api.replica import AdapterState
from shoal.core.lora.lifecycle import endings
from shoal.core.lora.lifecycle.endings import EndedLoads
from shoal.core.lora.lifecycle.leases import EngineLeases, Key
from shoal.core.lora.lifecycle.unload import Retirement

State = Literal["staging", "staged", "loading", "loaded", "retiring", "unloading", "load_unknown", "unload_pending"]
IN_ENGINE: Final = frozenset[State]({"loading", "loaded", "retiring", "unloading", "load_unknown", "unload_pending"})
GOING: Final = frozenset[State]({"retiring", "unloading"})

RETRY_SECONDS: Final = 2.0
"""After the first failure; doubled with each further failure, up to LONGEST_RETRY_SECONDS."""
LONGEST_RETRY_SECONDS: Final = 60.0
REMEMBER_SECONDS: Final = 600.0
"""Seconds for which the failure of an adapter that nobody wants is reported."""
PERMANENT: Final = frozenset(
    {
        reasons.RANK_TOO_HIGH,
        reasons.MODULES_NOT_IN_POOL,
        reasons.BASE_MISMATCH,
        reasons.TOO_LARGE,
        reasons.CORRUPT,
        reasons.UNSUPPORTED,
        reasons.SOURCE_INVALID,
        reasons.SOURCE_REFUSED,
        reasons.SOURCE_CHANGED,
        reasons.DIGEST_MISMATCH,
    }
)
"""An adapter with such a fault can never be loaded as it is."""


@dataclass(slots=True)
class RegistryEntry:
    """An adapter on this replica, or on its way to it."""

    state: State
    used: float
    """When it was last loaded, leased, or reported as running; the least recently used goes first. While staging: when
    the fetch began."""
    dropped: bool = False
    """It was desired and is no longer: it goes when no lease covers it."""
    retirement: Retirement | None = None
    """While `retiring`: set once the retirement was published."""
    staged_seconds: float = 0.0
    load_seconds: float = 0.0
    keep_until: float = 0.0
    """While staging or staged: kept until then, even without a waiter."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter could not be loaded, and when it is tried again."""

    reason: str
    message: str
    at: float
    count: int

    @property
    def retry_at(self) -> float:
        if self.reason == reasons.LOAD_ENDED_ENGINE:
            return self.at + endings.BACKOFF_SECONDS
        if self.reason in PERMANENT:
            return self.at + LONGEST_RETRY_SECONDS
        return self.at + min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2 ** (self.count - 1))


@dataclass(slots=True, eq=False)
class AdapterWaiter:
    """A request for a lease that waits for an adapter."""

    wanted: AdapterWanted
    key: Key | None
    """The gateway that gets the lease; None: the operator asked for the load, without a lease."""
    since: float
    admitted: float | None = None
    """Since when it holds a slot."""
    slow: bool = False
    """The fetch of its adapter is slow: it gave its slot back, and gets one again when the files are known."""
    missed: bool = False
    """The adapter was not in the engine."""
    grant: int = 0
    """Number of the grant that answers it."""


@dataclass(slots=True)
class Registry:
    """One replica's adapters. `places`: adapters in the engine's host memory; `slots`: adapters that leases may
    cover."""

    places: int
    slots: int
    started: float
    """Start of the agent."""
    since_1970: float = 0.0
    """Seconds since 1970 when monotonic time was 0, for messages."""
    entries: dict[str, RegistryEntry] = field(default_factory=dict[str, RegistryEntry])
    failures: dict[str, Failure] = field(default_factory=dict[str, Failure])
    ended_loads: EndedLoads = field(default_factory=EndedLoads)
    desired: dict[str, DesiredAdapter] = field(default_factory=dict[str, DesiredAdapter])
    waiters: list[AdapterWaiter] = field(default_factory=list[AdapterWaiter])
    leases: EngineLeases = field(default_factory=EngineLeases)
    unplaced: frozenset[str] = frozenset()
    """Desired adapters for which there is no place."""
    boot: str | None = None
    up: bool = False
    """This boot of the engine serves."""
    observations: int = 0
    joined: bool = False
    """The agent started beside a running engine."""
    idle_at: float | None = None
    """When this boot was last seen without running or waiting requests."""
    listed: float | None = None
    """Last listing by the engine; None: none since its start, or since a call to it failed."""
    list_after: float = 0.0
    reportable: bool = False
    """All desired adapters of this boot were loaded or failed: adapters may be reported."""
    foreign: int = 0
    """Adapters in the engine that Shoal did not load."""
    busy: bool = False
    """A call to the engine is under way."""
    loads: int = 0
    evictions: int = 0

    # --- requests and desired adapters --------------------------------------------------------------------------------

    def set_desired(self, adapters: Iterable[DesiredAdapter]) -> None:
        """Replaces the adapters that the replica should hold."""
        desired = {adapter.name: adapter for adapter in adapters}
        for name, entry in self.entries.items():
            entry.dropped = name not in desired and (entry.dropped or name in self.desired)
            if entry.state == "retiring" and name in desired and name not in self.desired:
                entry.state, entry.retirement = "loaded", None
        for name in self.desired.keys() - desired.keys():
            failure = self.failures.get(name)
            # What ends engines waits for its next try, also where it comes and goes with the demand.
            if failure is not None and failure.reason != reasons.LOAD_ENDED_ENGINE:
                del self.failures[name]
        self.desired = desired

    def acked(
        self, key: Key, running: frozenset[str], now: float, given_back: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Takes a gateway's list of running adapters, and the leases that it gives back (adapter -> grant)."""
        # The names are a client's input: only adapters in the engine can run.
        known = frozenset(name for name in running if name in self.entries and self.entries[name].state in IN_ENGINE)
        for name in known:
            self.entries[name].used = now
        self.leases.acked(key, known, now)
        self.leases.given_back(key, given_back)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def observed(self, boot: str | None, now: float, *, up: bool, idle_at: float | None = None) -> bool:
        """Takes an observation of the engine; `idle_at`: when it was seen without requests. Returns whether it is
        another boot than before."""
        changed = boot != self.boot
        if changed:
            if self.boot is not None:
                self._ended(now)
            self.joined = self.observations == 0
            self.boot, self.listed, self.reportable, self.foreign, self.idle_at = boot, None, False, 0, None
            self.leases.clear()
            for name, entry in list(self.entries.items()):
                if entry.state in ("unloading", "unload_pending"):
                    del self.entries[name]
                elif entry.state in IN_ENGINE:
                    self.entries[name] = RegistryEntry("staged", entry.used)
        self.observations += 1
        self.up = up and boot is not None
        if self.up:
            self.ended_loads.engine_serves(now)
        if idle_at is not None:
            self.idle_at = idle_at
        return changed

    def _ended(self, now: float) -> None:
        """The boot of the engine is over."""
        under_way = [name for name, entry in self.entries.items() if entry.state in ("loading", "load_unknown")]
        before = set(self.ended_loads.ends)
        for name, count in self.ended_loads.engine_ended(under_way, now).items():
            text = endings.message(count, self.since_1970 + now + endings.BACKOFF_SECONDS)
            self.failures[name] = Failure(reasons.LOAD_ENDED_ENGINE, text, now, count)
        for name in before - self.ended_loads.ends.keys():
            if name in self.failures and self.failures[name].reason == reasons.LOAD_ENDED_ENGINE:
                del self.failures[name]

    def listing(self, ours: Mapping[str, bool], foreign: int, now: float) -> list[str]:
        """Takes the engine's listing: our adapter names, and whether the files they were loaded from are still in their
        folder. Returns the names whose files are useless: the engine lost the adapter, or is about to unload it. No
        call was under way meanwhile."""
        self.listed, self.foreign = now, foreign
        useless = [n for n, e in self.entries.items() if e.state in ("loaded", "retiring") and n not in ours]
        for name in useless:
            self._remove(name)
        for name, whole in ours.items():
            entry = self.entries.get(name)
            if entry is not None and entry.state not in ("staging", "staged", "load_unknown"):
                continue
            if whole:
                # Loaded by a call without an answer, or by a former process of this agent.
                self.entries[name] = RegistryEntry("loaded", now if entry else self.started)
                self.failures.pop(name, None)
                self.ended_loads.loaded(name)
            else:
                # Files are removed before an unload is requested, so the unload may come at any time.
                self.entries[name] = RegistryEntry("unload_pending", now)
                useless.append(name)
        return useless

    def load_broke_off(self, name: str, now: float) -> None:
        """A load got no proper answer: the engine may have ended by it, which the observer sees later."""
        self.ended_loads.broke_off(name, now)

    def call_broke(self, now: float) -> None:
        """A call found no engine: its adapters must be listed again."""
        self.listed, self.list_after = None, now + 1.0

    def loaded(self, name: str, seconds: float, now: float) -> None:
        """The engine has loaded the adapter."""
        entry = self.entries[name]
        entry.state, entry.used, entry.load_seconds = "loaded", now, seconds
        self.failures.pop(name, None)
        self.ended_loads.loaded(name)
        self.loads += 1

    def unloaded(self, name: str) -> None:
        """The engine has unloaded it."""
        self.failures.pop(name, None)
        self._remove(name)

    def set_state(self, name: str, state: Literal["staged", "load_unknown", "unload_pending"]) -> None:
        """Sets the state after a call that failed."""
        self.entries[name].state = state

    def staged(self, name: str, seconds: float) -> None:
        """The files are in their folder."""
        entry = self.entries[name]
        entry.state, entry.staged_seconds = "staged", seconds

    def failed(self, name: str, reason: str, message: str, now: float, *, keep: bool = False) -> None:
        """Staging or loading failed. `keep`: the entry stays as it is."""
        before = self.failures.get(name)
        self.failures[name] = Failure(reason, message, now, before.count + 1 if before else 1)
        if not keep:
            self._remove(name)

    def published(self, seq: int, now: float) -> None:
        """Message `seq` has published the states: the barrier of all retirements since the last message."""
        for name, entry in self.entries.items():
            if entry.state == "retiring" and entry.retirement is None:
                entry.retirement = Retirement(name, seq, now)

    def _remove(self, name: str) -> None:
        self.entries.pop(name, None)
        self.leases.drop(name)

    # --- derived ------------------------------------------------------------------------------------------------------

    def count(self, states: frozenset[State]) -> int:
        return sum(entry.state in states for entry in self.entries.values())

    @property
    def free(self) -> int:
        """Unused places of the engine; negative when it has more than it should."""
        return self.places - self.foreign - self.count(IN_ENGINE)

    @property
    def covered(self) -> set[str]:
        """Adapters that leases cover, or will cover."""
        return {*self.leases, *(a.wanted.name for a in self.waiters if a.admitted is not None and a.key is not None)}

    # --- reported -----------------------------------------------------------------------------------------------------

    def stream_keys(self) -> dict[str, object]:
        """The adapter keys of the agent's stream, by attribute name of `ReplicaKeys`."""
        return {
            "adapters": self.states(),
            "adapter_slots": self.slots,
            "adapter_slots_leased": len(self.leases),
            "adapters_waiting": sum(w.admitted is None and not w.slow for w in self.waiters),
            "adapter_loads_total": self.loads,
            "adapter_evictions_total": self.evictions,
        }

    def states(self) -> dict[str, AdapterState] | None:
        """By engine name; None until all desired adapters were tried."""
        if not self.reportable:
            return None
        reported = {name: _reported(entry, self.failures.get(name)) for name, entry in self.entries.items()}
        for name, failure in self.failures.items():
            reported.setdefault(name, _failed(failure))
        for name in self.unplaced:
            message = f"all {self.places} places hold adapters that are pinned or in use"
            reported.setdefault(name, AdapterState(state="failed", reason=reasons.NO_ROOM, message=message))
        return reported


def _reported(entry: RegistryEntry, failure: Failure | None) -> AdapterState:
    match entry.state:
        case "staging" | "loading" | "loaded" | "retiring":
            return AdapterState(state=entry.state)
        case "staged" if failure is not None and failure.reason == reasons.LOAD_ENDED_ENGINE:
            return _failed(failure)  # its files are kept for a moment, and it is not loaded from them
        case "staged":
            return AdapterState(state="loading")
        case "unloading":
            return AdapterState(state="retiring")
        case "load_unknown" | "unload_pending":
            return _failed(failure) if failure else AdapterState(state="retiring")


def _failed(failure: Failure) -> AdapterState:
    return AdapterState(state="failed", reason=failure.reason, message=failure.message)
