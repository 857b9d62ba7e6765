"""What a meter writes down."""

import random

from shoal.metering.meter import milliseconds


def test_milliseconds_have_three_decimals() -> None:
    assert [milliseconds(seconds) for seconds in (0.0, 0.0012345, 0.0123456, 1.5, 86_400.0004)] == [
        0.0,
        1.234,
        12.346,
        1500.0,
        86_400_000.4,
    ]


def test_milliseconds_are_written_with_no_more_decimals() -> None:
    numbers = random.Random(1)  # noqa: S311 - no secret
    for _ in range(10_000):
        seconds = numbers.uniform(0, 10 ** numbers.randint(-3, 5))
        text = repr(milliseconds(seconds))
        assert len(text.partition(".")[2]) <= 3
        assert abs(float(text) - seconds * 1000) <= 0.000501
