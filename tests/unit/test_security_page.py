"""docs/security.md names, for each control, the test that checks it: each of these tests exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
_CODE = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"(tests/[\w/]+/)?test_\w+(\.py)?")
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def missing(text: str, files: list[Path] = FILES) -> list[str]:
    """Names of tests in a page that are neither a file below tests/ nor a function in one of them."""
    named = {code for code in _CODE.findall(text) if _NAME.fullmatch(code)}
    stems = {path.stem for path in files}
    functions = {found for path in files for found in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)}
    return sorted(
        name
        for name in named
        if not ((ROOT / name).is_file() if "/" in name else name.removesuffix(".py") in stems | functions)
    )


def test_every_named_test_exists() -> None:
    assert missing(PAGE.read_text()) == []


def test_every_control_names_its_test() -> None:
    controls = [part for part in re.split(r"\n\n|\n#", PAGE.read_text()) if "*Control:*" in part]
    assert len(controls) > 15
    assert [
        control.splitlines()[0] for control in controls if "*Tested by:*" not in control and "`test_" not in control
    ] == []


@pytest.mark.parametrize("name", ["test_nothing_of_the_kind", "tests/unit/test_nothing.py", "tests/e2e/test_layout.py"])
def test_a_missing_test_is_found(name: str) -> None:
    assert missing(f"*Tested by:* `{name}`, `test_layout`.") == [name]
