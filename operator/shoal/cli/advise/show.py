"""The advice for people: sentences, then a table. For programs: the same numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.output import camel
from shoal.core.advice.report import LARGER, AdviceReport
from shoal.core.advice.sentences import number, sentences
from shoal.core.quantity import money

COLUMNS: Final = ("model", "what", "share")
"""Of the CSV."""
_ROWS: Final[Mapping[str, str]] = {
    "unlimited": "all reuse that the traffic holds",
    "fleet_sized": "one cache of the fleet's size",
    "delivered": "delivered by the engines",
    "replayed": "the same, replayed",
    "least_in_flight": "least loaded replica (replayed)",
    "round_robin": "round robin (replayed)",
    "larger_kv": f"{LARGER} times the KV cache (replayed)",
}
_UNKNOWN: Final = "?"


def render(model: str, report: AdviceReport) -> RenderableType:
    span = f"{_time(report.since)} to {_time(report.until)}"
    gateways = "1 gateway" if report.gateways == 1 else f"{report.gateways} gateways"
    parts: list[RenderableType] = [
        Text.assemble(
            (model, "bold"),
            f": {report.requests:,} requests of {gateways}, {span}, {report.replicas:,} starts of replicas",
        ),
        Text(""),
        *(Text(sentence) for sentence in sentences(report)),
        Text(""),
        _table(report),
    ]
    parts += [Text(f"prefill on {name}: {rate} tokens/s, {kv} KV tokens") for name, rate, kv in _classes(report)]
    if (usable := report.shares.usable_kv) is not None and usable < 1:
        parts.append(Text(f"replays of other routing use {usable:.0%} of the KV caches, as the engines did"))
    parts += [Text(f"note: {note}") for note in report.notes]
    return Group(*parts)


def _table(report: AdviceReport) -> Table:
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column("PROMPT TOKENS IN A CACHE", no_wrap=True)
    found.add_column("SHARE", justify="right", no_wrap=True)
    for name, title in _ROWS.items():
        share: float | None = getattr(report.shares, name)
        found.add_row(title, _UNKNOWN if share is None else f"{100 * share:.1f} %")
    return found


def _classes(report: AdviceReport) -> Iterator[tuple[str, str, str]]:
    for each in report.classes:
        kv = each.kv_tokens_per_replica
        rate = _UNKNOWN if each.prefill_rate is None else number(each.prefill_rate)
        yield each.gpu_class or _UNKNOWN, rate, _UNKNOWN if kv is None else f"{kv:,}"


def document(model: str, report: AdviceReport) -> dict[str, Any]:
    """Fields as in the API; times are RFC 3339, money is text, the unknown is null."""
    found = _plain(asdict(report))
    return {
        "model": model,
        **found,
        "since": _time(report.since),
        "until": _time(report.until),
        "sentences": list(sentences(report)),
    }


def rows(model: str, report: AdviceReport) -> Iterator[dict[str, Any]]:
    for name, share in _plain(asdict(report.shares)).items():
        if name != "usableKv":
            yield {"model": model, "what": name, "share": share}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _plain(each) for name, each in camel(fields).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("list[Any]", value)]
    return money(value) if isinstance(value, Decimal) else value


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
