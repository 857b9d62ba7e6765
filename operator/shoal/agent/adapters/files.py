"""The folder that agent and engine share: one folder per adapter and revision, named like the engine's name of it.

Staging and removal rename folders, so a folder is either complete or absent. Names with a leading dot are incomplete.
No method blocks the event loop.
"""

import asyncio
import contextlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from shoal.api import names

NAME: Final = re.compile(r"[a-z0-9-]+\.[a-z0-9.-]+@[0-9a-f]{12}")
"""Engine names of Shoal's adapters."""
_REMOVED: Final = ".gone"


class AdapterFolder:
    """`folder` has the same path in the engine's container."""

    def __init__(self, folder: Path = Path(names.ADAPTERS_DIR)) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name

    async def remove_incomplete(self) -> None:
        """At the agent's start: removes incomplete folders of its predecessor."""
        await asyncio.to_thread(self._remove_incomplete)

    async def complete(self, names: Iterable[str]) -> frozenset[str]:
        """The adapters of `names` whose folder exists."""
        return await asyncio.to_thread(lambda: frozenset(name for name in names if self.path(name).is_dir()))

    async def all(self) -> frozenset[str]:
        """Every adapter that has a folder."""
        return await asyncio.to_thread(self._all)

    async def hide(self, name: str) -> None:
        """Renames the files away at once, so that the engine can no longer load them."""
        await asyncio.to_thread(self._hide, name)

    async def remove(self, name: str) -> None:
        """Removes the files, including those that were renamed away."""
        await asyncio.to_thread(self._remove, name)

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}{_REMOVED}"

    def _hide(self, name: str) -> None:
        hidden = self._hidden(name)
        with contextlib.suppress(FileNotFoundError):
            if hidden.exists():
                shutil.rmtree(hidden)
            self.path(name).rename(hidden)

    def _remove(self, name: str) -> None:
        self._hide(name)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._hidden(name))

    def _remove_incomplete(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in self.folder.iterdir():
                if entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _all(self) -> frozenset[str]:
        try:
            return frozenset(entry.name for entry in self.folder.iterdir() if NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return frozenset()
