"""The adapters that each replica has, as its agent reports them, this gateway's requests for each, and since when
requests have waited for those that no replica has."""

from collections.abc import Callable, Collection, Mapping

from shoal.api.replica import AdapterState

_NONE: frozenset[str] = frozenset()
_NOTHING: Mapping[str, int] = {}


class Residency:
    """Keyed by uid of a pod and engine name of an adapter's revision."""

    def __init__(self) -> None:
        self.ended: Callable[[str, str], None] = lambda _uid, _name: None
        """Called when the last request of this gateway for an adapter at a pod has ended."""
        self._loaded: dict[str, set[str]] = {}
        """Pods by adapter."""
        self._at: dict[str, frozenset[str]] = {}
        """Loaded adapters by pod."""
        self._retiring: dict[str, frozenset[str]] = {}
        self._running: dict[str, dict[str, int]] = {}
        self._first_waits: dict[str, tuple[str, float]] = {}
        """By uid of a LoRAAdapter: its engine name, and when a request first waited for it (time.monotonic()), while no
        pod has had it since."""

    def update(self, uid: str, adapters: Mapping[str, AdapterState] | None) -> None:
        """Stores an agent's report; None: unknown."""
        loaded = retiring = _NONE
        if adapters:
            loaded = frozenset(name for name, adapter in adapters.items() if adapter.state == "loaded")
            retiring = frozenset(name for name, adapter in adapters.items() if adapter.state == "retiring")
        before = self._at.get(uid, _NONE)
        if loaded != before:
            for name in before - loaded:
                pods = self._loaded[name]
                pods.discard(uid)
                if not pods:
                    del self._loaded[name]
            for name in loaded - before:
                self._loaded.setdefault(name, set()).add(uid)
            if self._first_waits:
                self._first_waits = {at: wait for at, wait in self._first_waits.items() if wait[0] not in loaded}
        _keep(self._at, uid, loaded)
        _keep(self._retiring, uid, retiring)

    def pods(self, name: str) -> Collection[str]:
        """The pods that have an adapter loaded."""
        return self._loaded.get(name, _NONE)

    def waited_for(self, adapter_uid: str, name: str, now: float) -> float:
        """A request waits for an adapter. Returns the seconds since the first one did that no pod has had it since; 0:
        a pod has it."""
        if name in self._loaded:
            return 0.0
        known = self._first_waits.get(adapter_uid)
        if known is None or known[0] != name:
            known = self._first_waits[adapter_uid] = (name, now)
        return now - known[1]

    def retain(self, adapter_uids: Collection[str]) -> None:
        """Drops the waits for deleted adapters."""
        self._first_waits = {at: wait for at, wait in self._first_waits.items() if at in adapter_uids}

    def loaded(self, uid: str) -> Collection[str]:
        return self._at.get(uid, _NONE)

    def retiring(self, uid: str) -> frozenset[str]:
        """Adapters that are about to be unloaded at a pod."""
        return self._retiring.get(uid, _NONE)

    def enter(self, uid: str, name: str) -> None:
        """A request for the adapter is in flight at the pod."""
        running = self._running.setdefault(uid, {})
        running[name] = running.get(name, 0) + 1

    def leave(self, uid: str, name: str) -> None:
        running = self._running[uid]
        left = running[name] - 1
        if left:
            running[name] = left
            return
        del running[name]
        if not running:
            del self._running[uid]
        self.ended(uid, name)

    def running(self, uid: str) -> Mapping[str, int]:
        """Requests in flight at a pod, by adapter."""
        return self._running.get(uid, _NOTHING)


def _keep(kept: dict[str, frozenset[str]], uid: str, names: frozenset[str]) -> None:
    if names:
        kept[uid] = names
    else:
        kept.pop(uid, None)
