"""Metrics per tenant, for dashboards and alerts; bills come from the ledger, never from here.

The label is the name of a Tenant object, which an administrator made, and never a value that a client sends. Up to a
bound there is one per Tenant; further ones share the label "other".
"""

from collections.abc import Iterable
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.metering.meter import Meter, Units
from shoal.metering.record import Outcome

_OUTCOMES: Final[tuple[Outcome, ...]] = tuple(o for o in get_args(Outcome) if o != "cut")
"""A killed gateway counts nothing; its successor writes the `cut` record."""
_REFUSALS: Final = ("rate_limit_exceeded", "insufficient_quota")
_KINDS: Final = ("input", "cached", "output")
UNITS: Final = ("documents", "images", "audio_seconds")
"""Values of the label `unit`."""


class UnitCounts:
    """Units beside tokens since the gateway's start."""

    __slots__ = ("_audio_ms", "_documents", "_images")

    def __init__(self) -> None:
        self._documents = self._images = self._audio_ms = 0

    def __bool__(self) -> bool:
        return bool(self._documents or self._images or self._audio_ms)

    def add(self, units: Units) -> None:
        self._documents += units.documents
        self._images += units.images
        self._audio_ms += units.audio_ms

    def by_name(self) -> Iterable[tuple[str, float]]:
        return zip(UNITS, (self._documents, self._images, self._audio_ms / 1000), strict=True)


class _Tenant:
    """One tenant's counts since the gateway's start."""

    __slots__ = ("cached", "input", "outcomes", "output", "refused", "units")

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = dict.fromkeys(_OUTCOMES, 0)
        self.refused: dict[str, int] = dict.fromkeys(_REFUSALS, 0)
        self.input = self.cached = self.output = 0
        self.units = UnitCounts()


class TenantMetrics(Collector):
    """The event loop writes; a scrape reads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, _Tenant] = {}

    def known(self, names: Iterable[str]) -> None:
        """Adds series of the existing tenants before their first request, because `increase()` ignores a series' first
        value."""
        for name in names:
            self._of(name)

    def observe(self, meter: Meter, counts: dict[str, int | None]) -> None:
        """An accepted request has ended."""
        tenant = self._of(meter.tenant)
        tenant.outcomes[meter.outcome or "failed"] += 1
        tenant.input += counts["inputTokens"] or 0
        tenant.cached += counts["cachedTokens"] or 0
        tenant.output += counts["outputTokens"] or 0

    def read(self, tenant: str, units: Units) -> None:
        """Engines have read units beside tokens."""
        self._of(tenant).units.add(units)

    def refused(self, tenant: str, reason: str) -> None:
        """A limit or the budget refused a request. `reason` is the error's code."""
        refused = self._of(tenant).refused
        refused[reason] = refused.get(reason, 0) + 1

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "shoal_tenant_requests", "Accepted requests of a tenant by outcome.", labels=["tenant", "outcome"]
        )
        tokens = CounterMetricFamily(
            "shoal_tenant_tokens",
            "Tokens of a tenant, as engines counted them, otherwise estimated. Cached tokens are part of the input.",
            labels=["tenant", "gen_ai_token_type"],
        )
        units = CounterMetricFamily(
            "shoal_tenant_units",
            "Documents, images and seconds of audio of a tenant that engines have read.",
            labels=["tenant", "unit"],
        )
        refused = CounterMetricFamily(
            "shoal_tenant_refused",
            "Requests of a tenant that its limits or budget, or the limits of a route, refused, by error code.",
            labels=["tenant", "reason"],
        )
        for name, tenant in self._tenants.items():
            for outcome, count in tenant.outcomes.items():
                requests.add_metric([name, outcome], count)
            for kind, count in zip(_KINDS, (tenant.input, tenant.cached, tenant.output), strict=True):
                tokens.add_metric([name, kind], count)
            for unit, count in tenant.units.by_name():
                units.add_metric([name, unit], count)
            for reason, count in tenant.refused.items():
                refused.add_metric([name, reason], count)
        return (requests, tokens, units, refused)

    def _of(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            if len(self._tenants) >= self._most:
                name = "other"
            found = self._tenants.setdefault(name, _Tenant())
        return found
