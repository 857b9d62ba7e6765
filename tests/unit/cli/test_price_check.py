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
        "Error: 3 errors",
    ]


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
    assert found["errors"] == []
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
