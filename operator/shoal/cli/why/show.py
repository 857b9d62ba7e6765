"""An explanation as text and as data."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.api import reasons
from shoal.cli.why.subjects import WhyAnswer
from shoal.core.layers.texts import shorten
from shoal.core.layers.types import KINDS, Evidence, Explanation, LayerCause, Unread, WhySnapshot

COLUMNS: Final = ("kind", "name", "state", "layer", "reason", "message", "seen", "ageSeconds", "tried", "do")
_LABELS: Final = {"fault": "wrong", "waits": "pending", "note": "note"}
_STYLES: Final = {"fault": "red", "waits": "yellow", "note": "cyan"}
SAID: Final = {
    "ok": "nothing is wrong",
    "waiting": "on its way",
    "failing": "something is wrong",
    "unknown": "nothing wrong was found, and not everything could be read",
}
"""By the state of an explanation."""


def answer(found: Explanation, seen: WhySnapshot) -> WhyAnswer:
    """An explanation in each format."""
    return WhyAnswer(document(found, seen), rows(found), COLUMNS, render(found, seen))


def document(found: Explanation, seen: WhySnapshot) -> dict[str, Any]:
    """For JSON and YAML."""
    return {
        "kind": KINDS[found.kind],
        "name": found.key,
        "state": found.state,
        "ready": _ready(seen),
        "causes": [cause_document(cause) for cause in found.causes],
        "unread": unread_document(found.unread),
    }


def unread_document(unread: Sequence[Unread]) -> list[dict[str, str]]:
    return [{"what": each.what, "why": each.why} for each in unread]


def rows(found: Explanation) -> list[dict[str, Any]]:
    """For CSV: one row per cause."""
    return [
        cause_document(cause)
        | {
            "kind": KINDS[found.kind],
            "name": found.key,
            "seen": [each.what for each in cause.evidence[:1]],
            "ageSeconds": cause.evidence[0].age_seconds if cause.evidence else None,
        }
        for cause in found.causes
    ]


def cause_document(cause: LayerCause) -> dict[str, Any]:
    return {
        "reason": cause.reason,
        "layer": cause.layer.value,
        "state": cause.state,
        "message": cause.message,
        "evidence": [
            {"what": each.what, "where": each.where, "ageSeconds": each.age_seconds} for each in cause.evidence
        ],
        "tried": list(cause.tried),
        "do": cause.do,
        "explains": list(cause.consequences),
    }


def render(found: Explanation, seen: WhySnapshot) -> RenderableType:
    """For people: the most upstream cause first; of each, what it is, its layer, evidence, what was tried, what to
    do."""
    heading = Text.assemble((f"{KINDS[found.kind]} {found.key}", "bold"), f": {SAID[found.state]}")
    parts: list[RenderableType] = [heading]
    if not found.causes and (ready := _ready(seen)) is not None:
        parts.append(Text(ready))
    for place, cause in enumerate(found.causes, 1):
        parts += [Text(""), *cause_block(place, cause)]
    if found.unread:
        parts += [Text(""), *unread_lines(found.unread)]
    return Group(*parts)


def unread_lines(unread: Sequence[Unread]) -> Iterable[RenderableType]:
    """What could not be read."""
    yield Text("not read, so not known:", style="yellow")
    yield from (Text(f"  {each.what}: {each.why}") for each in unread)


def cause_block(place: int, cause: LayerCause) -> Iterable[RenderableType]:
    """What is wrong, which layer, evidence, what was tried, what to do, and what it explains."""
    mark = " (ends by itself)" if cause.state == "waits" else ""
    layer = Text.assemble((cause.layer.label, "bold"), "  ", (cause.reason, _STYLES.get(cause.state, "")), mark)
    table = Table(show_edge=False, show_header=False, box=None, pad_edge=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    lines = [
        ("layer", layer),
        *(("seen", Text(_evidence(each))) for each in cause.evidence),
        *(("tried", Text(each)) for each in cause.tried),
        ("do", Text(cause.do)),
        *(("explains", Text(each)) for each in cause.consequences),
    ]
    table.add_row(Text(f"{place}. {_LABELS.get(cause.state, 'wrong')}"), Text(cause.message))
    before = ""
    for name, text in lines:
        table.add_row(Text(f"   {name if name != before else ''}"), text)
        before = name
    yield table


def _evidence(each: Evidence) -> str:
    when = "at an unknown time" if each.age_seconds is None else f"{span(each.age_seconds)} ago"
    return f"{each.what} ({each.where}, {when})" if each.where else each.what


def span(seconds: int) -> str:
    """`34 s`, `5 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _ready(seen: WhySnapshot) -> str | None:
    conditions = seen.subject.conditions if seen.subject is not None else ()
    ready = next((c for c in conditions if c.type == reasons.READY), None)
    return None if ready is None else shorten(f"Ready is {ready.status}: {ready.reason}: {ready.message}", 1000)
