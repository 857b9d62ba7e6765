"""What the cache knows of its folder, in memory, and who uses what. Only the event loop's thread touches it."""

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Final

from shoal.cache.disk import CachedFile, CachedModel
from shoal.core.eviction import Candidate

GRACE_SECONDS: Final = 120.0
"""A model is not evicted for so long after its last use, nor after the daemon's start: agents need a moment to say what
their pods use."""


class Index:
    """Models by key, and their contents."""

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self._models: dict[str, CachedModel] = {}
        self._used: dict[str, float] = {}
        """Key -> wall-clock time of the last use: it is compared with the records' times of an earlier run."""
        self._pins: Counter[str] = Counter()
        self._holds: Counter[tuple[str, str]] = Counter()
        """(namespace, key) -> pods that use it."""
        self._grace = grace
        self._started = time.monotonic()

    def fill(self, found: Iterable[tuple[CachedModel, float]]) -> None:
        """What an earlier run left."""
        for model, used in found:
            self._models[model.key] = model
            self._used[model.key] = used

    # --- models -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> CachedModel | None:
        return self._models.get(key)

    def add(self, model: CachedModel) -> None:
        self._models[model.key] = model
        self._used[model.key] = time.time()

    def remove(self, keys: Iterable[str]) -> list[str]:
        """Forgets models. Returns the contents that no other model has."""
        gone = {file.sha256 for key in keys for file in self._models.pop(key).files}
        return sorted(gone - {file.sha256 for model in self._models.values() for file in model.files})

    def led_to(self, uri: str, manifest: str | None) -> CachedModel | None:
        """The model that this address (its hash) led to when it had this manifest, if something vouches for it.

        None: whatever it has; the hash is of one manifest only.
        """
        return next(
            (m for m in self._models.values() if m.lasting and manifest in (None, m.manifest) and uri in m.uris),
            None,
        )

    def files(self) -> dict[str, CachedFile]:
        """Identity -> file, of all models."""
        return {file.identity: file for model in self._models.values() for file in model.files if file.identity}

    def content(self, sha256: str) -> CachedFile | None:
        return next((f for model in self._models.values() for f in model.files if f.sha256 == sha256), None)

    def contents(self) -> dict[str, CachedFile]:
        """SHA-256 -> file, of all models."""
        return {file.sha256: file for model in self._models.values() for file in model.files}

    def is_used(self, sha256: str) -> bool:
        """Whether a pod uses a model that has this content."""
        return self.users(sha256) > 0

    def users(self, sha256: str) -> int:
        """Pods that use a model which has this content."""
        owners = set(self.owners([sha256]))
        return sum(count for (_, key), count in self._holds.items() if key in owners)

    def owners(self, contents: Iterable[str]) -> list[str]:
        """Keys of the models that have any of these contents."""
        wanted = set(contents)
        return [key for key, model in self._models.items() if any(file.sha256 in wanted for file in model.files)]

    def keys(self) -> list[str]:
        return sorted(self._models)

    @property
    def models(self) -> int:
        return len(self._models)

    @property
    def bytes(self) -> int:
        """On disk: contents that models share count once."""
        return sum({file.sha256: file.size for model in self._models.values() for file in model.files}.values())

    # --- use --------------------------------------------------------------------------------------------------------

    @property
    def holds(self) -> int:
        return self._holds.total()

    def held_in(self, namespace: str) -> bool:
        return any(count > 0 and of == namespace for (of, _), count in self._holds.items())

    def touch(self, key: str) -> None:
        if key in self._models:
            self._used[key] = time.time()

    @contextlib.contextmanager
    def hold(self, namespace: str, key: str) -> Generator[None]:
        """A pod of the namespace uses the model."""
        self._holds[namespace, key] += 1
        try:
            with self.pin(key):
                yield
        finally:
            self._holds[namespace, key] -= 1

    @contextlib.contextmanager
    def pin(self, key: str) -> Generator[None]:
        """The model is not to be evicted meanwhile."""
        self._pins[key] += 1
        self.touch(key)
        try:
            yield
        finally:
            self._pins -= Counter([key])  # a zero is dropped
            self.touch(key)

    def in_use_bytes(self) -> int:
        """Bytes of the models that pods use."""
        return sum({b: s for c in self.candidates(grace=False) if c.pinned for b, s in c.blobs.items()}.values())

    def candidates(self, *, grace: bool = True) -> list[Candidate]:
        """The models as the eviction's decision wants them; without `grace`, only what is surely in use is pinned."""
        now = time.time()
        young = time.monotonic() - self._started < self._grace
        return [
            Candidate(
                key=key,
                blobs={file.sha256: file.size for file in model.files},
                last_used=self._used[key],
                pinned=self._pins[key] > 0 or (grace and (young or 0 <= now - self._used[key] < self._grace)),
            )
            for key, model in self._models.items()
        ]
