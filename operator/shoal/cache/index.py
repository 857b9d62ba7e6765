"""The content of the cache in memory, and which pods use it. Only the event loop's thread uses it."""

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Final

from shoal.cache.disk import CachedFile, CachedModel
from shoal.core.eviction import Candidate

GRACE_SECONDS: Final = 120.0
"""Time in which a model is not evicted, after its last use and after the start of the cache: agents need time to report
the models of their pods."""


class Index:
    """Models by key, and their blobs."""

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self._models: dict[str, CachedModel] = {}
        self._used: dict[str, float] = {}
        """Key -> wall-clock time of the last use, comparable with the stored times of an earlier run."""
        self._pins: Counter[str] = Counter()
        self._holds: Counter[tuple[str, str]] = Counter()
        """(namespace, key) -> number of pods that use it."""
        self._grace = grace
        self._started = time.monotonic()

    def fill(self, found: Iterable[tuple[CachedModel, float]]) -> None:
        """Adds the models of an earlier run."""
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
        """Removes models. Returns the blobs that no other model has."""
        gone = {file.sha256 for key in keys for file in self._models.pop(key).files}
        return sorted(gone - {file.sha256 for model in self._models.values() for file in model.files})

    def led_to(self, uri: str, manifest: str | None) -> CachedModel | None:
        """The model with validators that this URI (its hash) resolved to with this manifest.

        `manifest` None: any manifest; the hash then includes it.
        """
        return next(
            (m for m in self._models.values() if m.lasting and manifest in (None, m.manifest) and uri in m.uris),
            None,
        )

    def files(self) -> dict[str, CachedFile]:
        """Identity -> file, over all models."""
        return {file.identity: file for model in self._models.values() for file in model.files if file.identity}

    def content(self, sha256: str) -> CachedFile | None:
        return next((f for model in self._models.values() for f in model.files if f.sha256 == sha256), None)

    def contents(self) -> dict[str, CachedFile]:
        """SHA-256 -> file, over all models."""
        return {file.sha256: file for model in self._models.values() for file in model.files}

    def is_used(self, sha256: str) -> bool:
        """Whether a pod uses a model with this blob."""
        return self.users(sha256) > 0

    def users(self, sha256: str) -> int:
        """Number of pods that use a model with this blob."""
        owners = set(self.owners([sha256]))
        return sum(count for (_, key), count in self._holds.items() if key in owners)

    def owners(self, contents: Iterable[str]) -> list[str]:
        """Keys of the models with any of these blobs."""
        wanted = set(contents)
        return [key for key, model in self._models.items() if any(file.sha256 in wanted for file in model.files)]

    def keys(self) -> list[str]:
        return sorted(self._models)

    @property
    def models(self) -> int:
        return len(self._models)

    @property
    def bytes(self) -> int:
        """Size on disk: shared blobs count once."""
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
        """Marks the model as used by a pod of the namespace in the body."""
        self._holds[namespace, key] += 1
        try:
            with self.pin(key):
                yield
        finally:
            self._holds[namespace, key] -= 1

    @contextlib.contextmanager
    def pin(self, key: str) -> Generator[None]:
        """Protects the model from eviction in the body."""
        self._pins[key] += 1
        self.touch(key)
        try:
            yield
        finally:
            self._pins -= Counter([key])  # removes zero counts
            self.touch(key)

    def in_use_bytes(self) -> int:
        """Size of the models that pods use, in bytes."""
        return sum({b: s for c in self.candidates(grace=False) if c.pinned for b, s in c.blobs.items()}.values())

    def candidates(self, *, grace: bool = True) -> list[Candidate]:
        """Candidates for eviction; without `grace`, only models that are certainly in use are pinned."""
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
