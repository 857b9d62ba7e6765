"""Words of an earlier, private language do not come back: names, messages and pages use the terms of Kubernetes and LLM
serving. Words that are ordinary English are only forbidden as names."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]

PARTS: Final[Mapping[str, str]] = {
    "wish": "PlacementRequest", "wishes": "PlacementRequest", "voice": "SignalSource", "voices": "SignalSource",
    "ears": "SignalSource", "deaf": "stale", "silences": "StaleSignals", "unheard": "stale", "unsure": "load_unknown",
    "undone": "unload_pending", "standings": "ReplicaState", "setback": "ClassBackoff", "setbacks": "ClassBackoff",
    "outranker": "Preemptor", "rival": "contender", "rivals": "contenders", "crowd": "peers", "bringer": "Fetcher",
    "mishap": "redact_error", "film": "LiveView", "patience": "timeout factor", "figures": "metrics, stats",
    "teller": "publisher", "town": "LocalFleet", "weather": "StormConfig", "tide": "burst_period",
}  # fmt: skip
"""Forbidden as a part of any name in the code, and the term to use."""

CLASSES: Final[Mapping[str, str]] = {
    "Book": "DecisionHistory, RateTable", "Word": "a noun for what it says", "Words": "ModelIndex",
    "Stay": "AdapterWait",
    "Stays": "AdapterWait", "WaitingRoom": "HoldQueue",
    "Room": "ClassCapacity, DiskQuota", "Others": "peers",
    "Me": "Self", "Surges": "Reservation", "Promises": "Reservation", "Questions": "QueryAPI", "House": "TenantFixture",
    "Floors": "DesiredAdapters",
}  # fmt: skip
"""Forbidden as the name of a class."""

MODULES: Final = {"words", "teller", "wish", "room", "setbacks", "rivals", "mishap"}
"""Forbidden as the name of a module."""

TEXTS: Final = re.compile(
    r"\b(?:wish(?:es)?|voices?|ears|deaf|unheard|not heard|silences|standings|setbacks?|outrankers?|rivals?"
    r"|waiting room|bringers?|mishaps?|tellers?|unsure|undone|patience)\b",
    re.IGNORECASE,
)
"""Forbidden in messages, docstrings and comments of the product, and on pages."""

SPEECH: Final = re.compile(r"\b(?:told|heard|hears|somebody|everybody|whoever)\b", re.IGNORECASE)
"""Forbidden in docstrings and comments of the product, outside of code in backquotes: processes send, receive and
report, and a sentence names its subject."""

ORDINARY: Final[Mapping[str, str]] = {
    "operator/shoal/cli/logs.py": "cannot be undone",
}
"""File -> text in which a word has its ordinary sense."""


def parts(name: str) -> Iterator[str]:
    """`HTTPRivals_of` -> http, rivals, of."""
    for piece in name.split("_"):
        yield from (found.lower() for found in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", piece))


def bad_names(source: str) -> list[str]:
    found: list[str] = []
    lowered = source.lower()  # most files have none of the words, and reading them token by token takes long
    if not any(part in lowered for part in PARTS) and not any(f"class {name}" in source for name in CLASSES):
        return found
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            found += [f"{token.string}: {PARTS[part]}" for part in parts(token.string) if part in PARTS]
    classes = (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return found + [f"class {name}: {CLASSES[name]}" for name in classes if name in CLASSES]


def bad_texts(text: str) -> list[str]:
    return [found[0] for found in TEXTS.finditer(text)]


def files(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if (ROOT / name).is_file() and "/protocol/" not in name]


def test_no_name_in_the_code_is_a_banned_term() -> None:
    found = {name: bad for name in files("*.py") if (bad := bad_names((ROOT / name).read_text()))}
    assert found == {}
    assert [name for name in files("*.py") if Path(name).stem in MODULES] == []


def test_no_text_of_the_product_and_no_page_has_a_banned_term() -> None:
    found: dict[str, list[str]] = {}
    names = files("operator", "charts", "policies", "examples", "docs", "*.md", "Makefile")
    for name in names:
        if name == "CHANGELOG.md" or name.endswith(".png"):
            continue
        text = (ROOT / name).read_text()
        if name in ORDINARY:
            assert ORDINARY[name] in text, f"{name} needs no exception"
            text = text.replace(ORDINARY[name], "")
        if bad := bad_texts(text):
            found[name] = bad
    assert found == {}


def prose(source: str) -> Iterator[str]:
    """Docstrings, also of fields, and comments."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def speech(source: str) -> list[str]:
    if not SPEECH.search(source):
        return []
    return [found[0] for text in prose(source) for found in SPEECH.finditer(re.sub("`[^`]*`", "", text))]


def test_docstrings_and_comments_name_what_happens_and_its_subject() -> None:
    found = {name: bad for name in files("operator/shoal/*.py") if (bad := speech((ROOT / name).read_text()))}
    assert found == {}


def test_the_check_of_prose_can_fail() -> None:
    assert speech("def f():\n    '''Hears of `told` pods.'''\n    x = 1  # whoever asks") == ["whoever", "Hears"]
    assert not speech("told = heard = 1  # `told` is sent")


@pytest.mark.parametrize(
    "source",
    [
        "class Wish: ...",
        "def set_back(rival): ...",
        "x.silences.clear()",
        "test_a_voice = 1",
        "f(patience=2)",
        "class Room: ...",
    ],
)
def test_the_check_of_names_can_fail(source: str) -> None:
    assert bad_names(source)


def test_the_check_of_texts_can_fail() -> None:
    assert bad_texts("KEDA is not heard: `ShoalWish` waits for voices") == ["not heard", "voices"]
    assert not bad_texts("who heard of the invoice wishbone")
    assert not bad_names("turn, book, room, told, invoice, uneared = 1, 2, 3, 4, 5, 6")
