"""The storm's judge of routes: one request, one record, one route, one Model; and a broken canary is halted."""

import dataclasses
from pathlib import Path

import orjson
import pytest

from tests.storm import routed
from tests.storm.journals import Attempt, Halt, Journals, Kill, Sequence, UsageRow, read_halts, read_routes
from tests.storm.ledgerrows import HourSum, LedgerContents, LedgerRow, Tokens
from tests.storm.routes import FRONT, NEXT, OUT, SHADOW, TRIAL, asked
from tests.storm.verdict import Findings, judge

STEADY, BURSTY = "storm-steady", "storm-bursty"
ROUTES = asked("storm", STEADY, BURSTY, "storm-legal")
FINAL = UsageRow(
    "shoal-gateway-0", "req", "a", "final", "1970-01-01T00:00:11Z", "answered", 200, 1,
    f"storm/{STEADY}-l40s-48gb-abc", f"storm/{STEADY}", f"storm/{FRONT}", "1970-01-01T00:00:10Z",
)  # fmt: skip
OPEN = dataclasses.replace(FINAL, kind="open", outcome=None, replica=None)
STORED = LedgerRow("req", 0, True, "a", f"storm/{STEADY}", "answered", "final", 7, 5, FINAL.replica, f"storm/{FRONT}")
HALT = Halt(f"storm/{TRIAL}", f"storm/{NEXT}", 100.0, 120.0, 3.0)


def judged(*rows: UsageRow, model: str = FRONT, halts: tuple[Halt, ...] = (), **more: object) -> Findings:
    attempt = Attempt("a", "a", model, "short", 10.0, 11.0, 11.0, 12.0, "answered", "")
    return judge(Journals({"a": attempt}, list(rows), routes=ROUTES, halts=list(halts)), **more)  # pyright: ignore[reportArgumentType]


def test_a_request_to_a_route_with_one_record_of_its_route_and_of_the_model_that_answered_is_good() -> None:
    findings = judged(OPEN, FINAL, contents=LedgerContents([STORED]))
    assert not [text for text in findings.violations if text.startswith("routes")]
    assert judged(OPEN, FINAL).good


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"route": None}, "its final record has the route None"),
        ({"route": f"storm/{TRIAL}"}, f"its final record has the route storm/{TRIAL}"),
        ({"model": f"storm/{BURSTY}", "replica": None}, f"has the Model storm/{BURSTY}, which is no target"),
        ({"replica": f"storm/{NEXT}-l40s-48gb-abc"}, f"the Model storm/{STEADY} and the replica storm/{NEXT}-l40s"),
    ],
)
def test_a_record_of_another_route_or_model_breaks_the_rule(changes: dict[str, str | None], says: str) -> None:
    findings = judged(OPEN, dataclasses.replace(FINAL, **changes))
    assert not findings.good
    assert any(text.startswith("routes: a (req)") and says in text for text in findings.violations)


def test_a_fallback_changes_the_model_of_the_record_and_not_the_route() -> None:
    first = dataclasses.replace(OPEN, model=f"storm/{NEXT}")
    assert judged(first, FINAL).good
    assert not judged(dataclasses.replace(first, route=None), FINAL).good


def test_a_request_that_names_its_model_has_no_route() -> None:
    direct = dataclasses.replace(FINAL, route=None)
    assert judged(dataclasses.replace(OPEN, route=None), direct, model=STEADY).good
    assert not judged(OPEN, FINAL, model=STEADY).good


def test_two_final_records_of_one_request_are_found_as_everywhere() -> None:
    findings = judged(OPEN, FINAL, dataclasses.replace(FINAL, model=f"storm/{NEXT}", replica=None))
    assert "usage: a (req) has 2 final records" in findings.violations


@pytest.mark.parametrize("changes", [{"model": f"storm/{NEXT}"}, {"route": None}, {"route": f"storm/{TRIAL}"}])
def test_the_ledger_has_the_route_and_the_model_of_the_spool(changes: dict[str, str | None]) -> None:
    findings = judged(OPEN, FINAL, contents=LedgerContents([dataclasses.replace(STORED, **changes)]))
    assert any(text.startswith("routes: req: the ledger has") for text in findings.violations)
    # An attempt that nobody got an answer of may have been at another Model.
    attempt = dataclasses.replace(STORED, attempt=1, **changes)
    findings = judged(OPEN, FINAL, contents=LedgerContents([STORED, attempt]))
    assert not [text for text in findings.violations if text.startswith("routes")]


def test_a_broken_canary_must_be_halted() -> None:
    never = dataclasses.replace(HALT, since=None, seconds=90.0)

    def asked(count: int, since: float = 31.0) -> Journals:
        attempts = [
            Attempt(str(at), str(at), TRIAL, "short", since + at / 10, None, None, 200.0, "refused", "")
            for at in range(count)
        ]
        return Journals({one.id: one for one in attempts}, routes=ROUTES, halts=[never])

    assert judge(asked(routed.ENOUGH)).violations == [
        f"routes: the canary storm/{NEXT} of storm/{TRIAL} refused everything for 90 s, of 60 requests, "
        "and was not halted"
    ]
    # Too few requests to tell: the load had ended, or nobody had asked.
    assert judge(asked(routed.ENOUGH - 1)).good
    assert judge(asked(100, since=10.0)).good
    assert judge(asked(100, since=117.0)).good
    assert judged(OPEN, FINAL, halts=(HALT,)).good


@pytest.mark.parametrize(
    ("second", "route", "model", "good"),
    [
        (99, TRIAL, NEXT, True),
        (104, TRIAL, NEXT, True),  # the other gateways hear of it
        (106, TRIAL, NEXT, False),
        (119, TRIAL, NEXT, False),
        (121, TRIAL, NEXT, True),  # it is another canary
        (110, TRIAL, BURSTY, True),
        (110, FRONT, NEXT, True),  # a target of this one, and no canary
    ],
)
def test_a_halted_canary_gets_nothing(second: int, route: str, model: str, good: bool) -> None:
    admitted = f"1970-01-01T00:{second // 60:02d}:{second % 60:02d}Z"
    where = {"route": f"storm/{route}", "model": f"storm/{model}", "admitted": admitted, "replica": None}
    rows = [dataclasses.replace(row, **where) for row in (OPEN, FINAL)]
    findings = judged(*rows, model=route, halts=(HALT,))
    assert findings.good is good
    assert good or "after its halt" in findings.violations[0]


COPY = dataclasses.replace(
    FINAL, request="copy", client_id=None, kind="attempt", model=f"storm/{SHADOW}", replica=f"storm/{SHADOW}-l40s-a",
    mirror_of="req",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"kind": "final"}, "the copy copy of req has a final record"),
        ({"mirror_of": "another"}, "the copy copy of another is one of no request"),
        ({"model": f"storm/{NEXT}"}, f"has the Model storm/{NEXT}"),
        ({"route": f"storm/{TRIAL}"}, f"the route storm/{TRIAL}, its request has storm/{FRONT}"),
        ({"mirror_of": None, "kind": "final"}, f"copy: its final record has the mirror storm/{SHADOW} as its Model"),
    ],
)
def test_a_copy_has_one_record_that_nobody_pays_for(changes: dict[str, str | None], says: str | None) -> None:
    found = judged(OPEN, FINAL, dataclasses.replace(COPY, **changes)).violations
    assert bool(found) == (says is not None)
    assert says is None or any(says in text for text in found)
    assert "routes: the copy copy has 2 records" in judged(OPEN, FINAL, COPY, COPY).violations


def test_what_the_engine_of_a_mirror_was_sent_is_no_lost_request() -> None:
    sent = [
        Sequence(f"copy-{at}", f"{SHADOW}-l40s-a", "boot", 10.0, 12.0, "stop", (7, 5)) for at in range(routed.ENOUGH)
    ]
    attempt = Attempt("a", "a", FRONT, "short", 10.0, 11.0, 11.0, 12.0, "answered", "", usage=(7, 5))

    def judged_of(*rows: UsageRow) -> Findings:
        hours = [HourSum(True, 1, Tokens(7, 5))]
        journals = Journals({"a": attempt}, [OPEN, FINAL, *rows], sent, routes=ROUTES)
        return judge(journals, LedgerContents([STORED], hours))

    one = dataclasses.replace(COPY, request="copy-0")
    account = judged_of(one).account
    assert account is not None
    assert account.lost == []
    none = f"routes: engines of mirrors were sent {routed.ENOUGH} copies, and none has a record"
    assert none in judged_of().violations
    assert none not in judged_of(one).violations


def test_without_routes_nothing_is_judged() -> None:
    attempt = Attempt("a", "a", "m", "short", 10.0, 11.0, 11.0, 12.0, "answered", "")
    assert routed.violations(Journals({"a": attempt}, [OPEN, FINAL]), None) == []


def test_the_journals_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "routes.json").write_bytes(orjson.dumps({k: dataclasses.asdict(v) for k, v in ROUTES.items()}))
    assert read_routes(tmp_path / "routes.json") == ROUTES
    assert read_routes(tmp_path / "none.json") == {}
    lines = [{"at": 1.0, "text": "t"}, {"at": 2.0, "text": "t", "halts": [dataclasses.asdict(HALT)]}]
    (tmp_path / "faults.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert read_halts(tmp_path / "faults.jsonl") == [HALT]


def test_the_line_says_who_answered() -> None:
    attempt = Attempt("a", "a", FRONT, "short", 10.0, 11.0, 11.0, 12.0, "answered", "")
    told = routed.line(Journals({"a": attempt}, [OPEN, FINAL], routes=ROUTES, halts=[HALT]))
    assert told == (
        f"{FRONT} 1 requests, answered by {STEADY} 1; the external target was asked 0 times and killed 0 times; "
        "canaries broken 1, halted 1; copies at mirrors 0, recorded 0"
    )


# --- an adapter as a target -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "adapter", "says"),
    [
        (("storm-legal",), "storm/storm-legal", None),
        (("",), None, None),
        (("", "storm-legal"), None, None),
        ((), "storm/storm-legal", None),
        (("storm-legal",), None, "has the adapter None, and the answer has the words of storm-legal"),
        (("",), "storm/storm-legal", "has the adapter storm/storm-legal, and the answer has the words of the base"),
        (("",), "storm/storm-poet", "has the adapter storm/storm-poet, which is no target"),
    ],
)
def test_the_words_of_an_answer_are_those_of_the_adapter_in_its_record(
    weights: tuple[str, ...], adapter: str | None, says: str | None
) -> None:
    attempt = Attempt("a", "a", FRONT, "short", 10.0, 11.0, 11.0, 12.0, "answered", "", weights=weights)
    rows = [OPEN, dataclasses.replace(FINAL, adapter=adapter)]
    found = routed.violations(Journals({"a": attempt}, rows, routes=ROUTES), None)
    assert bool(found) == (says is not None), found
    assert says is None or any(says in text for text in found)


# --- an external target -----------------------------------------------------------------------------------------------

THEIRS = f"storm/{OUT}/outside"
OUT_FINAL = dataclasses.replace(FINAL, replica=None, model=THEIRS, route=f"storm/{OUT}")
OUT_STORED = dataclasses.replace(STORED, replica=None, model=THEIRS, route=f"storm/{OUT}")
GIVEN = Sequence("their-id", "storm-outside", "b1", 10.1, 11.9, "length", (7, 5))


def outside(*given: Sequence, stored: tuple[LedgerRow, ...] = (OUT_STORED,)) -> Findings:
    attempt = Attempt("a", "a", OUT, "short", 10.0, 11.0, 11.0, 12.0, "answered", "", usage=(7, 5))
    opened = dataclasses.replace(OUT_FINAL, kind="open", outcome=None)
    hours = [HourSum(True, sum(row.attempt == 0 for row in stored), Tokens.sum(row.tokens for row in stored))]
    contents = LedgerContents(list(stored), hours)
    # An engine of the fleet has its own journal: it had no part in this.
    own = Sequence("other", f"{STEADY}-l40s-48gb-abc", "b2", 1.0, 2.0, "length", (3, 3))
    found = Journals({"a": attempt}, [opened, OUT_FINAL], [own], routes=ROUTES, outside=list(given))
    return judge(found, contents)


def test_an_answer_of_the_external_target_is_in_its_own_journal_and_in_no_engines() -> None:
    findings = outside(GIVEN)
    assert not [text for text in findings.violations if "other (" not in text and "other" not in text]
    assert findings.account is not None
    assert (findings.account.outside, findings.account.billed) == (Tokens(7, 5), Tokens())
    assert any("billed, of external targets" in line for line in findings.account.lines())


@pytest.mark.parametrize("given", [(), (dataclasses.replace(GIVEN, tokens=(7, 4)),)])
def test_a_record_of_an_answer_that_the_external_target_did_not_give_is_found(given: tuple[Sequence, ...]) -> None:
    assert f"routes: 1 of 1 answers of {THEIRS} are not in its own journal" in outside(*given).violations


def test_a_kill_of_the_external_target_leaves_one_answer_without_its_end() -> None:
    cut = dataclasses.replace(GIVEN, finished=None, outcome=None, tokens=None)
    assert not [text for text in outside(cut).violations if text.startswith("routes")]


def test_many_requests_to_the_external_target_without_a_record_are_found() -> None:
    findings = outside(*[GIVEN] * 60, stored=())
    assert f"routes: 60 requests came to {THEIRS}, and none of its answers is recorded" in findings.violations


@pytest.mark.parametrize(("killed", "outcome"), [(True, "failed"), (False, "lost")])
def test_a_broken_answer_of_the_external_target_needs_its_kill(killed: bool, outcome: str) -> None:
    attempt = Attempt("a", "a", OUT, "stream", 10.0, 11.0, 11.0, 12.0, "failed", "external_broken")
    kills = [Kill("external", "storm-outside", 11.5, 16.0, "outside_killed")] if killed else []
    rows = [dataclasses.replace(OUT_FINAL, outcome="failed")]
    found = judge(Journals({"a": attempt}, rows, kills=kills, routes=ROUTES)).verdicts["a"]
    assert found.outcome == outcome
    # The kill excuses no answer of a Model.
    rows = [dataclasses.replace(FINAL, route=f"storm/{OUT}", outcome="failed")]
    assert judge(Journals({"a": attempt}, rows, kills=kills, routes=ROUTES)).verdicts["a"].outcome == "lost"
