"""The judge of invariant 5: what the ledger has, beside what clients and engines saw."""

from dataclasses import replace

import pytest

from tests.storm.journals import Attempt, Kill, Sequence, UsageRow
from tests.storm.ledgerrows import Booked, HourSum, LedgerContents, LedgerRow, Reading, Tokens
from tests.storm.metered import Account, account

COUNTS = Tokens(7, 5)
POD = "storm-steady-abc"
ROW = LedgerRow("r", 0, True, "a", "storm/steady", "answered", "final", 7, 5, f"storm/{POD}")
SEEN = Attempt("a", "a", "m", "stream", 10.0, 11.0, 11.0, 12.0, "answered", "", 200, "r", (7, 5))
WORK = Sequence("r", POD, "b", 10.5, 11.9, "length", (7, 5))
KILL = Kill("gateway", "shoal-gateway-0", 11.5, 13.0, "gateway_killed")


def contents(*rows: LedgerRow, heard: Tokens = COUNTS, requests: int | None = None) -> LedgerContents:
    """Whose sums are those of the rows."""
    sums = [
        HourSum(
            billed,
            sum(1 for row in rows if row.ended and row.attempt == 0 and row.billed == billed),
            Tokens.sum(row.tokens for row in rows if row.ended and row.billed == billed),
        )
        for billed in (True, False)
    ]
    if requests is not None:
        sums[0] = replace(sums[0], requests=requests)
    return LedgerContents(list(rows), sums, [Reading(f"storm/{POD}", "boot", "storm/steady", heard)])


def judged(
    kept: LedgerContents, *work: Sequence, seen: Attempt | None = SEEN, kills: tuple[Kill, ...] = (), **more: object
) -> Account:
    attempts = {seen.id: seen} if seen else {}
    return account(kept, attempts, work, kills=kills, **more)  # pyright: ignore[reportArgumentType]


def test_one_row_with_the_engines_counts_is_good() -> None:
    found = judged(contents(ROW), WORK)
    assert found.violations() == []
    assert (found.engines, found.billed, found.unattributed) == ((7, 5), (7, 5), (0, 0))
    assert found.share == 0
    assert found.lines()[-1].startswith("records lost 0, double 0, wrong 0; unattributed 0.000%")


@pytest.mark.parametrize("witness", ["client", "spool", "engine", "open row"])
def test_a_request_that_anybody_saw_needs_a_final_row(witness: str) -> None:
    spools = [UsageRow("g", "r", "a", "open", "", None, None, 0, None)] if witness == "spool" else []
    rows = [replace(ROW, ended=False, source="none", input=None, output=None)] if witness == "open row" else []
    work = [replace_tokens(WORK, None)] if witness == "engine" else []
    found = judged(contents(*rows, heard=Tokens()), *work, seen=SEEN if witness == "client" else None, spools=spools)
    assert len(found.lost) == 1
    assert found.lost[0].startswith("r (")
    assert not found.good


def replace_tokens(work: Sequence, tokens: tuple[int, int] | None) -> Sequence:
    return Sequence(work.rid, work.engine, work.boot, work.asked, work.finished, work.outcome, tokens)


def test_who_was_refused_before_anything_was_kept_needs_no_row() -> None:
    refused = Attempt("a", "a", "m", "short", 10.0, 11.0, 11.0, 11.0, "refused", "", 503, "r")
    assert judged(contents(heard=Tokens()), seen=refused).violations() == []


def test_what_shoal_itself_asked_needs_no_row_and_engines_count_it() -> None:
    own = Sequence("shoal-canary-1", POD, "b", 10.6, 10.9, "length", (7, 5))
    assert judged(contents(ROW, heard=Tokens(14, 10)), WORK, own).good
    assert judged(contents(ROW, heard=Tokens(14, 10)), WORK, replace(own, rid="r2")).lost == [
        "r2 (an engine had it) has no row and no final one"
    ]


def test_two_final_rows_are_double_wherever_they_show() -> None:
    both = judged(contents(ROW, ROW, heard=Tokens(7, 5)), WORK)
    assert any("2 final rows" in text for text in both.double)
    again = judged(
        contents(ROW, replace(ROW, request="r2")), WORK, Sequence("r2", POD, "b", 1.0, 2.0, "length", (7, 5))
    )
    assert any("client a has 2 requests" in text for text in again.double)


def test_sums_that_count_a_row_twice_are_double() -> None:
    kept = contents(ROW)
    kept.hours[0] = HourSum(True, 2, Tokens(14, 10))
    found = judged(kept, WORK)
    assert any("the hours' sums (14, 10)" in text for text in found.double)
    assert any("rows are of 1 requests, the hours' sums of 2" in text for text in found.double)


def test_final_counts_are_the_engines_own() -> None:
    found = judged(contents(replace(ROW, output=4)), WORK)
    assert any("its engine says (7, 5)" in text for text in found.wrong)
    assert any("its client read (7, 5), the ledger says (7, 4)" in text for text in found.wrong)


def test_running_counts_are_at_most_the_engines_and_the_rest_is_unattributed() -> None:
    cut = replace(ROW, outcome="cut", source="continuous", output=3)
    seen = Attempt("a", "a", "m", "stream", 10.0, 11.0, 11.0, 12.0, "broken", "", 200, "r")
    found = judged(contents(cut), WORK, seen=seen, kills=(KILL,))
    assert found.violations() == []
    assert found.unattributed == (0, 2)
    assert found.lines()[0] == "SIGKILLs 1 (gateway 1)"
    more = judged(contents(replace(cut, output=6)), WORK, seen=seen, kills=(KILL,))
    assert any("continuous (7, 6)" in text for text in more.wrong)


def test_an_answer_may_be_cut_in_the_ledger_only_where_a_gateway_was_killed() -> None:
    cut = replace(ROW, outcome="cut", source="none", input=None, output=None)
    assert judged(contents(cut), WORK, kills=(KILL,)).good
    found = judged(contents(cut), WORK)
    assert found.wrong == ["r: its client has the answer, the ledger says cut"]


def test_attempts_are_not_billed() -> None:
    lost = replace(ROW, attempt=1, source="continuous", output=2)
    work = Sequence("r", POD, "b", 9.0, 9.5, "abort", (7, 3))
    found = judged(contents(lost, ROW, heard=Tokens(14, 8)), work, WORK)
    assert found.violations() == []
    assert (found.billed, found.attempts, found.unattributed) == ((7, 5), (7, 2), (7, 3))


def test_no_request_has_more_than_was_computed_for_it() -> None:
    found = judged(contents(replace(ROW, attempt=1), ROW, heard=Tokens(7, 5)), WORK)
    assert any("(14, 10) in all its rows, (7, 5) computed" in text for text in found.wrong)


def test_of_a_killed_engine_the_last_reading_counts() -> None:
    found = judged(contents(ROW, heard=Tokens(7, 4)), WORK)
    assert found.violations() == []
    assert found.unattributed == (0, -1)
    more = judged(contents(ROW, heard=Tokens(700, 5)), WORK)
    assert any(text.startswith(f"{POD}: the ledger heard of (636") for text in more.wrong)


def test_an_engine_that_counts_while_requests_run_may_have_counted_what_died_with_it() -> None:
    at_its_end = Sequence("other", POD, "b", 11.0, live=True)
    assert judged(contents(ROW, heard=Tokens(700, 5)), WORK, at_its_end).wrong == []
    at_another = replace(at_its_end, live=False)
    assert judged(contents(ROW, heard=Tokens(700, 5)), WORK, at_another).wrong != []


def test_the_ledger_has_heard_the_last_of_engines_that_live() -> None:
    found = judged(contents(ROW), WORK, counted=Tokens(9, 9), idle=Tokens(2, 4))
    assert found.unattributed == (2, 4)
    assert found.wrong == ["the ledger heard of (7, 5) tokens, the engines say (9, 9)"]
    kept = contents(ROW, heard=Tokens(9, 9))
    assert judged(kept, WORK, counted=Tokens(9, 9), idle=Tokens(2, 4)).violations() == []
    assert judged(kept, WORK, counted=Tokens(9, 9)).wrong == ["engines counted (9, 9) tokens, their journals (7, 5)"]


def test_what_was_kept_aside_is_wrong() -> None:
    kept = contents(ROW)
    kept.aside.append("data.tenant: Field required")
    assert judged(kept, WORK).wrong == ["kept aside: data.tenant: Field required"]


def test_what_the_ledger_answers_is_what_it_has() -> None:
    kept = contents(ROW, heard=Tokens(9, 9))
    kept.booked = Booked(Tokens(9, 9), COUNTS, Tokens(2, 4), 1)
    assert judged(kept, WORK, counted=Tokens(9, 9), idle=Tokens(2, 4)).violations() == []
    kept.booked = Booked(Tokens(9, 9), Tokens(14, 10), Tokens(-5, -1), 2)
    assert judged(kept, WORK, counted=Tokens(9, 9), idle=Tokens(2, 4)).wrong == [
        "billed: the ledger says (14, 10), it is (7, 5)",
        "unattributed: the ledger says (-5, -1), it is (2, 4)",
        "the ledger tells gateways of 2 requests, it has 1",
    ]
