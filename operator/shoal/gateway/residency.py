"""The adapters that each replica has, as its agent reports them, and this gateway's requests for each."""

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
        _keep(self._at, uid, loaded)
        _keep(self._retiring, uid, retiring)

    def pods(self, name: str) -> Collection[str]:
        """The pods that have an adapter loaded."""
        return self._loaded.get(name, _NONE)

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
