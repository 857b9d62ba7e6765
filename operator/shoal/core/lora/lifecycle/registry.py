"""What one replica knows of its adapters: which the engine has, which should be there, who asks for which.

Keeps what happened; `planstep.py` decides what to do next. Everything that an engine has belongs to one boot of it.
Times are seconds of one monotonic clock.

An adapter goes through these states; whatever the engine has, or may have, takes one of its places:

    staging    its files are being fetched and verified
    staged     they are in their folder
    loading    the engine was asked to load it                                            takes a place
    loaded     requests may go to it, under a lease                                       takes a place
    retiring   no new requests; waits for the gateways' acknowledgements                  takes a place
    unloading  its files are put away and the engine was asked to unload it               takes a place
    unsure     a load that was not answered: the engine may have it by now, or later      takes a place
    undone     an unload that was not answered, or is a predecessor's: it is asked again  takes a place
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from shoal.api import reasons
from shoal.api.adapters import AdapterWanted, DesiredAdapter
from shoal.core.lora.lifecycle.leases import EngineLeases, Key
from shoal.core.lora.lifecycle.unload import Retirement

State = Literal["staging", "staged", "loading", "loaded", "retiring", "unloading", "load_unknown", "unload_pending"]
IN_ENGINE: Final = frozenset[State]({"loading", "loaded", "retiring", "unloading", "load_unknown", "unload_pending"})
GOING: Final = frozenset[State]({"retiring", "unloading"})

RETRY_SECONDS: Final = 2.0
"""After the first failure; doubled with each further one, up to LONGEST_RETRY_SECONDS."""
LONGEST_RETRY_SECONDS: Final = 60.0
REMEMBER_SECONDS: Final = 600.0
"""How long a failure of what nobody wants any more is told."""
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
    """An adapter that is here, or on its way."""

    state: State
    used: float
    """When it was last loaded, leased, or said to run, those used longest ago go first; while it is fetched: since
    when."""
    dropped: bool = False
    """It was on the floor and is not any more: it goes when no lease covers it."""
    retirement: Retirement | None = None
    """With `retiring`: once it was told."""
    staged_seconds: float = 0.0
    load_seconds: float = 0.0
    keep_until: float = 0.0
    """While it is fetched or staged: until then it is kept though nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter is not here, and when it is tried again."""

    reason: str
    message: str
    at: float
    count: int

    @property
    def retry_at(self) -> float:
        if self.reason in PERMANENT:
            return self.at + LONGEST_RETRY_SECONDS
        return self.at + min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2 ** (self.count - 1))


@dataclass(slots=True, eq=False)
class AdapterWaiter:
    """Somebody waits for an adapter."""

    wanted: AdapterWanted
    key: Key | None
    """The gateway that gets the lease; None: an operator loads ahead and gets none."""
    since: float
    admitted: float | None = None
    """Since when a slot is its own."""
    slow: bool = False
    """Its adapter's files take long to come: it has given its slot back, and gets one again when they are here."""
    missed: bool = False
    """It was not in the engine."""


@dataclass(slots=True)
class Registry:
    """One replica's adapters. `places` are those of the engine's host memory, `slots` those that leases may cover."""

    places: int
    slots: int
    started: float
    """When the agent started."""
    entries: dict[str, RegistryEntry] = field(default_factory=dict[str, RegistryEntry])
    failures: dict[str, Failure] = field(default_factory=dict[str, Failure])
    desired: dict[str, DesiredAdapter] = field(default_factory=dict[str, DesiredAdapter])
    waiters: list[AdapterWaiter] = field(default_factory=list[AdapterWaiter])
    leases: EngineLeases = field(default_factory=EngineLeases)
    unplaced: frozenset[str] = frozenset()
    """Of the floor: what finds no place."""
    boot: str | None = None
    up: bool = False
    """This boot of the engine serves."""
    observations: int = 0
    joined: bool = False
    """The agent started beside an engine that ran already."""
    idle_at: float | None = None
    """When this boot was last seen with nothing running or waiting."""
    listed: float | None = None
    """When the engine last said what it has; None: not since it started, or since a call to it broke."""
    list_after: float = 0.0
    reportable: bool = False
    """Since this boot of the engine, what the floor asks for was loaded or failed: the adapters may be told."""
    foreign: int = 0
    """Adapters in the engine that are not Shoal's."""
    busy: bool = False
    """A call to the engine is under way."""
    loads: int = 0
    evictions: int = 0

    # --- what is asked ------------------------------------------------------------------------------------------------

    def set_desired(self, adapters: Iterable[DesiredAdapter]) -> None:
        """What the replica should hold from now on."""
        floor = {adapter.name: adapter for adapter in adapters}
        for name, entry in self.entries.items():
            entry.dropped = name not in floor and (entry.dropped or name in self.desired)
            if entry.state == "retiring" and name in floor and name not in self.desired:
                entry.state, entry.retirement = "loaded", None
        for name in self.desired.keys() - floor.keys():
            self.failures.pop(name, None)
        self.desired = floor

    def acked(self, key: Key, running: frozenset[str], now: float) -> None:
        """A gateway said what it runs."""
        # Names come from outside: only what the engine has can run.
        here = frozenset(name for name in running if name in self.entries and self.entries[name].state in IN_ENGINE)
        for name in here:
            self.entries[name].used = now
        self.leases.acked(key, here, now)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def observed(self, boot: str | None, *, up: bool, idle_at: float | None = None) -> bool:
        """The observer looked at the engine, and saw nothing run then if `idle_at` is given; whether it is another one
        than before."""
        changed = boot != self.boot
        if changed:
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
        if idle_at is not None:
            self.idle_at = idle_at
        return changed

    def listing(self, ours: Mapping[str, bool], foreign: int, now: float) -> list[str]:
        """The engine said what it has: our names, and whether it was loaded from files that are still in their folder.
        Returns those whose files are of no use: it should have had them, or is about to unload them. No call was under
        way meanwhile."""
        self.listed, self.foreign = now, foreign
        useless = [n for n, e in self.entries.items() if e.state in ("loaded", "retiring") and n not in ours]
        for name in useless:
            self._remove(name)
        for name, whole in ours.items():
            entry = self.entries.get(name)
            if entry is not None and entry.state not in ("staging", "staged", "load_unknown"):
                continue
            if whole:
                # Of a load that was not answered, or of this agent's predecessor.
                self.entries[name] = RegistryEntry("loaded", now if entry else self.started)
                self.failures.pop(name, None)
            else:
                # Whoever put its files away has asked for its unload, and that may come at any time.
                self.entries[name] = RegistryEntry("unload_pending", now)
                useless.append(name)
        return useless

    def call_broke(self, now: float) -> None:
        """A call to the engine found nobody: what it has must be asked anew."""
        self.listed, self.list_after = None, now + 1.0

    def loaded(self, name: str, seconds: float, now: float) -> None:
        """The engine has the adapter."""
        entry = self.entries[name]
        entry.state, entry.used, entry.load_seconds = "loaded", now, seconds
        self.failures.pop(name, None)
        self.loads += 1

    def unloaded(self, name: str) -> None:
        """The engine has it no more."""
        self.failures.pop(name, None)
        self._remove(name)

    def set_state(self, name: str, state: Literal["staged", "load_unknown", "unload_pending"]) -> None:
        """What became of a call that did not end well."""
        self.entries[name].state = state

    def staged(self, name: str, seconds: float) -> None:
        """The files are in their folder."""
        entry = self.entries[name]
        entry.state, entry.staged_seconds = "staged", seconds

    def failed(self, name: str, reason: str, message: str, now: float, *, keep: bool = False) -> None:
        """It could not be brought here. With `keep` it stays what it is otherwise."""
        before = self.failures.get(name)
        self.failures[name] = Failure(reason, message, now, before.count + 1 if before else 1)
        if not keep:
            self._remove(name)

    def published(self, seq: int, now: float) -> None:
        """Message `seq` said what `states` says: the barrier of whatever retires since the last one."""
        for name, entry in self.entries.items():
            if entry.state == "retiring" and entry.retirement is None:
                entry.retirement = Retirement(name, seq, now)

    def _remove(self, name: str) -> None:
        self.entries.pop(name, None)
        self.leases.drop(name)

    # --- what follows -------------------------------------------------------------------------------------------------

    def count(self, states: frozenset[State]) -> int:
        return sum(entry.state in states for entry in self.entries.values())

    @property
    def free(self) -> int:
        """Places of the engine that nothing takes; below 0 when it has more than it should."""
        return self.places - self.foreign - self.count(IN_ENGINE)

    @property
    def covered(self) -> set[str]:
        """Adapters that leases cover, or will."""
        return {*self.leases, *(a.wanted.name for a in self.waiters if a.admitted is not None and a.key is not None)}
