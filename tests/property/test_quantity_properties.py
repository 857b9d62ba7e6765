"""Quantities are exact, and are written as the API server writes them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import quantity


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_an_amount_per_gpu_keeps_its_value_when_written(milli: int, gpus: int) -> None:
    total = quantity.parse(f"{milli}m") * gpus
    assert quantity.parse(quantity.cpu(total)) == total


@given(st.integers(0, 2**45))
def test_memory_keeps_its_value_when_written(size: int) -> None:
    assert quantity.parse(quantity.memory(Decimal(size))) == size


@given(st.decimals(0, 10**9, places=4))
def test_money_is_never_a_float(amount: Decimal) -> None:
    text = quantity.money(amount)
    assert Decimal(text) == amount
    assert "E" not in text


@pytest.mark.parametrize(
    ("text", "value"), [("80Gi", 80 * 2**30), ("1.5k", 1500), ("250m", Decimal("0.25")), ("1e3", 1000), (8, 8)]
)
def test_known_quantities(text: str, value: object) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "1 Gi", "1Gb", "--1"])
def test_what_is_not_a_quantity_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse(text)
