"""Whatever stands in a file: it is a price list, or it is refused with a line."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.rating.files import PriceList, parse
from shoal.core.rating.problems import PricesRefused

GOOD = """\
currency: EUR
effectiveFrom: 2026-11-01T06:00:00+02:00
effectiveUntil: 2027-01-01
unknownCached: Cached
name: list
prices:
  - {plan: gold, model: chat/llama, adapter: "*", input: "3", cached: "0.30", output: 15.000001}
  - model: "*"
    input: 1
    cached: 0
    output: 2
"""
PIECES = st.sampled_from(
    [
        "\n", "  ", "- ", ": ", "{", "}", "[", "]", "'", '"', "*", "&a", "*a", "!!binary", "!x", "<<: ", "? ",
        "#", "|", ">", "%", "@", "\t", "\x00", "\ufeff", "\x85", "null", "~", "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:00:00-14:00", "1e9", "-1", "0x1F", "1_000", "²", "９", "---\n", "...\n", "prices",
        "model: a/b\n",
    ]
)  # fmt: skip


def outcome(text: str) -> PriceList | PricesRefused:
    try:
        return parse("f.yaml", text)
    except PricesRefused as refused:
        return refused


def right_or_refused(text: str) -> None:
    found = outcome(text)
    if isinstance(found, PriceList):
        assert found.prices.rates
    else:
        last = len(re.findall("[\n\r\x85\u2028\u2029]", text)) + 1
        assert found.problems
        assert all(1 <= problem.line <= last for problem in found.problems), (found, last)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    right_or_refused(text)


@settings(max_examples=700, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 30), st.one_of(PIECES, st.text(max_size=5)))
def test_a_price_list_with_a_piece_replaced(at: int, length: int, piece: str) -> None:
    right_or_refused(GOOD[:at] + piece + GOOD[at + length :])
