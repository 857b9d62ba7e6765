"""Collects what the advice is made of: requests from the gateways, the longer time's tokens from the ledger, sizes and
costs from the API server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pydantic import ValidationError

from shoal.api import names
from shoal.api.billing import UsagePage
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.api.model import ModelStatus
from shoal.api.traffic import ModelTraffic, TrafficPage
from shoal.cli.client import MissingRight, ServiceError
from shoal.cli.options import Installation
from shoal.cli.services import GatewayClient, LedgerClient
from shoal.core import quantity
from shoal.core.advice.facts import ClassFact
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError
from shoal.kube.resources import GPUCLASSES, MODELS

_HOUR: Final = timedelta(hours=1)
_PAGE: Final = "5000"


class TrafficClient(GatewayClient):
    """Client of the gateways for facts of requests."""

    def _missing_right(self, error: KubeError) -> MissingRight:
        return MissingRight(
            error.message,
            f"This needs the right to get the Secret {names.key_secret('logs')}, to list pods, and to get pods/proxy "
            f"in namespace {self._namespace}.",
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of one Model."""

    model: str
    """namespace/name."""
    parts: tuple[ModelTraffic, ...]
    since: float
    """Seconds since 1970: from then on every gateway has kept requests."""
    classes: Mapping[str, ClassFact]
    prompt_tokens_per_day: float | None
    """As the ledger counted them; None: unknown."""


@dataclass(frozen=True, slots=True)
class Gathered:
    models: tuple[ModelFacts, ...]
    notes: tuple[str, ...]
    """What could not be read."""


async def gather(
    client: KubeClient,
    installation: Installation,
    namespace: str,
    name: str | None,
    *,
    since: timedelta,
    requests: int,
    now: datetime,
) -> Gathered:
    """`name` None: all Models of the namespace. Raises KubeError, ServiceError."""
    if name is not None:
        raw = [await client.get(MODELS, name, namespace)]  # the API server's message names a misspelt Model
    else:
        raw = [model async for model in client.list(MODELS, namespace=namespace)]
    notes: list[str] = []
    costs = await _costs(client, notes)
    gateways = TrafficClient(client, installation.namespace, installation.url, ca_file=installation.ca_file)
    page = await gateways.get(
        names.TRAFFIC_PATH,
        {"namespace": namespace, "model": name, "since": str((now - since).timestamp()), "requests": str(requests)},
        TrafficPage,
    )
    notes += [f"gateway {each.gateway} is missing: {each.reason}" for each in page.missing]
    ledger = LedgerClient(client, installation.namespace)
    tokens = await _tokens_per_day(ledger, namespace, since, now, notes) if page.models else dict[str, float]()
    parts: dict[str, list[ModelTraffic]] = {}
    for part in page.models:
        parts.setdefault(part.model, []).append(part)
    found: list[ModelFacts] = []
    for model in raw:
        metadata: JsonObject = model.get("metadata") or {}
        key = f"{namespace}/{metadata.get('name')}"
        if key in parts or name is not None:
            found.append(
                ModelFacts(key, tuple(parts.get(key, ())), page.since, _classes(model, costs), tokens.get(key))
            )
    return Gathered(tuple(found), tuple(notes))


def _classes(raw: JsonObject, costs: Mapping[str, GPUClass]) -> Mapping[str, ClassFact]:
    try:
        status = ModelStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        return {}
    found: dict[str, ClassFact] = {}
    for variant in status.variants:
        cost = costs[variant.gpu_class].spec.hourly_cost if variant.gpu_class in costs else None
        tokens = variant.kv_tokens_per_replica
        found[variant.gpu_class] = ClassFact(
            variant.gpus_per_replica,
            None if tokens is None else tokens.predicted if tokens.engine is None else tokens.engine,
            None if cost is None else quantity.parse(cost.amount),
            None if cost is None else cost.currency,
        )
    return found


async def _costs(client: KubeClient, notes: list[str]) -> Mapping[str, GPUClass]:
    found: dict[str, GPUClass] = {}
    try:
        async for raw in client.list(GPUCLASSES):
            try:
                one = GPUClass.model_validate(raw)
            except ValidationError:
                continue
            found[one.metadata.name] = one
    except Forbidden as error:
        notes.append(f"costs are unknown: {error.message}")
    return found


async def _tokens_per_day(
    ledger: LedgerClient, namespace: str, since: timedelta, now: datetime, notes: list[str]
) -> Mapping[str, float]:
    """Prompt tokens by Model. The ledger sums by whole hours."""
    end = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    start = (now - since).astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    if end - start < _HOUR:
        return {}
    query: dict[str, str | Sequence[str] | None] = {
        "namespace": namespace,
        "by": "model",
        "from": start.isoformat().replace("+00:00", "Z"),
        "to": end.isoformat().replace("+00:00", "Z"),
        "limit": _PAGE,
    }
    try:
        page = await ledger.get(names.USAGE_PATH, query, UsagePage)
    except (ServiceError, KubeError) as error:
        notes.append(f"amounts a day are those of the gateways' requests, because the ledger did not answer: {error}")
        return {}
    days = (end - start) / timedelta(days=1)
    return {row.model: row.input_tokens / days for row in page.rows if row.model is not None}
