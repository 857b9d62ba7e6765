"""Price lists: what is read from a file, and what is refused with its line."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from shoal.core.rating.files import PriceList, parse
from shoal.core.rating.problems import PricesRefused
from shoal.core.rating.schedule import always, dropped, schedule

EXAMPLES = Path(__file__).parents[3] / "examples" / "prices"

GOOD = """\
currency: EUR
effectiveFrom: 2026-11-01
prices:
  - model: chat/llama
    input: "3"
    cached: "0.30"
    output: 15.000001
  - plan: gold
    model: "*"
    adapter: "*"
    input: 0
    cached: "0.000001"
    output: "999999999"
"""


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def a_list(start: str, file: str | None = None, more: str = "", currency: str = "EUR", model: str = "m/a") -> PriceList:
    row = f"- {{model: {model}, input: 1, cached: 1, output: 1}}"
    return parse(file or f"{start}.yaml", f"currency: {currency}\neffectiveFrom: {start}\n{more}prices:\n{row}\n")


def refusal(text: str) -> list[str]:
    with pytest.raises(PricesRefused) as refused:
        parse("list.yaml", text)
    return str(refused.value).splitlines()


def test_prices_are_read_as_they_are_written() -> None:
    found = parse("prices/2026-11.yaml", GOOD)
    assert (found.name, found.prices.currency, found.prices.unknown_cached) == ("2026-11", "EUR", "Fresh")
    assert (found.starts, found.ends) == (ms("2026-11-01"), None)
    first, second = found.prices.rates
    assert (first.plan, first.model, first.adapter) == (None, "chat/llama", None)
    assert (first.input, first.cached, first.output) == (3_000_000, 300_000, 15_000_001)
    assert (second.plan, second.model, second.adapter) == ("gold", "*", "*")
    assert (second.input, second.cached, second.output) == (0, 1, 999_999_999_000_000)


@pytest.mark.parametrize(
    ("start", "moment"),
    [
        ("2026-11-01T06:00:00Z", "2026-11-01T06:00"),
        ("2026-11-01T06:00:00+02:00", "2026-11-01T04:00"),
        ("2026-11-01T06:00", "2026-11-01T06:00"),
    ],
)
def test_a_list_may_begin_within_a_day(start: str, moment: str) -> None:
    assert a_list(start, "x.yaml").starts == ms(moment)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("currency: EUR", "curency: EUR", "list.yaml:1: unknown field `curency`: did you mean `currency`?"),
        ("currency: EUR", "currency: euro", "list.yaml:1: `currency`: 'euro' is no code of ISO 4217, such as EUR"),
        ("effectiveFrom: 2026-11-01", "effectiveFrom: soon", "list.yaml:2: `effectiveFrom`: 'soon' is no date"),
        (
            "2026-11-01",
            "2026-11-01T06:30:00Z",
            "list.yaml:2: `effectiveFrom`: '2026-11-01T06:30:00Z' is not on the hour",
        ),
        ("2026-11-01", "2026-11-01T06:00:00+05:30", "is not on the hour (UTC)"),
        ("2026-11-01", "0001-01-01T00:00:00+14:00", "is out of range"),
        ("2026-11-01", "9999-12-31T23:00:00-14:00", "is out of range"),
        ('input: "3"', 'input: "-3"', "list.yaml:5: `prices.input`: '-3' is not a price"),
        ('input: "3"', "input: 3e2", "list.yaml:5: `prices.input`: '3e2' is not a price"),
        ('input: "3"', "input: .5", "list.yaml:5: `prices.input`: '.5' is not a price"),
        ('input: "3"', "input: 1.", "list.yaml:5: `prices.input`: '1.' is not a price"),
        ('input: "3"', "input: ٣", "list.yaml:5: `prices.input`: '٣' is not a price"),
        ('input: "3"', "input:", "list.yaml:5: `prices.input`"),
        ('input: "3"', "input: [3]", "list.yaml:5: `prices.input`"),
        ('cached: "0.30"', 'cached: "0.0000001"', "list.yaml:6: `prices.cached`: '0.0000001' has more than 6 decimals"),
        ('output: "999999999"', 'output: "9999999999"', "list.yaml:13: `prices.output`: '9999999999' is too large"),
        ('    cached: "0.30"\n', "", "list.yaml:4: `cached` is missing"),
        ('input: "3"', 'inputs: "3"', "list.yaml:5: unknown field `inputs`: did you mean `input`?"),
        (
            "model: chat/llama",
            "model: llama",
            "list.yaml:4: `prices.model`: 'llama' is neither namespace/name nor \"*\"",
        ),
        ("plan: gold", 'plan: "*"', "list.yaml:8: `plan`: leave it out for every plan"),
        ("plan: gold", "plan: Gold Plan", "list.yaml:8: `prices.plan`"),
        ("currency: EUR", "currency: EUR\ncurrency: EUR", "list.yaml:2: `currency` stands here twice"),
        ("currency: EUR", "unknownCached: Maybe\ncurrency: EUR", "list.yaml:1: `unknownCached`"),
        ("currency: EUR", "effectiveUntil: 2026-10-01\ncurrency: EUR", "list.yaml:1: `effectiveUntil` is not after"),
        ("  - plan: gold", "   - plan: gold", "list.yaml:8: not YAML"),
    ],
)
def test_a_mistake_is_refused_with_its_line(before: str, after: str, message: str) -> None:
    assert before in GOOD
    assert message in "\n".join(refusal(GOOD.replace(before, after, 1)))


@pytest.mark.parametrize("text", ["", "[]", "just words", "- currency: EUR", "{" * 3000])
def test_what_is_no_price_list_at_all_is_refused(text: str) -> None:
    assert refusal(text)[0].startswith("list.yaml:1: ")


@pytest.mark.parametrize(
    ("prices", "told"),
    [
        ("[]", ["list.yaml:3: `prices` is empty: a price list has at least one price"]),
        ("{}", ["list.yaml:3: `prices` is a mapping, and must be a list of prices"]),
        ("none", ["list.yaml:3: `prices` is 'none', and must be a list of prices"]),
        ("", ["list.yaml:3: `prices` is nothing, and must be a list of prices"]),
        (
            "[3, {model: m/a, input: 1, cached: 1, output: 1}]",
            ["list.yaml:3: `prices`: '3' is no price: write `model`, `input`, `cached` and `output` of each"],
        ),
        # One mistake is told once: a list whose every row is wrong is not empty.
        ("[{model: m/a, input: 1, output: 1}]", ["list.yaml:3: `cached` is missing"]),
        (
            "[{model: [m/a], input: 1, cached: 1, output: 1}]",
            ['list.yaml:3: `prices.model`: a list is neither namespace/name nor "*"'],
        ),
        (
            "[{plan: a b, model: m/a, input: 1, cached: 1, output: 1}]",
            ["list.yaml:3: `prices.plan`: 'a b' is no name of at most 63 letters, digits and '-'"],
        ),
    ],
)
def test_a_bad_list_is_told_in_words_of_price_lists(prices: str, told: list[str]) -> None:
    assert refusal(f"currency: EUR\neffectiveFrom: 2026-11-01\nprices: {prices}\n") == told


def test_another_word_where_two_are_known_is_told_with_them() -> None:
    [told] = refusal("unknownCached: Maybe\n" + GOOD)
    assert told == "list.yaml:1: `unknownCached`: 'Maybe' is none of 'Fresh' or 'Cached'"


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    told = refusal(GOOD.replace("EUR", "E").replace('"3"', "x").replace("output: 15.000001", "out: 1"))
    assert [line.split(" ", 1)[0] for line in told] == ["list.yaml:1:", "list.yaml:4:", "list.yaml:5:", "list.yaml:7:"]


def test_the_same_price_twice_is_refused_in_the_line_of_the_second() -> None:
    assert refusal(GOOD + '  - {model: chat/llama, input: "4", cached: "1", output: "1"}\n') == [
        "list.yaml:14: a second price for the plan, model and adapter of line 4"
    ]


def test_each_list_counts_until_the_next() -> None:
    found = schedule([a_list("2026-11-15"), a_list("2026-10-01")])
    assert found.at(ms("2026-09-30T23:00")) is None
    for moment, name in (
        ("2026-10-01", "2026-10-01"),
        ("2026-11-14T23:59", "2026-10-01"),
        ("2026-11-15", "2026-11-15"),
        ("2036-01-01", "2026-11-15"),
    ):
        in_force = found.at(ms(moment))
        assert in_force is not None
        assert in_force.prices.list == name
    assert found.changes(ms("2026-11-01"), ms("2026-12-01")) == [ms("2026-11-15")]
    assert found.changes(ms("2026-11-15"), ms("2026-12-01")) == []


def test_an_end_may_be_said_and_must_be_the_next_list_s_beginning() -> None:
    until = a_list("2026-10-01", more="effectiveUntil: 2026-11-01\n")
    assert schedule([until]).at(ms("2026-11-01")) is None
    assert schedule([until, a_list("2026-11-01")]).at(ms("2026-11-01")) is not None


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            [a_list("2026-10-01", more="effectiveUntil: 2026-11-02\n"), a_list("2026-11-01")],
            "2026-10-01.yaml:3: overlaps 2026-11-01.yaml: ends 2026-11-02T00:00Z, when that counts",
        ),
        (
            [a_list("2026-10-01", more="effectiveUntil: 2026-10-31\n"), a_list("2026-11-01")],
            "2026-10-01.yaml:3: leaves a gap: ends 2026-10-31T00:00Z, and 2026-11-01.yaml begins 2026-11-01T00:00Z",
        ),
        (
            [a_list("2026-10-01", "a.yaml"), a_list("2026-10-01", "b.yaml")],
            "b.yaml:2: begins when a.yaml does, 2026-10-01T00:00Z",
        ),
        (
            [a_list("2026-10-01"), a_list("2026-11-01", currency="USD")],
            "2026-11-01.yaml:1: prices in USD, but those of 2026-10-01.yaml are in EUR",
        ),
        (
            [a_list("2026-10-01", more="name: x\n"), a_list("2026-11-01", more="name: x\n")],
            "2026-11-01.yaml:3: the name x is that of 2026-10-01.yaml too",
        ),
    ],
)
def test_lists_that_do_not_go_together_are_refused_with_the_line(lists: list[PriceList], message: str) -> None:
    for order in (lists, lists[::-1]):
        with pytest.raises(PricesRefused) as refused:
            schedule(order)
        assert str(refused.value).startswith(message)


def test_a_price_that_the_next_list_forgets_is_told() -> None:
    (found,) = dropped([a_list("2026-10-01"), a_list("2026-11-01", model="m/b")])
    assert str(found) == (
        "2026-11-01.yaml:3: no price for plan -, model m/a, adapter -, which 2026-10-01.yaml has: such usage will not "
        "be billed"
    )


def test_a_price_that_a_more_general_one_replaces_is_told_with_it() -> None:
    (found,) = dropped([a_list("2026-10-01"), a_list("2026-11-01", model='"*"')])
    assert str(found) == (
        "2026-11-01.yaml:3: no own price for plan -, model m/a, adapter -, which 2026-10-01.yaml has: that of plan -, "
        "model *, adapter - applies"
    )


def test_a_list_without_prices_is_refused_in_plain_words() -> None:
    text = "currency: EUR\neffectiveFrom: 2026-10-01\nprices: []\n"
    assert refusal(text) == ["list.yaml:3: `prices` is empty: a price list has at least one price"]


def test_no_lists_at_all_are_a_schedule_without_prices() -> None:
    assert schedule([]).at(0) is None
    assert schedule([]).currency is None


def test_a_list_can_be_taken_for_any_time() -> None:
    found = always(a_list("2026-10-01")).at(ms("2020-01-01"))
    assert found is not None
    assert found.prices.list == "2026-10-01"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_right(path: Path) -> None:
    parse(path.name, path.read_text())
