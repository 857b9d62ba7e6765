"""The folder that agent and engine share: one folder per adapter and revision, named as the engine calls it.

A folder is there whole or not at all: staging and removal both rename. What begins with a dot is on its way. Nothing
here blocks the event loop.
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
"""What an adapter of Shoal is called in an engine."""
_REMOVED: Final = ".gone"


class AdapterFolder:
    """`folder` has the same path for the engine."""

    def __init__(self, folder: Path = Path(names.ADAPTERS_DIR)) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name

    async def tidy(self) -> None:
        """At the agent's start: removes what its predecessor left half done."""
        await asyncio.to_thread(self._tidy)

    async def whole(self, names: Iterable[str]) -> frozenset[str]:
        """Those that have their folder."""
        return await asyncio.to_thread(lambda: frozenset(name for name in names if self.path(name).is_dir()))

    async def all(self) -> frozenset[str]:
        """Every adapter that has a folder."""
        return await asyncio.to_thread(self._all)

    async def put_away(self, name: str) -> None:
        """Takes the files from under their name, at once: the engine could load them no more."""
        await asyncio.to_thread(self._put_away, name)

    async def remove(self, name: str) -> None:
        """Removes the files, also those that were put away."""
        await asyncio.to_thread(self._remove, name)

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}{_REMOVED}"

    def _put_away(self, name: str) -> None:
        aside = self._hidden(name)
        with contextlib.suppress(FileNotFoundError):
            if aside.exists():
                shutil.rmtree(aside)
            self.path(name).rename(aside)

    def _remove(self, name: str) -> None:
        self._put_away(name)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._hidden(name))

    def _tidy(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in self.folder.iterdir():
                if entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _all(self) -> frozenset[str]:
        try:
            return frozenset(entry.name for entry in self.folder.iterdir() if NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return frozenset()
