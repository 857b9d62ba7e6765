"""`shoal why tenant/NAME`: its keys, what it may use, and whether that serves."""

from datetime import UTC, datetime
from typing import Any, Final

from shoal.api import names
from shoal.api.billing import BillStatement
from shoal.api.meta import JsonObject
from shoal.cli.services import LedgerClient
from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import BudgetView, ObjectView, Unread, WhySnapshot
from shoal.kube import layerviews
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
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
    absent: list[str] = []
    for grant in granted[:MOST_MODELS]:
        namespace, name = str(grant.get("namespace")), str(grant.get("name"))
        raw = await reader.attempt(f"Model {namespace}/{name}", _read(question.client, namespace, name))
        if raw:
            related.append(layerviews.shoal_object("model", raw))
        elif raw is not None:
            absent.append(f"{namespace}/{name}")
    seen = WhySnapshot(
        kind="tenant",
        key=tenant.key,
        subject=tenant,
        related=tuple(related),
        budget=await _budget(question, reader, tenant),
        absent=tuple(absent),
        gateways=await reader.gateways(question.installation.namespace),
        lease=await reader.lease(question.installation.namespace),
        unread=tuple(reader.unread),
    )
    return show.answer(causes(seen, datetime.now(UTC)), seen)


async def _read(client: KubeClient, namespace: str, name: str) -> JsonObject:
    """A Model; empty: there is none."""
    try:
        return await client.get(MODELS, name, namespace)
    except NotFound:
        return {}


async def _budget(question: WhyQuestion, reader: WhyReader, tenant: ObjectView) -> BudgetView | None:
    """What the ledger has of this month; requests that run are not in it."""
    if not tenant.spec.get("budget"):
        return None
    ledger = LedgerClient(question.client, question.installation.namespace)
    query = {"tenant": tenant.name, "month": datetime.now(UTC).strftime("%Y-%m")}
    bill = await reader.attempt("use of the budget", ledger.get(names.BILL_PATH, query, BillStatement))
    return layerviews.budget(tenant, bill) if bill is not None else None
