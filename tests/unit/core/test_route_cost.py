"""Whether a request goes to a cheaper fallback: a pure decision."""

import dataclasses

import pytest

from shoal.api.ledger import Prices, Rate
from shoal.core.rating.price import RateTable
from shoal.core.routing.cost import CostConditions, PricedRequest, decide_by_cost, may_cost, without_price

MILLION = 1_000_000
LARGE, SMALL, TINY, NEW = "chat/large", "chat/small", "chat/tiny", "chat/new"
LIST = RateTable.of(
    Prices(
        list="p",
        currency="USD",
        rates=(
            # 10 and 30 USD for a million tokens.
            Rate(model=LARGE, input=10 * MILLION, cached=MILLION, output=30 * MILLION),
            Rate(model=SMALL, input=MILLION, cached=MILLION, output=3 * MILLION),
            Rate(model=TINY, input=0, cached=0, output=0),
            Rate(model=LARGE, adapter="*", input=MILLION, cached=MILLION, output=MILLION),
            Rate(plan="gold", model=SMALL, input=90 * MILLION, cached=MILLION, output=90 * MILLION),
        ),
    )
)
FIVE_CENTS = CostConditions(above=5 * 10**10, currency="USD")


def request(model: str, prompt: int = 1000, answer: int = 2000, images: int = 0) -> PricedRequest:
    return PricedRequest(model, None, prompt, answer, images=images)


def test_a_request_that_may_cost_more_goes_to_the_fallbacks_that_are_cheaper_in_their_order():
    found = decide_by_cost(
        FIVE_CENTS, LIST, None, request(LARGE), [request(LARGE), request(SMALL), request(TINY)], None
    )
    assert (found.cheaper, found.trigger) == ((1, 2), "cost")
    assert found.why == "it may cost 0.07 USD at chat/large, more than the 0.05 USD of whenCostAbove"


def test_one_that_costs_just_as_much_as_it_may_stays():
    exactly = request(LARGE, 2000, 1000)
    assert decide_by_cost(FIVE_CENTS, LIST, None, exactly, [request(TINY)], None) == ((), None, "")
    more = request(LARGE, 2001, 1000)
    assert decide_by_cost(FIVE_CENTS, LIST, None, more, [request(TINY)], None).cheaper == (0,)


def test_cheaper_is_decided_for_this_request_and_plan():
    """A fallback may be cheaper with a long answer and dearer with a long prompt."""
    dear_prompts = Rate(model="chat/b", input=50 * MILLION, cached=0, output=MILLION)
    prices = dataclasses.replace(LIST, rates={**LIST.rates, (None, "chat/b", None): dear_prompts})

    def goes(prompt: int, answer: int) -> bool:
        at, instead = request(LARGE, prompt, answer), request("chat/b", prompt, answer)
        return bool(decide_by_cost(FIVE_CENTS, prices, None, at, [instead], None).cheaper)

    assert goes(1000, 2000)
    assert not goes(5000, 2000)
    gold = decide_by_cost(FIVE_CENTS, LIST, "gold", request(LARGE), [request(SMALL)], None)
    assert gold.cheaper == ()
    assert gold.why.endswith("but no fallback is known to be cheaper")


def test_an_adapter_has_its_own_price():
    tuned = PricedRequest(LARGE, "chat/tuned", 1000, 2000)
    found = decide_by_cost(FIVE_CENTS, LIST, None, request(LARGE), [tuned], None)
    assert found.cheaper == (0,)


@pytest.mark.parametrize(
    ("prices", "model", "why"),
    [
        (None, LARGE, "this gateway knows no price list"),
        (LIST, NEW, "chat/new has no price"),
        (dataclasses.replace(LIST, currency="EUR"), LARGE, "it is in USD, and the price list in EUR"),
    ],
)
def test_a_request_whose_cost_is_not_known_stays_and_says_why(prices: RateTable | None, model: str, why: str):
    found = decide_by_cost(FIVE_CENTS, prices, None, request(model), [request(TINY)], None)
    assert found == ((), None, f"whenCostAbove has no effect: {why}")


def test_a_fallback_without_a_price_costs_something_unknown_and_not_nothing():
    found = decide_by_cost(FIVE_CENTS, LIST, None, request(LARGE), [request(NEW)], None)
    assert (found.cheaper, found.trigger) == ((), "cost")
    assert found.why.endswith("but no fallback is known to be cheaper; chat/new has no price")


def test_a_unit_without_a_price_makes_the_cost_unknown():
    found = decide_by_cost(FIVE_CENTS, LIST, None, request(LARGE, images=2), [request(TINY)], None)
    assert found.why == "whenCostAbove has no effect: chat/large has no price for images"


@pytest.mark.parametrize(
    ("audio", "why"),
    [
        (1, "whenCostAbove has no effect: the length of a sound for chat/large is not known"),
        (None, "whenCostAbove has no effect: the length of a sound for chat/large is not known"),
        (0, ""),
    ],
)
def test_a_sound_of_unknown_length_makes_the_cost_unknown_unless_sound_is_free(audio: int | None, why: str):
    heard = Rate(model=LARGE, input=MILLION, cached=MILLION, output=MILLION, audio_ms=audio)
    prices = dataclasses.replace(LIST, rates={**LIST.rates, (None, LARGE, None): heard})
    asked = request(LARGE)._replace(audio_known=False)
    assert decide_by_cost(FIVE_CENTS, prices, None, asked, [request(TINY)], None).why == why
    assert may_cost(prices, None, asked) == (3_000 * MILLION if audio == 0 else why.partition(": ")[2])


def test_no_request_goes_to_a_fallback_where_the_length_of_its_sound_makes_the_cost_unknown():
    heard = Rate(model=SMALL, input=MILLION, cached=MILLION, output=3 * MILLION, audio_ms=1)
    free = Rate(model=LARGE, input=10 * MILLION, cached=MILLION, output=30 * MILLION, audio_ms=0)
    prices = dataclasses.replace(LIST, rates={**LIST.rates, (None, SMALL, None): heard, (None, LARGE, None): free})
    at, instead = (request(model)._replace(audio_known=False) for model in (LARGE, SMALL))
    found = decide_by_cost(FIVE_CENTS, prices, None, at, [instead], None)
    assert (found.cheaper, found.trigger) == ((), "cost")
    assert found.why.endswith("no fallback is known to be cheaper; the length of a sound for chat/small is not known")


@pytest.mark.parametrize(("used", "goes"), [(None, False), (0, False), (79, False), (80, True), (250, True)])
def test_by_the_share_of_the_budget_that_is_used(used: int | None, goes: bool):
    conditions = CostConditions(budget_percent=80)
    found = decide_by_cost(conditions, LIST, None, request(LARGE), [request(SMALL)], used)
    assert bool(found.cheaper) is goes
    if goes:
        assert found.trigger == "budget"
        assert found.why == (
            f"it may cost 0.07 USD at chat/large, and its Tenant has used {used} % of its budget, at least the 80 % of "
            "whenBudgetPercent"
        )
    else:
        assert found == ((), None, "")


def test_a_budget_that_is_used_without_prices_changes_nothing_and_says_so():
    conditions = CostConditions(budget_percent=80)
    found = decide_by_cost(conditions, None, None, request(LARGE), [request(SMALL)], 90)
    assert (found.cheaper, found.why) == ((), "whenBudgetPercent has no effect: this gateway knows no price list")


def test_the_budget_counts_where_the_limit_is_in_another_currency():
    conditions = dataclasses.replace(FIVE_CENTS, currency="EUR", budget_percent=80)
    found = decide_by_cost(conditions, LIST, None, request(LARGE), [request(SMALL)], 90)
    assert (found.cheaper, found.trigger) == ((0,), "budget")


def test_targets_without_a_price_for_any_plan():
    targets = [(LARGE, None), (NEW, None), (LARGE, "chat/tuned"), (SMALL, "chat/tuned")]
    assert without_price(LIST, targets) == [NEW, "chat/tuned"]
