"""`shoal usage`: counted tokens by any dimension."""

from typing import Any, Final

import click

from shoal.api import names
from shoal.api.billing import UsagePage
from shoal.cli.options import Installation, ledger_options
from shoal.cli.output import emit, output_option
from shoal.cli.services import LedgerClient, call_ledger
from shoal.cli.usage.show import NONE, console, count, dimensions, fields, seconds, table

BY: Final = ("tenant", "key", "externalID", "model", "adapter", "class", "plan", "route", "hour", "day", "month")
_COUNTS: Final = {
    "requests": "REQUESTS",
    "inputTokens": "INPUT",
    "cachedTokens": "OF IT CACHED",
    "outputTokens": "OUTPUT",
    "reasoningTokens": "OF IT REASONING",
}
_UNITS: Final = {
    "documents": "DOCUMENTS",
    "images": "IMAGES",
    "audioMs": "AUDIO SECONDS",
    "imageTokens": "OF INPUT IMAGES",
    "audioTokens": "OF INPUT AUDIO",
    "acceptedTokens": "OF OUTPUT DRAFTS",
}
"""Columns of a table in which anything has such units."""
_MORE: Final = ("unknownCachedInputTokens", "unknownRequests", *_UNITS)
_PAGE: Final = "5000"


@click.command()
@click.option("-n", "--namespace", help="Only Models of this namespace. Default: all namespaces.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Models of all namespaces, as without -n.")
@click.option("--tenant", multiple=True, help="Only this tenant. Can be repeated, as all filters.")
@click.option("--by", help=f"Dimensions of a row, from {', '.join(BY)}. Default: tenant, model and adapter.")
@click.option("--from", "start", help="2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC). Default: this month.")
@click.option("--to", "end", help="The same; exclusive. Default: the end of this month.")
@click.option("--model", multiple=True, help="namespace/name.")
@click.option("--adapter", multiple=True, help='namespace/name; "" means models without an adapter.')
@click.option("--key", multiple=True, help="Name of an API key.")
@click.option("--external-id", multiple=True, help="externalID of the Tenant.")
@click.option("--class", "gpu_class", multiple=True, help="GPU class.")
@click.option("--plan", multiple=True, help='Plan of the Tenant; "" means no plan.')
@click.option("--route", multiple=True, help='namespace/name of a ModelRoute; "" means requests without one.')
@click.option("--not-billed", is_flag=True, help="Show usage that is not billed: retried attempts and estimates.")
@output_option()
@ledger_options
def usage(
    namespace: str | None,
    all_namespaces: bool,
    tenant: tuple[str, ...],
    by: str | None,
    start: str | None,
    end: str | None,
    model: tuple[str, ...],
    adapter: tuple[str, ...],
    key: tuple[str, ...],
    external_id: tuple[str, ...],
    gpu_class: tuple[str, ...],
    plan: tuple[str, ...],
    route: tuple[str, ...],
    not_billed: bool,
    output: str,
    installation: Installation,
) -> None:
    """Show used tokens and other units by tenant, key, model, adapter, GPU class, plan, route, hour, day or month.

    Counts are the engines' own. A request counts in the hour (UTC) in which it was accepted. Needs the ClusterRole
    shoal-billing, or shoal-viewer for one namespace.

    \b
    kubectl shoal usage --tenant acme --by model,adapter,day
    kubectl shoal usage --by tenant --from 2026-10 --to 2026-11 -o csv
    kubectl shoal usage -n team-a --by model,day
    """
    if all_namespaces and namespace:
        raise click.UsageError("--all-namespaces and --namespace exclude each other")
    query: dict[str, Any] = {
        "namespace": namespace,
        "tenant": tenant,
        "by": dimensions(by) if by is not None else "tenant,model,adapter",
        "from": start,
        "to": end,
        "model": model,
        "adapter": adapter,
        "key": key,
        "externalID": external_id,
        "class": gpu_class,
        "plan": plan,
        "route": route,
        "billed": "false" if not_billed else None,
        "limit": _PAGE,
    }
    head, rows = call_ledger(installation, lambda ledger: _pages(ledger, query))
    if tenant and set(head.unseen) == set(tenant):
        raise click.ClickException(_unseen(tenant, namespace))
    shown = fields({"from": head.start, "to": head.end, "by": head.by, "rows": rows})
    if emit(output, shown, shown["rows"], [*shown["by"], *_COUNTS, *_MORE]):
        return
    if not rows:
        whose = f" of {', '.join(tenant)}" if tenant else ""
        click.echo(f"No matching usage{whose} from {head.start} to {head.end}.", err=True)
    else:
        _print(head, rows)


async def _pages(ledger: LedgerClient, query: dict[str, Any]) -> tuple[UsagePage, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    first: UsagePage | None = None
    after: str | None = None
    while True:
        page = await ledger.get(names.USAGE_PATH, query | {"after": after}, UsagePage)
        first = first or page
        rows += [row.model_dump(mode="json", by_alias=True, exclude_unset=True) for row in page.rows]
        if (after := page.next) is None:
            return first, rows


def _print(head: UsagePage, rows: list[dict[str, Any]]) -> None:
    words = [name.upper() for name in head.by]
    # A ledger of an older version sends no units.
    units = {name: title for name, title in _UNITS.items() if any(row.get(name) for row in rows)}
    shown = _COUNTS | units
    lines = [[*(row[name] or NONE for name in head.by), *(_number(name, [row]) for name in shown)] for row in rows]
    total = ["total", *[""] * (len(words) - 1), *(_number(name, rows) for name in shown)] if words else []
    out = console()
    out.print(f"from {head.start} to {head.end} (UTC)")
    out.print(table(words, list(shown.values()), lines, total))
    if unknown := sum(row["unknownCachedInputTokens"] for row in rows):
        out.print(f"For {count(unknown)} input tokens the cached part is unknown (cut streams).")
    if unknown := sum(row["unknownRequests"] for row in rows):
        out.print(f"For {count(unknown)} requests the tokens are unknown: no engine reported them.")


def _number(name: str, rows: list[dict[str, Any]]) -> str:
    found = sum(row.get(name, 0) for row in rows)
    return seconds(found) if name == "audioMs" else count(found)


def _unseen(tenants: tuple[str, ...], namespace: str | None) -> str:
    where = "" if namespace is None else f" in namespace {namespace}"
    return (
        f"the ledger has never seen usage of {', '.join(tenants)}{where}: is it spelt right? `kubectl get tenants` "
        "lists them"
    )
