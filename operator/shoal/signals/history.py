"""What replicas could do in the past, from a Prometheus: an operator that starts anew need not learn it again.

The rate that counts is that of a replica in whose engine requests waited: its limit. Without such minutes nothing is
said, for the rate of a replica with little to do says nothing of what it can.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Final

import structlog

from shoal.api.config import Prometheus
from shoal.core.scaling.learn import GENERATED_WEIGHT
from shoal.signals.promql import NotAnswered, PromQLClient

log = structlog.get_logger()

READ_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 30.0
PAST: Final = "6h"
"""How far back."""
STEP: Final = "1m"
WINDOW_SECONDS: Final = 60
"""Over which a rate is taken; requests must have waited all the while."""
_LEAST_SAMPLES: Final = 0.8
"""Share of its samples that a window must have: a scrape may fail."""

Rates = Mapping[tuple[str, str, str], float]
"""(namespace, Model, GPU class) -> work per second of one replica (`learn.work`)."""


class History:
    """Reads every ten minutes until cancelled; keeps the last answer."""

    def __init__(self, settings: Prometheus) -> None:
        self._settings = settings
        self._rates: Rates = {}

    async def run(self) -> None:
        """Reads until cancelled; what fails is logged and tried again."""
        async with PromQLClient(self._settings) as client:
            while True:
                pause = READ_SECONDS
                try:
                    self._rates = await read(client, self._settings)
                except NotAnswered as error:
                    log.warning("no history from Prometheus", url=self._settings.url, error=str(error))
                    pause = RETRY_SECONDS
                await asyncio.sleep(pause)

    def work_rate(self, namespace: str, model: str, gpu_class: str) -> float | None:
        """Work per second of one replica while requests waited, the mean of the last hours; None: not known."""
        return self._rates.get((namespace, model, gpu_class))


async def read(client: PromQLClient, settings: Prometheus) -> Rates:
    """Asks Prometheus. Raises NotAnswered. The names of Model and GPU class are labels of the pod, which the
    chart's PodMonitor puts on its samples."""
    braces = f"{{{settings.match}}}" if settings.match else ""
    seconds = max(WINDOW_SECONDS, 4 * settings.scrape_seconds)
    window, enough = f"[{seconds}s]", int(_LEAST_SAMPLES * seconds / settings.scrape_seconds)
    prompt, generated = (
        f"rate(shoal_replica_{kind}_tokens_total{braces}{window})" for kind in ("prompt", "generation")
    )
    # Waiting all the while: a replica whose queue comes and goes, or that has just begun, does less than it can.
    waiting = f"shoal_replica_waiting{braces}{window}"
    busy = f"(min_over_time({waiting}) > 0) and (count_over_time({waiting}) >= {enough})"
    by = "namespace, shoal_dev_model, shoal_dev_gpu_class"
    work = f"({prompt} + {GENERATED_WEIGHT:g} * {generated}) and {busy}"
    found = await client.query(f"avg by ({by}) (avg_over_time(({work})[{PAST}:{STEP}]))")
    rates: dict[tuple[str, str, str], float] = {}
    for labels, _, rate in found:
        model, gpu_class = labels.get("shoal_dev_model"), labels.get("shoal_dev_gpu_class")
        if model and gpu_class and 0 < rate < math.inf:
            rates[labels.get("namespace", ""), model, gpu_class] = rate
    return rates
