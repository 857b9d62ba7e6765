"""Which adapters the replicas have, as their agents say, and how many requests of ours use each of them."""

from collections.abc import Callable, Collection, Mapping

from shoal.api.replica import AdapterState

_NONE: frozenset[str] = frozenset()
_NOTHING: Mapping[str, int] = {}


class Residency:
    """By uid of a pod and engine name of an adapter's revision."""

    def __init__(self) -> None:
        self.ended: Callable[[str, str], None] = lambda _uid, _name: None
        """Hears that nothing of ours uses an adapter at a pod any more."""
        self._loaded: dict[str, set[str]] = {}
        """By adapter: the pods."""
        self._at: dict[str, frozenset[str]] = {}
        """By pod: the adapters."""
        self._retiring: dict[str, frozenset[str]] = {}
        self._running: dict[str, dict[str, int]] = {}

    def heard(self, uid: str, adapters: Mapping[str, AdapterState] | None) -> None:
        """Takes what an agent says; None: nothing is known."""
        loaded = retiring = _NONE
        if adapters:
            loaded = frozenset(name for name, said in adapters.items() if said.state == "loaded")
            retiring = frozenset(name for name, said in adapters.items() if said.state == "retiring")
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
        """Those that have it loaded."""
        return self._loaded.get(name, _NONE)

    def loaded(self, uid: str) -> Collection[str]:
        return self._at.get(uid, _NONE)

    def retiring(self, uid: str) -> frozenset[str]:
        """Adapters that wait at a pod to be unloaded."""
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
        """What is in flight at a pod, by adapter."""
        return self._running.get(uid, _NOTHING)


def _keep(kept: dict[str, frozenset[str]], uid: str, names: frozenset[str]) -> None:
    if names:
        kept[uid] = names
    else:
        kept.pop(uid, None)
