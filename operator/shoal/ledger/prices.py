"""The mounted folder of price lists. It is read again when it changes; after an invalid change the last valid lists
stay in force. The database keeps them, so that they do so after a restart too."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection, delete, insert, select

from shoal.api.ledger import Prices
from shoal.core.rating.files import PriceList, parse
from shoal.core.rating.problems import PriceProblem, PricesRefused
from shoal.core.rating.schedule import Schedule, conflicts, schedule
from shoal.ledger.schema import price_lists

log = structlog.get_logger()

REFRESH_SECONDS: Final = 2.0
READ_SECONDS: Final = 30.0
SUFFIXES: Final = (".yaml", ".yml")
MOST_KEPT: Final = 4 * 1024 * 1024
"""Characters of all lists that the database keeps. A ConfigMap has a quarter of it at most."""
_MOST_TOLD: Final = 20
"""Mistakes that answers contain."""
_LONGEST: Final = 500
"""Characters of each."""
_MOST_FILES: Final = 1_000

Seen = tuple[tuple[str, int, int, int], ...]


def read(folder: Path) -> tuple[dict[str, str], Schedule]:
    """The texts in a folder by file name, and the lists that they are. Raises PricesRefused, OSError."""
    problems: list[PriceProblem] = []
    texts: dict[str, str] = {}
    found: list[PriceList] = []
    for path in _files(folder):
        if path.suffix not in SUFFIXES:
            problems.append(PriceProblem(path.name, 1, "is no .yaml file: this folder is for price lists"))
            continue
        try:
            texts[path.name] = path.read_text()
            found.append(parse(path.name, texts[path.name]))
        except PricesRefused as refused:
            problems += refused.problems
        except UnicodeDecodeError:
            problems.append(PriceProblem(path.name, 1, "not UTF-8"))
    if problems:
        raise PricesRefused([*problems, *conflicts(found, complete=False)])
    return texts, schedule(found)


async def _nothing() -> None:
    pass


class PriceFolder:
    """Price lists of an installation. If the folder is empty or absent, nothing has a price."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970."""
        self._folder = folder
        self._clock = clock
        self._seen: Seen | None = None
        self._accepted: Mapping[str, str] | None = None
        """Texts of the last valid lists in the folder, by file; None: it had none since the start."""
        self._kept: Mapping[str, str] | None = None
        """What of them the database has; None: unknown."""
        self._changing = threading.Lock()
        self.schedule = Schedule()
        """The last valid lists."""
        self.error: str | None = None
        """Why the lists in the folder are not in force; one line per error."""

    @property
    def refused(self) -> tuple[str, ...]:
        """The first mistakes for which the lists in the folder are refused; empty: they are in force."""
        if self.error is None:
            return ()
        lines = self.error.splitlines()
        more = (f"and {len(lines) - _MOST_TOLD} more",) if len(lines) > _MOST_TOLD else ()
        return (*(line[:_LONGEST] for line in lines[:_MOST_TOLD]), *more)

    def current(self) -> Prices | None:
        """The price list in force now."""
        return self.at(round(self._clock() * 1000))

    def at(self, moment: int) -> Prices | None:
        """The price list in force at this time, in milliseconds since 1970."""
        found = self.schedule.at(moment)
        return None if found is None else found.prices

    @property
    def unkept(self) -> bool:
        """Whether lists were accepted that the database does not have."""
        return self._accepted is not None and self._accepted != self._kept

    async def follow(self, changed: Callable[[], None], keep: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Polls the folder until cancelled. Calls `changed` when prices change, and `keep` while lists are unkept."""
        while True:
            if await self.refresh():
                changed()
            if self.unkept:
                await keep()
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> bool:
        """Reads the folder if it has changed; returns whether prices have changed."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await asyncio.to_thread(self.refresh_now)
        except TimeoutError:
            return self._refuse(f"{self._folder} cannot be read: the disk does not answer")

    def refresh_now(self) -> bool:
        """Like `refresh`, but synchronous: for the start, before anything is served."""
        try:
            seen = _signature(self._folder)
            if seen == self._seen:
                return False
            self._seen = seen
            texts, found = read(self._folder)
        except PricesRefused as refused:
            return self._refuse(str(refused))
        except OSError as error:
            # A file may also be replaced while it is read: the next poll finds the new one.
            self._seen = None
            return self._refuse(f"{error.filename or self._folder}: {error.strerror}")
        self.error = None
        with self._changing:
            self._accepted = texts
            if found == self.schedule:
                return False
            self.schedule = found
        log.info("price lists", lists=[one.prices.list for one in found.lists], currency=found.currency)
        return True

    def keep(self, connection: Connection) -> Mapping[str, str] | None:
        """Writes the accepted lists in place of those that the database has; give the result to `kept` after the
        commit. Of several ledgers on one database, the last one that accepts lists writes them."""
        texts = self._accepted
        if texts is None:
            return None
        if sum(map(len, texts.values())) > MOST_KEPT:
            log.warning("the price lists are too large to be kept for a restart", most=MOST_KEPT)
            rows: dict[str, str] = {}
        else:
            rows = dict(texts)
        if rows != _stored(connection):
            connection.execute(delete(price_lists))
            if rows:
                connection.execute(insert(price_lists), [{"file": file, "text": text} for file, text in rows.items()])
        return texts

    def kept(self, texts: Mapping[str, str] | None) -> None:
        """Notes that the database has these."""
        self._kept = texts

    def restore(self, connection: Connection) -> None:
        """Puts the kept lists in force if the folder had no valid ones since the start."""
        if self._accepted is not None or self.schedule.lists:
            return
        kept = _stored(connection)
        try:
            found = schedule(parse(file, text) for file, text in kept.items())
        except PricesRefused as refused:
            log.error("the price lists of before the start are refused by this version", error=str(refused))
            return
        with self._changing:
            if self._accepted is not None or not found.lists:
                return
            self.schedule = found
        log.warning("the price lists of before the start stay in force", lists=[one.prices.list for one in found.lists])

    def _refuse(self, error: str) -> bool:
        if error != self.error:
            log.error("the price lists are refused; those before stay in force", error=error)
        self.error = error
        return False


class PriceMetrics(Collector):
    """Metrics of a folder."""

    def __init__(self, folder: PriceFolder) -> None:
        self._folder = folder

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("shoal_ledger_price_lists", "Price lists in use.", len(self._folder.schedule.lists))
        yield GaugeMetricFamily(
            "shoal_ledger_price_lists_refused",
            "1: the mounted price lists are invalid, and the previous ones stay in force.",
            int(self._folder.error is not None),
        )


def _stored(connection: Connection) -> dict[str, str]:
    rows = connection.execute(select(price_lists.c.file, price_lists.c.text))
    return {row.file: row.text for row in rows}


def _files(folder: Path) -> list[Path]:
    # A ConfigMap's own folders and links begin with two dots.
    found = sorted(path for path in folder.glob("*") if not path.name.startswith(".")) if folder.exists() else []
    if len(found) > _MOST_FILES:
        raise PricesRefused([PriceProblem(folder.name, 1, f"more than {_MOST_FILES} files")])
    return found


def _signature(folder: Path) -> Seen:
    stats = ((path.name, path.stat()) for path in _files(folder))
    return tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in stats)
