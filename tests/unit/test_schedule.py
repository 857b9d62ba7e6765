"""Which file a test process takes next, where several run side by side."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.schedule import FIRST, LAST, SHARED, WITHOUT_A_LAB, choose, shared

ROOT = Path(__file__).parents[2]
OPERATOR, FLEET, LAB = SHARED
SERVED = f"{FLEET}test_line.py"
"""A file that needs the lab with Shoal in it."""
OPERATED, IN_LAB = f"{OPERATOR}test_operator_fleet.py", f"{LAB}test_cache_nodes.py"
FREE = "tests/unit/test_glossary.py"
"""A file that shares nothing."""


def test_what_is_listed_is_there() -> None:
    missing = [file for file in (*FIRST, *LAST) if not (ROOT / file).is_file()]
    missing += [folder for folder in SHARED if not (ROOT / folder).is_dir()]
    missing += [begin for begin in WITHOUT_A_LAB if not list(ROOT.glob(f"{begin}*.py"))]
    assert missing == []


def test_only_files_of_an_api_server_are_listed_as_without_a_lab() -> None:
    found = [path for begin in WITHOUT_A_LAB for path in ROOT.glob(f"{begin}*.py")]
    assert [path.name for path in found if "fleet: Fleet" in path.read_text()] == []


@pytest.mark.parametrize(
    ("left", "mine", "others", "taken"),
    [
        ([SERVED, FREE, FIRST[1], FIRST[0]], [FLEET], [], FIRST[0]),
        ([FREE, "tests/unit/test_house.py"], [], [], FREE),
        ([FREE, SERVED], [FLEET], [], SERVED),
        ([SERVED, FREE], [], [FLEET], FREE),
        ([SERVED, OPERATED, IN_LAB], [], [FLEET], OPERATED),
        ([SERVED, OPERATED], [FLEET, OPERATOR], [FLEET], SERVED),
        ([LAST[0], SERVED, FREE], [FLEET], [], SERVED),
        ([LAST[0], FREE], [FLEET], [], FREE),
        ([LAST[0]], [FLEET], [], LAST[0]),
        ([LAST[0]], [], [FLEET], None),
        ([SERVED, f"{FLEET}test_drain.py", f"{FLEET}test_scaling.py"], [], [FLEET], None),
        ([LAST[0], SERVED, f"{FLEET}test_drain.py", f"{FLEET}test_scaling.py"], [OPERATOR], [FLEET], SERVED),
    ],
    ids=[
        "the longest first",
        "else as they come",
        "what the lab that it has is for",
        "no second lab",
        "but one that nobody has",
        "of two labs as they come",
        "last in its lab",
        "after all others",
        "at the end",
        "not in a lab of its own",
        "few are left to the lab that is there",
        "many are worth a second one",
    ],
)
def test_the_next_file(left: Sequence[str], mine: Sequence[str], others: Sequence[str], taken: str | None) -> None:
    assert choose(left, mine, others) == taken


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_file_is_run_once(processes: int) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    left, done = list(files), list[str]()
    begun = [set[str]() for _ in range(processes)]
    working = list(range(processes))
    while left:
        process = working.pop(0)
        taken = choose(left, begun[process], {folder for other in working for folder in begun[other]})
        if taken is None:  # it ends, and another one has what is left
            continue
        working.append(process)
        left.remove(taken)
        done.append(taken)
        if folder := shared(taken):
            begun[process].add(folder)
    assert sorted(done) == files
