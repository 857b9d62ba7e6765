"""docs/faults.md has every fault of the suite. `SHOAL_GOLDEN=write` records them anew."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from shoal.core.layers.faults import advice
from shoal.core.layers.layer import Layer
from tests.faults.fourth import FOURTH
from tests.faults.further import FURTHER
from tests.faults.lab import clients, installation, rows
from tests.faults.test_faults import FAULTS
from tests.faults.test_installation_faults import FAULTS as OF_INSTALLATIONS
from tests.faults.test_installation_faults import bad
from tests.faults.third import THIRD
from tests.faults.unseen import UNSEEN

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
PART = re.compile(r"(?<=<!-- faults -->\n).*(?=<!-- /faults -->)", re.DOTALL)
Row = tuple[str, str, str, str, str]
"""Layer, fault, reason, next step, where it is made."""


def listed() -> Iterator[Row]:
    for fault in rows.ROWS:
        yield fault.layer, fault.name, fault.reason, advice(fault.reason).do, "lab"
    for request in clients.REQUESTS:
        yield request.layer, request.name, request.code, request.advice.do, "lab"
    for change in installation.INSTALLATION:
        yield change.layer, change.name, change.reason, f"{change.do} …", "lab"
    for fault in (*FAULTS, *FURTHER, *UNSEEN, *THIRD, *FOURTH):
        yield fault.layer, fault.name, fault.reason, advice(fault.reason).do, "snapshot"
    for fault in OF_INSTALLATIONS:
        (first, *_) = [each for each in bad(fault.seen) if each.reason == fault.reason]
        yield fault.layer, fault.name, fault.reason, first.do, "snapshot of an installation"


def part() -> str:
    found = list(listed())
    lines: list[str] = []
    for layer in Layer:
        lines += ["", f"## {layer.label}", "", "| fault | reason | what to do | made in |", "|---|---|---|---|"]
        lines += [f"| {name} | `{reason}` | {do} | {where} |" for at, name, reason, do, where in found if at == layer]
    return "\n".join(lines) + "\n"


def test_the_page_has_every_fault() -> None:
    text = PAGE.read_text()
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.write_text(PART.sub(lambda _: part(), text))
        text = PAGE.read_text()
    found = PART.search(text)
    assert found is not None
    assert found.group() == part()


def test_the_lab_has_forty_faults_on_every_layer() -> None:
    of_the_lab = [layer for layer, *_, where in listed() if where == "lab"]
    assert len(of_the_lab) >= 40
    assert set(of_the_lab) == set(Layer)


def test_no_two_faults_of_the_lab_have_one_object_in_two_forms() -> None:
    """It is applied once: one of the faults would not be there."""
    forms: dict[tuple[str, str | None, str], str] = {}
    for fault in rows.ROWS:
        for each in fault.objects:
            named = each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]
            form = json.dumps(each, sort_keys=True)
            assert forms.setdefault(named, form) == form, (fault.name, named)
