"""docs/why.md has every layer with its reasons. `SHOAL_GOLDEN=write` records them anew."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.core.doctor.checks import CHECKS
from shoal.core.layers import xids
from shoal.core.layers.advice import REASONS, LayerAdvice
from shoal.core.layers.faults import FAULTS, advice
from shoal.core.layers.layer import Layer
from shoal.core.layers.refusals import REFUSALS

PAGE = Path(__file__).parents[3] / "docs" / "why.md"
PART = re.compile(r"(?<=<!-- layers -->\n).*(?=<!-- /layers -->)", re.DOTALL)
XIDS_PART = re.compile(r"(?<=<!-- xids -->\n).*(?=<!-- /xids -->)", re.DOTALL)


def listed(rows: Mapping[str, LayerAdvice], layer: Layer, *states: str) -> Iterable[str]:
    return (f"| `{name}` | {row.do} |" for name, row in rows.items() if row.layer == layer and row.state in states)


def part() -> str:
    lines: list[str] = []
    for layer in Layer:
        lines += ["", f"### {layer.label}", "", f"{layer.about[0].upper()}{layer.about[1:]}.", ""]
        lines += ["| reason | what to do |", "|---|---|"]
        lines += listed({**FAULTS, **REASONS}, layer, "fault")
        lines += listed({**FAULTS, **REASONS}, layer, "waits", "note")
        if fine := [f"`{name}`" for name, row in REASONS.items() if row.layer == layer and row.state == "fine"]:
            lines += ["", f"As it should be: {', '.join(fine)}."]
        if refused := list(listed(REFUSALS, layer, "fault")):
            lines += [
                "",
                "Codes with which gateways refuse requests:",
                "",
                "| code | what to do |",
                "|---|---|",
                *refused,
            ]
    return "\n".join(lines) + "\n"


def test_the_page_has_every_reason_of_every_layer() -> None:
    text = PAGE.read_text()
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.write_text(PART.sub(lambda _: part(), text))
        text = PAGE.read_text()
    found = PART.search(text)
    assert found is not None
    assert found.group() == part()


def xid_rows() -> Iterable[str]:
    by_meaning: dict[xids.Xid, list[int]] = {}
    for number, known in sorted(xids.XIDS.items()):
        by_meaning.setdefault(known, []).append(number)
    for known, numbers in by_meaning.items():
        row = advice(known.reason)
        yield f"| {', '.join(map(str, numbers))} | {known.meaning} | `{known.reason}` | {row.layer.label} |"


def test_the_page_has_every_xid() -> None:
    found = XIDS_PART.search(PAGE.read_text())
    if os.environ.get("SHOAL_GOLDEN") == "write":
        rows = "\n".join(["| Xid | meaning | reason | layer |", "|---|---|---|---|", *xid_rows()]) + "\n"
        PAGE.write_text(XIDS_PART.sub(lambda _: rows, PAGE.read_text()))
        found = XIDS_PART.search(PAGE.read_text())
    assert found is not None
    assert found.group().splitlines()[2:] == list(xid_rows())


def test_the_page_has_every_check_of_an_installation_in_order() -> None:
    table = PAGE.read_text().partition("| check | what is looked at")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([\w ]+) \|", table, re.M) == [name for name, _ in CHECKS]
