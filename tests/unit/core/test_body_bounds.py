"""What one body may become in memory: counted before it is decoded, and right whatever stands in its strings."""

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.jsonbounds import JsonBounds, beyond

MOST = JsonBounds(values=40, containers=10, strings=20, depth=5)
FREE = JsonBounds(values=10**9, containers=10**9, strings=10**9, depth=10**9)


def measured(value: Any) -> tuple[int, int, int, int]:
    """Values, containers, strings and levels, the slow way."""
    values, containers, strings, depth = 1, 0, isinstance(value, str), 0
    inner: list[Any] = []
    if isinstance(value, dict):
        inner, containers = list(value.values()), 1
        strings += len(value)
    elif isinstance(value, list):
        inner, containers = value, 1
    for each in inner:
        v, c, s, d = measured(each)
        values, containers, strings, depth = values + v, containers + c, strings + s, max(depth, d)
    return values, containers, strings, depth + (containers > 0)


TEXT = st.text(st.sampled_from('a"\\[]{},:é😀\n'), max_size=6)
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=60,
)


@given(JSON)
def test_it_counts_as_the_decoder_would(value: Any):
    raw = orjson.dumps(value)
    values, containers, strings, depth = measured(value)
    over = values > MOST.values or containers > MOST.containers or strings > MOST.strings or depth > MOST.depth
    found = beyond(raw, MOST)
    # An empty array counts as a value more: its first one is not there.
    room = JsonBounds(MOST.values, MOST.containers, MOST.strings, MOST.depth)
    if over:
        assert found is not None
    elif found is not None:
        assert "values" in found
        assert values + containers > room.values


@given(JSON, st.integers(0, 400), st.binary(max_size=5))
def test_what_a_decoder_gets_to_see_of_a_broken_text_is_counted(value: Any, at: int, garbage: bytes):
    """A text is not made to look smaller by what comes after its error."""
    whole = orjson.dumps([value] * 3)
    _, containers, _, _ = measured([value] * 3)
    if containers > MOST.containers:
        assert beyond(whole + garbage * at, MOST) is not None


def test_what_stands_in_strings_is_no_structure():
    code = '{"a": [1, 2, 3], "b": "\\\\"}' * 1000
    assert beyond(orjson.dumps({"model": "m", "text": code}), MOST) is None
    assert beyond(orjson.dumps({"model": "m", "text": "\\" * 1001 + '"[[[[[['}), MOST) is None


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"[" + b"{}," * 11 + b"1]", "arrays and objects"),
        (b"[" + b"1," * 41 + b"1]", "values"),
        (b"[" + b'"",' * 21 + b"1]", "strings"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(21)) + b"}", "strings"),
        (b"[" * 6 + b"]" * 6, "levels"),
        (b'{"a":' * 6 + b"1" + b"}" * 6, "levels"),
        (b"[" * 100_000, "arrays and objects"),
    ],
)
def test_each_bound_has_a_name(raw: bytes, what: str):
    assert what in (beyond(raw, MOST) or "")
    assert beyond(raw, FREE) is None


def test_a_long_text_is_cheap_to_count():
    """Each step is one pass of C code: the work grows with the bytes and nothing else."""
    rng = random.Random(1)  # noqa: S311
    text = "".join(rng.choice('a"\\[]{},') for _ in range(1_000_000))
    assert beyond(orjson.dumps({"messages": [{"content": text}]}), MOST) is None
