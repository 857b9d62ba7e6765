"""Which price counts, and what tokens cost."""

import pytest

from shoal.api.ledger import Prices, Rate
from shoal.core.rating.price import RateTable, cost


def _rate(plan: str | None, model: str, adapter: str | None, input: int) -> Rate:
    return Rate(plan=plan, model=model, adapter=adapter, input=input, cached=input // 10, output=input * 2)


PRICES = Prices(
    list="2026-11-01",
    currency="EUR",
    rates=(
        _rate(None, "*", None, 100),
        _rate(None, "*", "*", 110),
        _rate(None, "chat/llama", None, 200),
        _rate(None, "chat/llama", "*", 210),
        _rate(None, "chat/llama", "chat/sql", 220),
        _rate("gold", "*", None, 50),
        _rate("gold", "chat/llama", "chat/sql", 60),
    ),
)


@pytest.mark.parametrize(
    ("plan", "model", "adapter", "input"),
    [
        (None, "chat/llama", None, 200),
        (None, "chat/other", None, 100),
        (None, "chat/llama", "chat/sql", 220),
        (None, "chat/llama", "chat/law", 210),
        (None, "chat/other", "chat/law", 110),
        ("gold", "chat/llama", "chat/sql", 60),
        ("gold", "chat/llama", None, 50),  # the plan comes before the model
        ("gold", "chat/llama", "chat/law", 210),  # of its own it has none for this
        ("silver", "chat/llama", None, 200),
    ],
)
def test_the_most_specific_price_counts(plan: str | None, model: str, adapter: str | None, input: int) -> None:
    found = RateTable.of(PRICES).find(plan, model, adapter)
    assert found is not None
    assert found.input == input


def test_without_a_price_there_is_none() -> None:
    only = RateTable.of(Prices(list="x", currency="EUR", rates=(_rate("gold", "chat/llama", None, 7),)))
    assert only.find(None, "chat/llama", None) is None
    assert only.find("gold", "chat/llama", "chat/sql") is None, "a model's price is not its adapters'"
    assert only.find("gold", "chat/other", None) is None


def test_tokens_cost_by_their_three_prices() -> None:
    rate = Rate(model="m", input=3_000_000, cached=300_000, output=15_000_000)
    assert cost(rate, 1_000_000, 400_000, 200_000) == 600_000 * 3_000_000 + 400_000 * 300_000 + 200_000 * 15_000_000
    assert cost(rate, 0, 0, 0) == 0


def test_input_of_which_the_cached_part_is_unknown_costs_as_the_list_says() -> None:
    rate = Rate(model="m", input=10, cached=1, output=0)
    assert cost(rate, 100, 20, 0, 30) == 80 * 10 + 20 * 1
    assert cost(rate, 100, 20, 0, 30, unknown_cached="Cached") == 50 * 10 + 50 * 1
