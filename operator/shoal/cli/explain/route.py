"""`shoal explain route NAME`: where requests for a ModelRoute go, by the gateways' own functions."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.api import reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import CustomResource
from shoal.api.model import Model
from shoal.api.modelroute import ExternalTargetStatus, ModelRoute
from shoal.api.routestats import ExternalStats, RoutePrices, RouteStatsPage
from shoal.api.tenant import Tenant, TenantLimits
from shoal.cli.client import ServiceError, not_found
from shoal.cli.output import console, emit
from shoal.cli.scaling.toproutes import RouteStatsClient
from shoal.core.access import KeyIdentity
from shoal.core.rating import money
from shoal.core.routing.consent import consent_of, granted_models
from shoal.core.routing.cost import no_effect
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.resolve import served_model
from shoal.core.routing.resolveadapters import declared_adapter, declared_pool
from shoal.core.routing.routeexplain import EffectiveLimits, RouteExplanation, effective_limits, explain_route
from shoal.core.routing.routes import DeclaredRoute, RequestFacts, TargetRef, declared_route, permits, route_consent_of
from shoal.engine.wires import differences_of
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.resources import LORA_ADAPTERS, LORA_POOLS, MODEL_ROUTES, MODELS, TENANTS, Resource

K = TypeVar("K", bound=CustomResource)

COLUMNS: Final = (
    "rule",
    "role",
    "kind",
    "target",
    "sharePercent",
    "maxOutputTokens",
    "maxOutputTokensOf",
    "requestSeconds",
    "requestSecondsOf",
    "note",
)


@dataclass(frozen=True, slots=True)
class RouteQuestion:
    """A request as the options describe it."""

    name: str
    namespace: str
    tenant: str | None
    endpoint: str
    headers: tuple[str, ...]
    """`name: value`."""
    size: int
    installation: str = "shoal-system"
    """Shoal's namespace."""


@dataclass(frozen=True, slots=True)
class _Cluster:
    declared: ModelRoute
    route: DeclaredRoute
    index: ModelIndex
    models: dict[str, Model]
    adapters: dict[str, LoRAAdapter]
    identity: KeyIdentity | None
    """None: no tenant was named, so every grant is taken as given."""
    gateways: RouteStatsPage | None = None
    """What gateways know of external targets and prices; None: the route needs neither."""


def run(question: RouteQuestion, output: str, *, kubeconfig: str | None, context: str | None) -> int:
    """Prints the explanation; returns the exit code: 0 if the request has a target. Raises click.ClickException."""
    try:
        cluster = asyncio.run(_read(question, kubeconfig, context))
    except NotFound as error:
        raise click.ClickException(not_found(error)) from None
    except (KubeError, OSError, ValueError) as error:
        raise click.ClickException(f"the cluster cannot be read: {error}") from None
    headers = dict(_header(text) for text in question.headers)
    facts = RequestFacts(question.tenant or "", question.endpoint, headers, question.size)
    found = explain_route(
        cluster.route,
        facts,
        lambda ref: _why_not(cluster, ref),
        lambda ref: _pause_of(cluster, ref),
        lambda ref: _lack_of(cluster, ref),
    )
    rows = [
        {
            "rule": share.rule,
            "role": share.role,
            "kind": share.ref.kind,
            "target": share.ref.key,
            "sharePercent": round(share.percent, 3),
            **_limit_columns(_limits(cluster, share.ref)),
            "note": share.note or None,
        }
        for share in found.shares
    ]
    shown: dict[str, Any] = {"route": cluster.route.key, "rule": found.rule, "targets": rows}
    if cluster.route.tenant_limits is not None:
        shown["eachTenant"] = cluster.route.tenant_limits.model_dump(exclude_none=True)
    if cluster.gateways is not None:
        shown["externalTargets"] = [
            one.model_dump(mode="json", by_alias=True)
            for one in cluster.gateways.externals
            if one.target in cluster.route.externals
        ]
        shown["missing"] = list(cluster.gateways.missing)
        if found.cost is not None:
            shown["byCost"] = {
                "above": None if found.cost.above is None else money.exact(found.cost.above),
                "currency": found.cost.currency or None,
                "budgetPercent": found.cost.budget_percent,
                "gateways": [
                    {"gateway": one.gateway, "currency": one.currency, "noEffect": _no_effect(found, one) or None}
                    for one in _prices(cluster, cluster.gateways)
                ],
            }
    if not emit(output, shown, rows, COLUMNS):
        _print(cluster, question, found)
        if found.rule is not None and not _served(found):
            # A gateway then takes a target that lacks something, so that the error says so.
            lacking = explain_route(cluster.route, facts, lambda ref: _refusal(cluster, ref))
            error = "external_unavailable" if _served(lacking) else "no_route_target"
            console().print(f"No target can be used: the request gets 503 {error}.")
    return 0 if _served(found) else 1


async def _read(question: RouteQuestion, kubeconfig: str | None, context: str | None) -> _Cluster:
    client = await KubeClient.from_environment(kubeconfig=kubeconfig, context=context)
    try:
        declared = ModelRoute.model_validate(await client.get(MODEL_ROUTES, question.name, question.namespace))
        route = declared_route(declared)
        models = {one.key: one for one in await _all(client, MODELS, Model)}
        adapters = {one.key: one for one in await _all(client, LORA_ADAPTERS, LoRAAdapter)}
        index = ModelIndex()
        index.set_models({key: served_model(one, differences_of(one.spec.engine.type)) for key, one in models.items()})
        index.set_pools({one.key: declared_pool(one) for one in await _all(client, LORA_POOLS, LoRAPool)})
        for key, adapter in adapters.items():
            index.put(key, declared_adapter(adapter))
        index.put_route(route.key, route)
        identity = None
        if question.tenant is not None:
            spec = Tenant.model_validate(await client.get(TENANTS, question.tenant)).spec
            grants, consent = granted_models(spec), consent_of(spec)
            identity = KeyIdentity(
                question.tenant, None, "", None, False, False, grants, consent, routes=route_consent_of(spec)
            )
        asks = route.externals or any(rule.cost is not None for rule in route.rules)
        gateways = await _asked(client, question) if asks else None
        return _Cluster(declared, route, index, models, adapters, identity, gateways)
    finally:
        await client.close()


async def _asked(client: KubeClient, question: RouteQuestion) -> RouteStatsPage:
    """What the gateways know. Where they cannot be asked, `missing` says why."""
    try:
        return await RouteStatsClient(client, question.installation).page(question.namespace)
    except (ServiceError, KubeError) as error:
        return RouteStatsPage(missing=(f"unknown: {error}",))


async def _all(client: KubeClient, resource: Resource, kind: type[K]) -> list[K]:
    """All objects of a kind that this version understands, as a gateway reads them."""
    found: list[K] = []
    async for raw in client.list(resource):
        try:
            one = kind.model_validate(raw)
        except ValidationError:
            continue
        if one.metadata.deletion_timestamp is None:
            found.append(one)
    return found


def _why_not(cluster: _Cluster, ref: TargetRef) -> str:
    """Why a target gets nothing; "": it gets its share."""
    refusal = _refusal(cluster, ref)
    return _unused_because(cluster, ref.key) if ref.kind == "External" and not refusal else refusal


def _refusal(cluster: _Cluster, ref: TargetRef) -> str:
    """Why a target cannot be used by the tenant, whatever gateways lack; "": it can."""
    if ref.kind == "External":
        if ref.key not in cluster.route.externals:
            return "it is not in spec.externalTargets"
        identity = cluster.identity
        if identity is not None and not identity.routes.covers(cluster.route.key):
            return f"Tenant {identity.tenant} does not grant the route in spec.routes"
        return ""
    one = cluster.models.get(ref.key) if ref.kind == "Model" else cluster.adapters.get(ref.key)
    if one is None:
        return "it does not exist"
    if not permits(ref.namespace, frozenset(one.spec.route_namespaces), cluster.route.namespace):
        return f"it does not list the namespace {cluster.route.namespace} in spec.routeNamespaces"
    if cluster.identity is None:
        return ""
    if cluster.index.target(cluster.route, ref, cluster.identity) is not None:
        return ""
    unserved = cluster.index.why_not(ref, cluster.identity)
    return (
        f"it cannot be served now: {unserved.reason}"
        if unserved
        else f"Tenant {cluster.identity.tenant} may not use it"
    )


def _unused_because(cluster: _Cluster, target: str) -> str:
    """Why no gateway uses an external target; "": one does, or that is not known."""
    known = _at_gateways(cluster, target)
    used = any(one.state != "Unused" for one in known)
    missing = next(
        (one for one in _unused(cluster.declared) or () if cluster.declared.external_key(one.name) == target), None
    )
    # Until the operator has read its Secret, gateways know better whether they have its key.
    if missing is not None and not (used and missing.reason == reasons.PENDING):
        return f"{missing.reason}: {missing.message}"
    if not known or used or (cluster.gateways is not None and cluster.gateways.missing):
        return ""
    return f"no gateway uses it: {_lacks(known)}"


def _lack_of(cluster: _Cluster, ref: TargetRef) -> str:
    """How many gateways do not use an external target, and why; "": none."""
    if ref.kind != "External" or ref.key not in cluster.route.externals:
        return ""
    known = _at_gateways(cluster, ref.key)
    unused = [one for one in known if one.state == "Unused"]
    return f"is not used at {len(unused)} {_of(known)} ({_lacks(unused)})" if unused else ""


def _lacks(unused: list[ExternalStats]) -> str:
    """What gateways lack that do not use a target."""
    return ", ".join(sorted({one.reason for one in unused if one.reason})) or "the gateways do not say why"


def _of(known: list[ExternalStats]) -> str:
    return f"of {len(known)} {'gateway' if len(known) == 1 else 'gateways'}"


def _at_gateways(cluster: _Cluster, target: str) -> list[ExternalStats]:
    """What each gateway that answered knows of an external target."""
    return [] if cluster.gateways is None else [one for one in cluster.gateways.externals if one.target == target]


def _is_full(route: DeclaredRoute, stats: ExternalStats) -> bool:
    """Whether an external target has as many requests of the gateway as `maxConcurrentRequests` allows."""
    external = route.externals[stats.target].external
    return external is not None and stats.running >= external.most


def _pause_of(cluster: _Cluster, ref: TargetRef) -> str:
    """At how many gateways an external target gets no requests now, and why; "": at none."""
    if ref.kind != "External" or ref.key not in cluster.route.externals:
        return ""
    known = _at_gateways(cluster, ref.key)
    resting = sum(one.rests for one in known)
    full = sum(not one.rests and _is_full(cluster.route, one) for one in known)
    parts = [f"rests at {resting} {_of(known)}"] if resting else []
    if full:
        parts.append(f"has as many requests as maxConcurrentRequests allows at {full} {_of(known)}")
    return " and ".join(parts)


def _limits(cluster: _Cluster, ref: TargetRef) -> EffectiveLimits:
    return effective_limits(cluster.index.limited_target(cluster.route, ref))


def _limit_columns(limits: EffectiveLimits) -> dict[str, Any]:
    return {
        "maxOutputTokens": limits.max_output_tokens,
        "maxOutputTokensOf": limits.max_output_tokens_of or None,
        "requestSeconds": limits.request_seconds,
        "requestSecondsOf": limits.request_seconds_of or None,
    }


def _of_each_tenant(limits: TenantLimits) -> str:
    amounts = (
        (limits.requests_per_minute, "requests per minute"),
        (limits.tokens_per_minute, "tokens per minute"),
        (limits.concurrent_requests, "requests at a time"),
    )
    return ", ".join(f"{amount} {of}" for amount, of in amounts if amount is not None)


def _unused(route: ModelRoute) -> tuple[ExternalTargetStatus, ...] | None:
    """The external targets that gateways do not use; None: the operator has not looked at this version of the route."""
    status = route.status
    if status is None or status.observed_generation != route.metadata.generation:
        return None
    return status.external_targets


def _print_externals(route: DeclaredRoute, page: RouteStatsPage, out: Console) -> None:
    table = Table("EXTERNAL TARGET", "GATEWAY", "STATE", "LAST", box=None, pad_edge=False)
    for one in page.externals:
        if one.target in route.externals:
            state = f"{one.state}, rests" if one.rests else one.state
            state += ", full" if _is_full(route, one) else ""
            ago = "" if one.seconds_ago is None else f"{one.seconds_ago:.0f} s ago"
            last = f"{one.reason} {ago}".strip() if one.reason else ago
            table.add_row(one.target, one.gateway, state, escape(last))
    if table.row_count:
        out.print()
        out.print(table)
    about = "External targets" if route.externals else "Prices"
    for missing in page.missing:
        out.print(f"{about} at gateways: {escape(missing)}")


def _prices(cluster: _Cluster, page: RouteStatsPage) -> list[RoutePrices]:
    return [one for one in page.prices if one.route == cluster.route.key]


def _no_effect(found: RouteExplanation, known: RoutePrices) -> str:
    if found.cost is None:
        return ""
    return no_effect(found.cost, known.currency, (each for each in known.unpriced if each in found.targets))


def _print_costs(cluster: _Cluster, found: RouteExplanation, page: RouteStatsPage, out: Console) -> None:
    if (conditions := found.cost) is None:
        return
    goes = "goes to the first fallback that is cheaper for it and has a replica."
    out.print()
    if conditions.above is not None:
        out.print(f"A request that may cost more than {conditions.amount} {goes}")
    if conditions.budget_percent is not None:
        out.print(f"From {conditions.budget_percent} % of its Tenant's budget on, a request {goes}")
    for one in _prices(cluster, page):
        if problem := _no_effect(found, one):
            out.print(f"At {escape(one.gateway)}: {escape(problem)}.")
        else:
            out.print(f"At {escape(one.gateway)}: all of these targets have a price in {one.currency}.")


def _header(text: str) -> tuple[bytes, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f"--header {text!r}: write 'name: value'")
    # The bytes as the terminal gave them, also where they are no UTF-8.
    return name.strip().lower().encode(errors="surrogateescape"), value.strip().encode(errors="surrogateescape")


def _served(found: RouteExplanation) -> bool:
    return any(share.percent and share.role != "mirror" for share in found.shares)


def _print(cluster: _Cluster, question: RouteQuestion, found: RouteExplanation) -> None:
    out, identity, route = console(), cluster.identity, cluster.route
    if identity is not None and all(
        cluster.index.meaning(name, identity) != route for name in (*route.claims, route.key)
    ):
        out.print(
            f"For Tenant {escape(identity.tenant)} no name means this route: docs/modelroutes.md, Names and rights."
        )
    if found.rule is None:
        out.print(f"No rule of {route.key} is for this request: it gets 404 no_route_rule.")
        return
    limits = [str(_limits(cluster, share.ref)) for share in found.shares]
    shown = ("LIMITS",) if any(limits) else ()
    table = Table("ROLE", "TARGET", "SHARE", *shown, "NOTE", box=None, pad_edge=False)
    for share, limit in zip(found.shares, limits, strict=True):
        told = (limit,) if shown else ()
        table.add_row(share.role, str(share.ref), f"{share.percent:.4g} %", *told, escape(share.note))
    out.print(f"Rule {found.rule} of {route.key}, for a request to {escape(question.endpoint)}:")
    out.print(table)
    if cluster.route.tenant_limits is not None:
        out.print(f"Each tenant may send by this route: {_of_each_tenant(cluster.route.tenant_limits)}.")
    if found.shares and cluster.gateways is not None:
        _print_costs(cluster, found, cluster.gateways, out)
        _print_externals(cluster.route, cluster.gateways, out)
    if route.externals and _unused(cluster.declared) is None:
        out.print(
            "The operator has not looked at this version of the route yet: whether hosts and keys are there is unknown."
        )
