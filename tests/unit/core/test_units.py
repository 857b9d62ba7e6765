"""Units beside tokens: documents, images, seconds of audio."""

import pytest

from shoal.api.ledger import Prices, Rate
from shoal.core.rating.bill import BilledCounts, Usage, amount, bill
from shoal.core.rating.files import parse
from shoal.core.rating.money import UNIT, price_of_seconds
from shoal.core.rating.price import RateTable
from shoal.core.rating.problems import PricesRefused
from shoal.core.rating.schedule import InForce, Schedule, dropped
from shoal.core.rating.units import UNITS, quantity
from shoal.metering.meter import parse_usage, sum_choices

LIST = """\
currency: EUR
effectiveFrom: 2026-11-01
prices:
  - {model: m/rerank, input: "1", cached: "1", output: "1", documents: "2000"}
  - {model: m/whisper, input: 0, cached: 0, output: 0, audioSeconds: "100.001"}
  - {model: m/old, input: "1", cached: "1", output: "1"}
"""
_DOCUMENTS, _IMAGES, _AUDIO = UNITS


def schedule(text: str = LIST) -> Schedule:
    prices = parse("list.yaml", text).prices
    return Schedule((InForce(0, None, prices, RateTable.of(prices)),))


def used(model: str, **counts: int) -> Usage:
    return Usage(0, None, model, None, BilledCounts(**counts))


def test_documents_cost_in_addition_to_their_tokens() -> None:
    (line,) = bill("acme", "2026-11", [used("m/rerank", requests=1, input=1_000, documents=300)], schedule()).lines
    assert line.amount == (1_000 * UNIT // 10**6) + (300 * 2000 * UNIT // 10**6)
    assert (line.cents, line.unpriced_units) == (60, ())


def test_audio_is_exact_to_a_millisecond() -> None:
    (line,) = bill(
        "acme", "2026-11", [used("m/whisper", audio_ms=1), used("m/whisper", audio_ms=3_199)], schedule()
    ).lines
    # 3.2 s at 100.001 for a million seconds.
    assert line.amount == 320_003_200 == 32 * 100_001 * UNIT // 10 // 10**9
    assert price_of_seconds(line.rate.audio_ms or 0) == "100.001"


def test_units_without_a_price_are_told_and_cost_nothing_known() -> None:
    """A price list of before has prices of tokens alone: it stays valid, and bills say what it has no price for."""
    found = bill(
        "acme",
        "2026-11",
        [used("m/old", input=10, documents=3, images=2, audio_ms=5_000), used("m/new", requests=1, audio_ms=700)],
        schedule(),
    )
    (line,) = found.lines
    assert line.amount == 10 * UNIT // 10**6
    assert [unit.price for unit in line.unpriced_units] == ["documents", "images", "audioSeconds"]
    assert [(one.model, one.counts.audio_ms) for one in found.unpriced] == [("m/new", 700)]


def test_a_price_of_zero_is_a_price() -> None:
    text = LIST.replace('documents: "2000"', "documents: 0")
    (line,) = bill("acme", "2026-11", [used("m/rerank", documents=3)], schedule(text)).lines
    assert (line.amount, line.unpriced_units) == (0, ())


def test_the_same_prices_of_tokens_with_other_units_make_two_lines() -> None:
    rates = [Rate(model="m/a", input=1, cached=1, output=1, documents=documents) for documents in (None, 0, 7)]
    lists = [Prices(list=str(at), currency="EUR", rates=(rate,)) for at, rate in enumerate(rates)]
    prices = Schedule(tuple(InForce(at, at + 1, one, RateTable.of(one)) for at, one in enumerate(lists)))
    found = bill(
        "acme", "2026-11", [Usage(at, None, "m/a", None, BilledCounts(documents=1)) for at in range(3)], prices
    )
    assert [(line.rate.documents, line.amount, bool(line.unpriced_units)) for line in found.lines] == [
        (None, 0, True),
        (0, 0, False),
        (7, 7, False),
    ]


def test_an_amount_of_everything_is_the_sum_of_its_parts() -> None:
    rate = Rate(model="*", input=2, cached=1, output=5, documents=11, images=13, audio_ms=17)
    counts = BilledCounts(input=10, cached=4, output=3, documents=2, images=3, audio_ms=4, image_tokens=9, accepted=2)
    assert amount(counts, rate, "Fresh") == 6 * 2 + 4 + 15 + 22 + 39 + 68


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"100.001"', '"100.0001"', "list.yaml:5: `prices.audioSeconds`: '100.0001' has more than 3 decimals"),
        ('"100.001"', "1e3", "list.yaml:5: `prices.audioSeconds`: '1e3' is not a price"),
        ('"2000"', "-1", "list.yaml:4: `prices.documents`: '-1' is not a price"),
        ("documents", "document", "list.yaml:4: unknown field `document`: did you mean `documents`?"),
        ("audioSeconds", "audio_seconds", "list.yaml:5: unknown field `audio_seconds`: did you mean `audioSeconds`?"),
    ],
)
def test_a_mistake_is_refused_with_its_line(before: str, after: str, message: str) -> None:
    with pytest.raises(PricesRefused) as refused:
        parse("list.yaml", LIST.replace(before, after, 1))
    assert message in str(refused.value)


def test_a_unit_that_the_next_list_forgets_is_told() -> None:
    later = LIST.replace("2026-11-01", "2026-12-01").replace(', documents: "2000"', "")
    (found,) = dropped([parse("one.yaml", LIST), parse("two.yaml", later)])
    assert found.message == (
        "no price of documents for plan -, model m/rerank, adapter -, which one.yaml has: they will not be billed"
    )


def test_quantities_are_not_rounded() -> None:
    assert [quantity(_AUDIO, ms) for ms in (0, 1, 3_200, 60_000)] == ["0", "0.001", "3.2", "60"]
    assert quantity(_DOCUMENTS, 12) == "12"


def test_parts_of_token_counts_are_what_the_engine_tells() -> None:
    usage = (
        b'{"prompt_tokens":42,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":14,"image_tokens":16},'
        b'"completion_tokens_details":{"accepted_prediction_tokens":5}}'
    )
    found = parse_usage(usage)
    assert (found["imageTokens"], found["audioTokens"], found["acceptedTokens"]) == (16, None, 5)
    assert sum_choices({0: usage, 1: usage}, 2)["imageTokens"] == 16, "two answers share a prompt"
    assert sum_choices({0: usage, 1: usage}, 2)["acceptedTokens"] == 10


def test_a_part_is_never_more_than_the_whole() -> None:
    usage = b'{"prompt_tokens":4,"completion_tokens":1,"prompt_tokens_details":{"image_tokens":16,"audio_tokens":-1}}'
    found = parse_usage(usage)
    assert (found["imageTokens"], found["audioTokens"]) == (4, None)
