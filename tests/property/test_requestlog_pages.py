"""Pages over several gateways: every entry comes once, the newest first, wherever it is and however full pages are."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.requestlog import query
from shoal.requestlog.logger import merged
from shoal.requestlog.query import Found, Newest, Place

sizes = st.sampled_from((10, 200, 500, 1001))
one_gateway = st.lists(st.tuples(st.integers(0, 30), sizes), max_size=12)


def page(have: dict[Place, int], limit: int, before: Place | None) -> Found:
    """What one gateway answers, as `query.newest` makes it."""
    newest = Newest(limit)
    for place, size in have.items():
        if before is None or place < before:
            newest.add(place, bytes(size))
    return Found(newest.lines(), newest.more)


@given(st.lists(one_gateway, min_size=1, max_size=4), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_entry_comes_once_and_in_order(gateways: list[list[tuple[int, int]]], limit: int):
    with patch.object(query, "MOST_BYTES", 1000):
        read_all(gateways, limit)


def read_all(gateways: list[list[tuple[int, int]]], limit: int) -> None:
    have = [
        {(f"{moment:02d}", f"{number}-{place}"): size for place, (moment, size) in enumerate(entries)}
        for number, entries in enumerate(gateways)
    ]
    seen: list[Place] = []
    before = None
    while True:
        found = merged([page(each, limit, before) for each in have], limit)
        assert len(found.lines) <= limit
        seen += [place for place, _ in found.lines]
        if not found.more:
            break
        assert found.lines, "a page that promises more leads there"
        before = found.lines[-1][0]
    assert seen == sorted((place for each in have for place in each), reverse=True)
