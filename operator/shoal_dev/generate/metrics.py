"""The reference page of metrics: whatever the code makes, asked for with nothing behind it.

Collectors are made with stand-ins in place of what they read, and asked for their families; so a metric that is added
anywhere stands on the page without being listed twice.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

import shoal
from shoal.agent.adapters.metrics import Timings
from shoal.controllers.metrics import EventMetrics
from shoal.gateway.metrics import GatewayMetrics

PARTS: Final = ("operator", "gateway", "agent", "ledger", "cache")
_OF_PACKAGE: Final = {"kube": "operator", "controllers": "operator"} | {part: part for part in PARTS}
_SHARED: Final = {
    "net": ("operator", "gateway", "ledger"),
    "metering": ("gateway",),
    "requestlog": ("gateway",),
}
_SUFFIX: Final = {"counter": "_total"}


@dataclass(frozen=True, slots=True, order=True)
class Shown:
    """One metric, as a scrape names it."""

    name: str
    type: str
    labels: tuple[str, ...]
    text: str


class _Nothing:
    """Stands for whatever a collector reads: empty, zero, and callable."""

    def __getattr__(self, name: str) -> "_Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> "_Nothing":
        return self

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0


class _Published(dict[str, object]):
    """What an agent publishes: everything."""

    def get(self, _key: str, _default: object = None) -> Any:
        return 1


_READ: Final[dict[str, Callable[[], object]]] = {
    "disk": lambda: SimpleNamespace(root="/"),
    "published": lambda: _Published,
    "timings": Timings,
}
"""By name of the parameter, where nothing will not do."""
_KNOWN: Final = {"open_rows": 0}
"""Attributes that are not known at first: without them there is no sample."""


def metrics() -> dict[str, list[Shown]]:
    """Part -> what it exports, by name."""
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        package = module.name.split(".")[1]
        if package in (*_OF_PACKAGE, *_SHARED) and ".migrations." not in module.name:
            importlib.import_module(module.name)
    found: dict[str, set[Shown]] = {part: set() for part in PARTS}
    for collector in _made(prometheus_client.REGISTRY):
        if isinstance(collector, MetricWrapperBase):
            for shown in _shown(collector):
                if shown.name.startswith("shoal_"):
                    found["cache" if shown.name.startswith("shoal_cache_") else "operator"].add(shown)
    events = CollectorRegistry()
    nothing: Any = _Nothing()
    EventMetrics(nothing, events, bool, float)
    for part, registry in (("operator", events), ("gateway", GatewayMetrics().registry)):
        for collector in _made(registry):
            found[part].update(_shown(collector))
    for kind in Collector.__subclasses__():
        package = kind.__module__.split(".")[1] if kind.__module__.startswith("shoal.") else ""
        parts = _SHARED.get(package) or ((_OF_PACKAGE[package],) if package in _OF_PACKAGE else ())
        for part in parts:
            found[part].update(_shown(_with_nothing(kind)))
    return {part: sorted(shown) for part, shown in found.items()}


def metrics_reference() -> str:
    """The page's tables."""
    lines: list[str] = []
    for part, shown in metrics().items():
        lines += [f"## {part.capitalize()}", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        for one in shown:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            lines.append(f"| `{one.name}` | {one.type} | {labels} | {one.text} |")
        lines.append("")
    return "\n".join(lines)


def _made(registry: CollectorRegistry) -> list[Any]:
    return list(getattr(registry, "_collector_to_names"))  # noqa: B009 - the library has no public way to ask


def _with_nothing(kind: type[Collector]) -> Any:
    parameters = list(inspect.signature(kind).parameters.values())
    made = kind(*[_READ.get(p.name, _Nothing)() for p in parameters if p.default is p.empty])
    for name in _KNOWN.keys() & vars(made).keys():
        setattr(made, name, _KNOWN[name])
    return made


def _shown(collector: Any) -> Iterator[Shown]:
    families = collector.describe() if hasattr(collector, "describe") else collector.collect()
    for family in families:
        labels: tuple[str, ...] = tuple(getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ()))
        text = family.documentation.replace("|", "\\|")
        yield Shown(family.name + _SUFFIX.get(family.type, ""), family.type, labels, text)
