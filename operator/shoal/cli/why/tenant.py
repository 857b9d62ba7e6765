"""`shoal why tenant/NAME`: its keys, what it may use, and whether that serves."""

from datetime import UTC, datetime
from typing import Any, Final

from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import ObjectView, Unread, WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import MODELS, TENANTS

MOST_MODELS: Final = 50
"""Granted Models that are read."""


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a Tenant. Raises KubeError where the Tenant itself cannot be read."""
    tenant = layerviews.shoal_object("tenant", await question.client.get(TENANTS, question.name))
    reader = WhyReader(question.client)
    granted: list[dict[str, Any]] = tenant.spec.get("models") or []
    if len(granted) > MOST_MODELS:
        reader.unread.append(Unread("granted Models", f"only the first {MOST_MODELS} of {len(granted)} were read"))
    related: list[ObjectView] = []
    for grant in granted[:MOST_MODELS]:
        namespace, name = str(grant.get("namespace")), str(grant.get("name"))
        model = await reader.get(f"Model {namespace}/{name}", "model", MODELS, name, namespace)
        related += [model] if model is not None else []
    seen = WhySnapshot(
        kind="tenant",
        key=tenant.key,
        subject=tenant,
        related=tuple(related),
        gateways=await reader.gateways(question.installation.namespace),
        lease=await reader.lease(question.installation.namespace),
        unread=tuple(reader.unread),
    )
    return show.answer(causes(seen, datetime.now(UTC)), seen)
