"""What a Prometheus has of NVIDIA's DCGM exporter, for the health of GPUs (`core/health/dcgm.py`).

Instant queries look back for five minutes, so each query leaves out what was scraped earlier than `FRESH_SECONDS` ago,
by Prometheus' own clock. All sick GPUs are asked for, and of the others only whether they are measured.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from shoal.api.config import DCGM, Prometheus
from shoal.core.health import dcgm
from shoal.core.health.dcgm import DCGMReading, DCGMSample
from shoal.signals.promql import NotAnswered, PromQLClient, Sample

log = structlog.get_logger()

READ_SECONDS: Final = 10.0
"""Shorter than a signal must last: one sample alone takes nothing out of use."""
FRESH_SECONDS: Final = 180
"""A sample that is older is unknown. Exporters measure every 30 s and are scraped up to once a minute."""
KEPT_SECONDS: Final = 60.0
"""For which an answer of Prometheus counts."""
_NONE: Final = "it answers, and has no sample of {metric}: is the DCGM exporter scraped, and does `match` fit?"


class DCGMMetrics:
    """Reads until cancelled; keeps the last answer."""

    def __init__(self, prometheus: Prometheus, settings: DCGM, changed: Callable[[], None]) -> None:
        """`changed`: called when other GPUs are sick or measured than before."""
        self._prometheus, self._settings, self._changed = prometheus, settings, changed
        self._reading: DCGMReading | None = None
        self._read_at = 0.0
        self._problem: str | None = None

    @property
    def reading(self) -> DCGMReading | None:
        """The last answer; None: there is none, or it is too old."""
        late = time.monotonic() - self._read_at > KEPT_SECONDS
        return None if late else self._reading

    @property
    def problem(self) -> str | None:
        """What keeps metrics away now; None: they come, or nobody has asked yet."""
        return self._problem

    async def run(self) -> None:
        """Until cancelled. A failure is logged once, and the read is repeated."""
        async with PromQLClient(self._prometheus) as client:
            while True:
                await self.step(client)
                await asyncio.sleep(READ_SECONDS)

    async def step(self, client: PromQLClient) -> None:
        """One read."""
        before, asked_at = self.reading, time.monotonic()
        try:
            found = await read(client, self._prometheus, self._settings)
        except NotAnswered as error:
            problem = str(error)
        else:
            problem = None if found.by_uuid or found.by_host else _NONE.format(metric=dcgm.LAST_XID)
            self._reading, self._read_at = found, asked_at
        after, other_problem = self.reading, problem != self._problem
        self._tell(problem)
        same = (before and (before.sick, before.by_host)) == (after and (after.sick, after.by_host))
        if other_problem or not same:
            self._changed()

    def _tell(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            log.warning("no GPU metrics from Prometheus", url=self._prometheus.url, error=problem)
        elif problem is None and self._problem is not None:
            log.info("Prometheus has GPU metrics again")
        self._problem = problem


async def read(client: PromQLClient, prometheus: Prometheus, settings: DCGM) -> DCGMReading:
    """Asks Prometheus. Raises NotAnswered."""
    match = ",".join(part for part in (prometheus.match, settings.match) if part)
    queries = {dcgm.LAST_XID: "", dcgm.XID_COUNT: " > 0", dcgm.DOUBLE_BIT: " > 0", dcgm.REMAP_FAILED: " > 0"}
    queries |= dict.fromkeys(dcgm.CLOCK_EVENTS, " > 0")
    found: list[tuple[str, list[Sample]]] = []
    for metric, bound in queries.items():
        series = f"{metric}{{{match}}}"
        old = f"time() - timestamp({series}) > {FRESH_SECONDS}"
        found.append((metric, await client.query(f"{series}{bound} unless ({old})")))
    return await asyncio.to_thread(_reading, found)  # of a large fleet: not on the event loop


def _reading(found: Iterable[tuple[str, list[Sample]]]) -> DCGMReading:
    return dcgm.reading(DCGMSample(metric, each.labels, each.value) for metric, of in found for each in of)
