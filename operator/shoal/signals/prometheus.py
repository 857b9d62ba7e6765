"""Prometheus as the source of load and demand: samples of what agents and gateways say in their streams.

Two instant queries bring everything. A sample is as old as its scrape: an instant query alone would date it to now and
hide up to five minutes (Prometheus' look-back), so `timestamp()` of each target's info sample is asked first, and the
values for that same moment second. Ages are measured by the Prometheus server's clock alone, so that clocks which
differ do no harm; where a sample's time is compared with a pod's, the difference of the clocks is taken off. What is
older than three scrapes is unknown, as is what is not a number, and everything while Prometheus does not answer.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from shoal.api.config import Prometheus
from shoal.core import facts
from shoal.core.scaling import Demand, Load
from shoal.signals.promql import NotAnswered, PromQLClient, Sample

log = structlog.get_logger()

STALE_SCRAPES: Final = 3
"""Scrapes after which a sample is unknown."""
RATE_SCRAPES: Final = 4
"""Scrapes that a rate is taken over."""

Changed = Callable[[str | None, bool], None]
"""As in `live.py`: the uid of a Model of which something is new, or None for every one; worth a decision at once?"""

_REPLICA: Final = "shoal_replica_"
_DEMAND: Final = "shoal_demand_"
_LOAD_FIELDS: Final = {
    "running": "running",
    "max_running": "max_running",
    "waiting": "waiting",
    "waiting_tokens": "waiting_tokens",
    "kv_tokens_used": "kv_tokens_used",
    "kv_tokens_capacity": "kv_tokens_total",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
}
_DEMAND_NUMBERS: Final = frozenset({"arrivals_total", "in_flight", "held", "held_tokens"})
_SAME_TARGET: Final = ("job", "instance")
_EMPTY: Final = (
    "it answers, and has no samples of agents and gateways: are they scraped (`podMonitor.enabled`, "
    "`serviceMonitor.enabled`), and does `operator.signals.prometheus.match` fit?"
)
_NOTHING: Final = Demand(0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class ScrapeTarget:
    """An agent or a gateway at its last scrape."""

    at: float
    """Prometheus' time of it, seconds since 1970."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of its info sample: boot, engine_boot, phase."""
    values: dict[str, float] = field(default_factory=dict[str, float])
    """Of an agent, by name without prefix."""
    models: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Of a gateway, by uid of the Model."""
    rates: dict[str, float] = field(default_factory=dict[str, float])
    """Per second over the last scrapes: of an agent `tokens`, of a gateway by uid of the Model."""


@dataclass(frozen=True, slots=True)
class ScrapedReading:
    """One answer of Prometheus."""

    at: float
    """Its time."""
    read_at: float
    """time.monotonic() before it was asked: nothing in it is younger."""
    skew: float
    """Seconds that its clock is ahead of this process's, or more: the way of the answer is in it."""
    targets: Mapping[tuple[str, str], ScrapeTarget]
    """By namespace and name of the pod."""


class PrometheusSignals:
    """Reads every third of a scrape, until cancelled. The same questions as to `listen.Listener`.

    `pods` gives the engine pods and gateways that there are: samples name pods, decisions their uids. A sample from
    before a pod's creation is that of another pod which had its name.
    """

    def __init__(self, settings: Prometheus, pods: Callable[[], Iterable[facts.Pod]], changed: Changed) -> None:
        self._settings, self._pods, self._changed = settings, pods, changed
        self._reading: ScrapedReading | None = None
        self._targets: dict[str, ScrapeTarget] = {}
        """By the pod's uid."""
        self._held: set[str] = set()
        """Models of which requests are held."""
        self.problem: str | None = None
        """What keeps signals away now."""
        self.failures = 0

    async def run(self) -> None:
        """Reads until cancelled. A failure is logged once, and the read is repeated."""
        async with PromQLClient(self._settings) as client:
            while True:
                try:
                    reading = await read(client, self._settings)
                except NotAnswered as error:
                    self.failures += 1
                    self._set_problem(str(error))
                else:
                    self._set_problem(_EMPTY if not reading.targets and any(True for _ in self._pods()) else None)
                    self.take(reading)
                await asyncio.sleep(self._settings.scrape_seconds / 3)

    def _set_problem(self, problem: str | None) -> None:
        """What keeps signals away, once; None: they come."""
        if problem == self.problem:
            return
        self.problem = problem
        if problem is not None:
            log.warning("no signals from Prometheus", url=self._settings.url, error=problem)
        else:
            log.info("Prometheus answers again")

    def take(self, reading: ScrapedReading) -> None:
        """Takes an answer and says what is new."""
        before, self._reading = self._targets, reading
        self._targets = {}
        fresh: set[str] = set()
        for pod in self._pods():
            target = reading.targets.get((pod.namespace, pod.name))
            # With the answer's way in the skew, a sample seems older than it is, and never younger.
            if target is None or (pod.created is not None and target.at - reading.skew < pod.created.timestamp()):
                continue
            self._targets[pod.uid] = target
            if pod.uid not in before or before[pod.uid].at != target.at:
                fresh.update([pod.model_uid] if pod.model_uid else target.models)
        held = {
            model
            for target in self._targets.values()
            for model, values in target.models.items()
            if values.get("held", 0) > 0
        }
        begun, self._held = held - self._held, held
        for model in fresh:
            self._changed(model, model in begun)
        if before.keys() != self._targets.keys():
            self._changed(None, False)

    # --- what decisions read ------------------------------------------------------------------------------------------

    def load(self, pod_uid: str) -> Load | None:
        """What the agent said at its last scrape; None when that is too old."""
        target = self._fresh(pod_uid)
        if target is None:
            return None
        counts = {key: int(target.values[name]) for name, key in _LOAD_FIELDS.items() if name in target.values}
        boot, phase = target.labels.get("engine_boot") or None, target.labels.get("phase") or None
        return Load(boot, phase, **counts, tokens_per_step=target.values.get("tokens_per_step"))

    def demand(self, gateway_uid: str, model_uid: str) -> Demand | None:
        """What a gateway had of a Model at its last scrape; None when that is too old."""
        target = self._fresh(gateway_uid)
        if target is None:
            return None
        values = target.models.get(model_uid)
        if values is None:
            return _NOTHING
        if not values.keys() >= _DEMAND_NUMBERS:
            return None  # some of it is no number, or was dropped on its way: that is not zero
        held, oldest = int(values["held"]), values.get("oldest_seconds", 0.0)
        return Demand(
            arrivals=int(values["arrivals_total"]),
            in_flight=int(values["in_flight"]),
            held=held,
            held_tokens=int(values["held_tokens"]),
            oldest_seconds=oldest + self._age(target) if held else 0.0,
        )

    def boot(self, gateway_uid: str) -> str | None:
        """The gateway's boot id; None when its last scrape is too old."""
        target = self._fresh(gateway_uid)
        return target.labels.get("boot") or None if target else None

    # --- for people ---------------------------------------------------------------------------------------------------

    def age(self, uid: str) -> float | None:
        """Seconds since the last scrape of a pod of either kind; None when that is too old."""
        target = self._fresh(uid)
        return self._age(target) if target else None

    def tokens_per_second(self, pod_uid: str) -> float | None:
        """Prompt and generated tokens per second of a replica over the last scrapes; None: not known."""
        target = self._fresh(pod_uid)
        return target.rates.get("tokens") if target else None

    def arrivals_per_second(self, model_uid: str) -> float | None:
        """Accepted requests per second over the last scrapes at the gateways that are fresh; None: not known."""
        gateways = [t for t in self._targets.values() if "phase" not in t.labels and self._is_fresh(t)]
        rates = [t.rates[model_uid] for t in gateways if model_uid in t.rates]
        return sum(rates) if rates else (0.0 if gateways else None)

    def _fresh(self, uid: str) -> ScrapeTarget | None:
        target = self._targets.get(uid)
        return target if target is not None and self._is_fresh(target) else None

    def _is_fresh(self, target: ScrapeTarget) -> bool:
        return self._age(target) <= STALE_SCRAPES * self._settings.scrape_seconds

    def _age(self, target: ScrapeTarget) -> float:
        assert self._reading is not None  # noqa: S101 - targets come with a reading
        return max(0.0, self._reading.at - target.at) + time.monotonic() - self._reading.read_at


async def read(client: PromQLClient, settings: Prometheus) -> ScrapedReading:
    """Asks Prometheus. Raises NotAnswered."""
    match, started = f",{settings.match}" if settings.match else "", time.monotonic()
    wall = time.time()
    scrapes = await client.query(f'timestamp({{__name__=~"{_REPLICA}info|{_DEMAND}info"{match}}})')
    if not scrapes:
        return ScrapedReading(wall, started, 0.0, {})
    at = scrapes[-1].at
    braces = f"{{{settings.match}}}" if settings.match else ""
    window = f"[{RATE_SCRAPES * settings.scrape_seconds}s]"
    prompt, generated = (f"rate({_REPLICA}{kind}_tokens_total{braces}{window})" for kind in ("prompt", "generation"))
    values = await client.query(f'{{__name__=~"({_REPLICA}|{_DEMAND}).+"{match}}}', at=at)
    arrivals = await client.query(f"rate({_DEMAND}arrivals_total{braces}{window})", at=at)
    tokens = await client.query(f"{prompt} + {generated}", at=at)
    # Of a large fleet: not on the event loop.
    targets = await asyncio.to_thread(_targets, scrapes, values, arrivals, tokens)
    return ScrapedReading(at, started, at - wall, targets)


def _targets(
    scrapes: Iterable[Sample], values: Iterable[Sample], arrivals: Iterable[Sample], tokens: Iterable[Sample]
) -> dict[tuple[str, str], ScrapeTarget]:
    targets: dict[tuple[str, str], ScrapeTarget] = {}
    for labels, _, stamp in scrapes:
        pod = labels.get("namespace", ""), labels.get("pod", "")
        known = targets.get(pod)
        # After a restart two series with other boots are there for a while: the last one counts.
        if known is None or stamp > known.at:
            targets[pod] = ScrapeTarget(stamp, labels)
    for labels, _, value in values:
        _place(targets, labels, value)
    for labels, _, rate in arrivals:
        if (target := _target(targets, labels)) is not None and math.isfinite(rate):
            target.rates[labels.get("model_uid", "")] = rate
    for labels, _, rate in tokens:
        if (target := _target(targets, labels)) is not None and math.isfinite(rate):
            target.rates["tokens"] = rate
    return targets


def _place(targets: Mapping[tuple[str, str], ScrapeTarget], labels: Mapping[str, str], value: float) -> None:
    target, name = _target(targets, labels), labels.get("__name__", "")
    if target is None or not math.isfinite(value):
        return
    if name.startswith(_REPLICA):
        target.values[name.removeprefix(_REPLICA)] = value
    elif "model_uid" in labels:
        target.models.setdefault(labels["model_uid"], {})[name.removeprefix(_DEMAND)] = value


def _target(targets: Mapping[tuple[str, str], ScrapeTarget], labels: Mapping[str, str]) -> ScrapeTarget | None:
    target = targets.get((labels.get("namespace", ""), labels.get("pod", "")))
    # A pod that is scraped twice, by two jobs: the other one's samples may be older than this one's.
    if target is None or any(labels.get(name) != target.labels.get(name) for name in _SAME_TARGET):
        return None
    return target
