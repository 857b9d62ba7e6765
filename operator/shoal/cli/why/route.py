"""`shoal why route/NAME`: the route, and whether its targets serve."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from shoal.cli.scaling.toproutes import RouteStatsClient
from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import ExplainedKind, ExternalTargetView, ObjectView, WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import LORA_ADAPTERS, MODEL_ROUTES, MODELS, Resource

MOST_TARGETS: Final = 50
"""Targets that are read."""


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a ModelRoute. Raises KubeError where the route itself cannot be read."""
    raw = await question.client.get(MODEL_ROUTES, question.name, question.namespace)
    seen = await read(question, layerviews.shoal_object("route", raw))
    return show.answer(causes(seen, datetime.now(UTC)), seen)


async def read(question: WhyQuestion, route: ObjectView) -> WhySnapshot:
    """What explains a ModelRoute."""
    reader = WhyReader(question.client)
    related: list[ObjectView] = []
    for kind, resource, namespace, name in list(dict.fromkeys(_targets(route)))[:MOST_TARGETS]:
        found = await reader.get(f"{resource.kind} {namespace}/{name}", kind, resource, name, namespace)
        related += [found] if found is not None else []
    return WhySnapshot(
        kind="route",
        key=route.key,
        subject=route,
        related=tuple(related),
        gateways=await reader.gateways(question.installation.namespace),
        externals=await _externals(question, reader, route),
        lease=await reader.lease(question.installation.namespace),
        unread=tuple(reader.unread),
    )


async def _externals(question: WhyQuestion, reader: WhyReader, route: ObjectView) -> tuple[ExternalTargetView, ...]:
    """External targets that fail, as the gateways tell it."""
    if not route.spec.get("externalTargets"):
        return ()
    client = RouteStatsClient(question.client, question.installation.namespace)
    page = await reader.attempt("what gateways know of external targets", client.page(route.namespace))
    return layerviews.externals(route, page) if page is not None else ()


def _targets(route: ObjectView) -> Iterable[tuple[ExplainedKind, Resource, str, str]]:
    rules: list[dict[str, Any]] = route.spec.get("rules") or []
    for rule in rules:
        canary: dict[str, Any] = rule.get("canary") or {}
        fallback: dict[str, Any] = rule.get("fallback") or {}
        targets: list[dict[str, Any]] = [
            *(rule.get("targets") or ()),
            *((canary["target"],) if canary.get("target") else ()),
            *(fallback.get("targets") or ()),
            *((rule["mirror"],) if rule.get("mirror") else ()),
        ]
        for target in targets:
            for field in ("model", "adapter"):
                found: dict[str, Any] = target.get(field) or {}
                if name := found.get("name"):
                    namespace = str(found.get("namespace") or route.namespace)
                    if field == "model":
                        yield "model", MODELS, namespace, str(name)
                    else:
                        yield "adapter", LORA_ADAPTERS, namespace, str(name)
