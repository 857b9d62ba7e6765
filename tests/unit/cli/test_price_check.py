"""`shoal prices check`: price lists are right before they are committed."""

import csv
import io
import json
from pathlib import Path

from click.testing import CliRunner, Result

from shoal.cli.main import main
from tests.support.queryapi import MID_NOVEMBER, OCTOBER


def check(*paths: Path, output: str = "table") -> Result:
    return CliRunner().invoke(main, ["prices", "check", *map(str, paths), "-o", output])


def test_good_price_lists_are_told_with_their_time(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OCTOBER)
    (tmp_path / "b.yaml").write_text(MID_NOVEMBER)
    told = check(tmp_path)
    assert told.exit_code == 0
    assert told.stdout.splitlines() == [
        f"{tmp_path}/a.yaml: 3 prices in EUR, from 2026-10-01T00:00Z",
        f"{tmp_path}/b.yaml: 3 prices in EUR, from 2026-11-15T00:00Z",
    ]


def test_mistakes_in_price_lists_are_told_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OCTOBER.replace('"15"', '"1.2345678"'))
    (tmp_path / "b.yaml").write_text(OCTOBER.replace("effectiveFrom", "effectivefrom"))
    told = check(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert told.exit_code == 1
    assert told.stderr.splitlines() == [
        f"{tmp_path}/a.yaml:4: `prices.output`: '1.2345678' has more than 6 decimals",
        f"{tmp_path}/b.yaml:1: `effectiveFrom` is missing",
        f"{tmp_path}/b.yaml:2: unknown field `effectivefrom`: did you mean `effectiveFrom`?",
        f"Not compared with other lists: {tmp_path}/a.yaml, {tmp_path}/b.yaml",
        "Error: 3 errors",
    ]


def test_lists_without_mistakes_are_compared_though_another_one_has_some(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OCTOBER.replace('"15"', '"1.2345678"'))
    (tmp_path / "b.yaml").write_text("effectiveUntil: 2026-12-01\n" + OCTOBER)
    (tmp_path / "c.yaml").write_text(MID_NOVEMBER.replace("EUR", "USD"))
    told = check(tmp_path)
    assert told.exit_code == 1
    lines = told.stderr.splitlines()
    assert lines[0] == f"{tmp_path}/a.yaml:4: `prices.output`: '1.2345678' has more than 6 decimals"
    assert lines[1].startswith(f"{tmp_path}/b.yaml:1: overlaps {tmp_path}/c.yaml")
    assert lines[2].startswith(f"{tmp_path}/c.yaml:1: prices in USD, but those of {tmp_path}/b.yaml are in EUR")
    assert lines[3:] == [f"Not compared with other lists: {tmp_path}/a.yaml", "Error: 3 errors"]
    found = json.loads(check(tmp_path, output="json").stdout)
    assert (len(found["errors"]), found["notCompared"]) == (3, [f"{tmp_path}/a.yaml"])
    rows = list(csv.DictReader(io.StringIO(check(tmp_path, output="csv").stdout)))
    assert [(row["kind"], row["file"]) for row in rows][-1] == ("notCompared", f"{tmp_path}/a.yaml")


def test_a_gap_that_a_list_with_mistakes_may_fill_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("effectiveUntil: 2026-11-01\n" + OCTOBER)
    (tmp_path / "c.yaml").write_text(MID_NOVEMBER)
    ends = f"ends 2026-11-01T00:00Z, and {tmp_path}/c.yaml begins 2026-11-15T00:00Z; without `effectiveUntil` it lasts"
    assert check(tmp_path).stderr.startswith(f"{tmp_path}/a.yaml:1: leaves a gap: {ends}")
    (tmp_path / "b.yaml").write_text(OCTOBER.replace("10-01", "11-01").replace('"15"', '"1.2345678"'))
    told = check(tmp_path).stderr
    assert told.startswith(f"{tmp_path}/a.yaml:1: leaves a gap, unless a list with mistakes fills it: {ends}")
    assert told.endswith("Error: 2 errors\n")


def test_lists_that_overlap_are_refused_and_a_dropped_price_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("effectiveUntil: 2026-12-01\n" + OCTOBER)
    (tmp_path / "b.yaml").write_text(MID_NOVEMBER)
    told = check(tmp_path)
    assert (told.exit_code, f"{tmp_path}/a.yaml:1: overlaps {tmp_path}/b.yaml" in told.stderr) == (1, True)
    (tmp_path / "a.yaml").write_text(OCTOBER)
    (tmp_path / "b.yaml").write_text("\n".join(MID_NOVEMBER.splitlines()[:-1]))
    told = check(tmp_path)
    assert told.exit_code == 0
    assert f"{tmp_path}/b.yaml:3: warning: no price for plan -, model chat/llama, adapter *," in told.stderr


def test_a_check_can_be_read_by_a_program(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OCTOBER)
    (tmp_path / "b.yaml").write_text("\n".join(MID_NOVEMBER.splitlines()[:-1]))
    found = json.loads(check(tmp_path, output="json").stdout)
    assert [(each["file"], each["prices"], each["from"], each["until"]) for each in found["priceLists"]] == [
        (f"{tmp_path}/a.yaml", 3, "2026-10-01T00:00Z", None),
        (f"{tmp_path}/b.yaml", 2, "2026-11-15T00:00Z", None),
    ]
    assert (found["errors"], found["notCompared"]) == ([], [])
    assert found["warnings"][0]["line"] == 3
    (tmp_path / "a.yaml").write_text(OCTOBER.replace('"15"', '"1.2345678"'))
    wrong = check(tmp_path / "a.yaml", output="csv")
    assert wrong.exit_code == 1
    (row,) = csv.DictReader(io.StringIO(wrong.stdout))
    assert (row["kind"], row["line"], row["message"]) == (
        "error", "4", "`prices.output`: '1.2345678' has more than 6 decimals",
    )  # fmt: skip


def test_a_folder_without_price_lists_is_told(tmp_path: Path) -> None:
    told = check(tmp_path)
    assert (told.exit_code, "has no .yaml file" in told.stderr) == (1, True)
