"""The storm's judge: each way in which a request can end, and what it makes of it."""

from dataclasses import replace
from typing import Any

import pytest

from tests.storm.journals import (
    WRONG,
    Attempt,
    EngineLife,
    Journals,
    Kill,
    Residency,
    Scale,
    Sequence,
    SilentPeriod,
    UsageRow,
)
from tests.storm.story import stories
from tests.storm.verdict import Findings, judge
from tests.storm.wire import LOST_TWICE

GATEWAY, ENGINE = "shoal-gateway-0", "storm-steady-abc"


def attempt(outcome: str | None, *, first: float | None = None, head: float | None = None, ask: str = "a") -> Attempt:
    ended = None if outcome is None else 12.0
    return Attempt("a", ask, "m", "stream", 10.0, first, head or first, ended, outcome, "as it was")


def row(kind: str, outcome: str | None = None, client: str = "a") -> UsageRow:
    at = "1970-01-01T00:00:11Z"
    return UsageRow(GATEWAY, "req", client, kind, at, outcome, None, 1, f"storm/{ENGINE}" if kind == "final" else None)


ACCEPTED = (row("open"), row("final", "answered"))


def judged(
    one: Attempt, *, rows: tuple[UsageRow, ...] = ACCEPTED, kills: tuple[Kill, ...] = (), **more: Any
) -> Findings:
    return judge(Journals({one.id: one}, list(rows), kills=list(kills), **more))


def killed(what: str, since: float = 11.5, until: float = 13.0) -> Kill:
    pod = GATEWAY if what == "gateway" else ENGINE
    return Kill(what, pod, since, until, f"{what}_killed")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("outcome", ["answered", "refused", "cancelled"])
def test_what_the_client_saw_whole_is_taken_as_it_is(outcome: str) -> None:
    findings = judged(attempt(outcome))
    assert findings.totals == {outcome: 1}
    assert findings.good


def test_an_answer_of_other_weights_is_lost_and_counted_as_wrong() -> None:
    right = replace(attempt("answered"), model="support")
    wrong = replace(attempt("lost"), id="b", ask="b", model="support", why=f"{WRONG} after `answered`: 'the base'")
    mute = replace(attempt("lost"), id="c", ask="c", why="no answer")
    attempts = {one.id: one for one in (right, wrong, mute)}
    findings = judge(Journals(attempts, [*ACCEPTED]))
    assert findings.totals == {"answered": 1, "lost": 2}
    assert (findings.wrong, findings.good) == (1, False)
    assert findings.weights(attempts, ["support"]) == "answers 1, of adapters 1, wrong 1"


def test_a_failed_answer_needs_the_kill_of_its_engine() -> None:
    one = attempt("failed", first=11.0)
    assert judged(one, kills=(killed("engine"),)).totals == {"failed": 1}
    for kills in ((), (killed("gateway"),), (killed("engine", 1.0, 2.0),), (killed("engine", 20.0, 30.0),)):
        findings = judged(one, kills=kills)
        assert findings.totals == {"lost": 1}
        assert not findings.good
        assert "failed without a kill" in findings.verdicts["a"].why


def test_a_request_that_was_lost_twice_needs_two_kills_of_engines_that_had_it() -> None:
    one = replace(attempt("failed", head=11.9), why=LOST_TWICE)
    tries = [Sequence("req", ENGINE, "b", 10.5), Sequence("req", "another", "c", 11.0)]
    first, second = killed("engine", 10.6, 10.9), Kill("engine", "another", 11.5, 13.0, "engine_killed")
    assert judged(one, kills=(first, second), sequences=tries).totals == {"failed": 1}
    elsewhere, before = replace(second, pod="a third"), replace(second, since=1.0, until=2.0)
    for kills in (
        (),
        (first,),
        (second,),
        (first, elsewhere),
        (first, before),
        (first, replace(second, what="gateway")),
    ):
        findings = judged(one, kills=kills, sequences=tries)
        assert findings.totals == {"lost": 1}
        assert LOST_TWICE in findings.verdicts["a"].why
    # Where it had been on one of the two only, the other's end says nothing of it.
    assert judged(one, kills=(first, second), sequences=tries[:1]).totals == {"lost": 1}


def test_a_cut_answer_needs_the_kill_of_its_own_gateway() -> None:
    for one in (attempt("broken"), attempt("broken", first=11.0)):
        assert judged(one, kills=(killed("gateway"),)).totals == {"cut": 1}
        other = Kill("gateway", "shoal-gateway-1", 11.5, 13.0, "gateway_killed")
        assert judged(one, kills=(other,)).totals == {"lost": 1}
        # A client that gets no CPU hears late of it. One that asked later had another process, of the same name.
        late = replace(one, ended=30.0)
        assert judged(late, kills=(killed("gateway", 11.5, 13.0),)).totals == {"cut": 1}
        assert judged(replace(late, sent=14.0), kills=(killed("gateway", 11.5, 13.0),)).totals == {"lost": 1}


def test_a_broken_body_after_the_first_byte_is_failed_when_its_engine_was_killed() -> None:
    assert judged(attempt("broken", first=11.0), kills=(killed("engine"),)).totals == {"failed": 1}
    # Before the first byte another replica had to take it.
    assert judged(attempt("broken"), kills=(killed("engine"),)).totals == {"lost": 1}


def test_a_connection_that_broke_before_any_gateway_accepted_the_request_is_not_counted() -> None:
    findings = judged(attempt("broken"), rows=())
    assert findings.line() == "sent 0, answered 0, refused 0, cancelled 0, failed 0, cut 0, lost 0"
    assert judged(attempt("broken"), rows=(row("open"), row("final", "cut"))).totals == {"lost": 1}


def test_who_is_never_accepted_is_lost() -> None:
    tries = [Attempt(f"a.{n}", "a", "m", "short", 10.0, None, None, 12.0, "broken", "reset") for n in range(3)]
    findings = judge(Journals({t.id: t for t in tries}))
    assert findings.totals == {"unaccepted": 2, "lost": 1}


def test_a_request_without_an_end_is_lost_and_its_story_is_told() -> None:
    lives = [EngineLife(ENGINE, "b", -100.0, sigterm=11.5)]
    sequences = [Sequence("req", ENGINE, "b", 10.5)]
    journals = Journals({"a": attempt(None)}, [row("open")], sequences, lives, faults=[(9.0, "pod_deleted: it")])
    findings = judge(journals)
    assert findings.line().endswith("lost 1")
    (story,) = stories(journals, findings)
    told = [line.split(maxsplit=1)[1] for line in story.splitlines()[1:]]
    assert [line.partition("   ")[0].strip() for line in told] == ["fault", "client", ENGINE, GATEWAY, ENGINE]


def test_a_request_that_goes_to_an_engine_after_its_first_byte_breaks_invariant_2() -> None:
    one = attempt("answered", first=11.0)
    fine = [Sequence("req", ENGINE, "b", 10.5, 11.9, "stop")]
    assert judged(one, sequences=fine).good
    again = [*fine, Sequence("req", "other", "b", 11.2, 11.9, "stop")]
    assert any(v.startswith("invariant 2") for v in judged(one, sequences=again).violations)


def test_an_engine_that_is_stopped_with_a_request_in_flight_breaks_invariant_12() -> None:
    one = attempt("answered", first=11.0)
    lives = [EngineLife(ENGINE, "b", 1.0, sigterm=11.0)]
    running, late = Sequence("req", ENGINE, "b", 10.5, 11.9, "stop"), Sequence("req", ENGINE, "b", 11.1, 11.9, "stop")
    for sequence in (running, late):
        found = judged(attempt("answered"), sequences=[sequence], lives=lives).violations
        assert [v.partition(":")[0] for v in found] == ["invariant 12"]
        assert judged(one, sequences=[sequence], lives=lives, kills=(killed("engine", 10.8),)).totals == {"answered": 1}
    over = Sequence("req", ENGINE, "b", 10.5, 10.9, "stop")
    left = Sequence("req", ENGINE, "b", 10.5, 11.9, "abort")
    assert judged(one, sequences=[over, left], lives=lives).good


def test_fewer_replicas_while_a_signal_source_is_silent_break_invariant_6() -> None:
    scales = [Scale(1.0, "d", "m", 3), Scale(20.0, "d", "m", 2)]
    silence = SilentPeriod(15.0, 30.0, "streams_cut")
    assert judged(attempt("answered"), scales=scales).good
    assert judged(attempt("answered"), scales=scales, silent_periods=[silence]).violations == [
        "invariant 6: m went from 3 to 2 replicas during `streams_cut`"
    ]
    elsewhere = SilentPeriod(15.0, 30.0, "engine_hung", frozenset({"other"}))
    assert judged(attempt("answered"), scales=scales, silent_periods=[elsewhere]).good
    # A move to another class takes one up and one down.
    moved = [Scale(1.0, "d", "m", 1), Scale(20.0, "e", "m", 1), Scale(21.0, "d", "m", 0)]
    assert "1 replicas" in judged(attempt("answered"), scales=moved, silent_periods=[silence]).violations[0]


def test_every_accepted_request_has_one_final_record() -> None:
    one = attempt("answered")
    assert judged(one).good
    assert "0 final records" in judged(one, rows=(row("open"),)).violations[0]
    assert "2 final records" in judged(one, rows=(*ACCEPTED, row("final", "cut"))).violations[0]
    assert "no gateway has a record" in judged(one, rows=()).violations[0]


def test_an_engine_with_more_adapters_or_leases_than_places_breaks_invariant_10() -> None:
    full = Residency(11.0, ENGINE, ("a", "b", "c"), 2, 2)
    assert judge(Journals({}, residencies=[full]), cached=3).violations == []
    overfull = Residency(11.0, ENGINE, ("a", "b", "c", "d"), 2, 3)
    assert judge(Journals({}, residencies=[overfull]), cached=3).violations == [
        f"invariant 10: {ENGINE} has 4 adapters in its engine, of 3",
        f"invariant 10: {ENGINE} has leases for 3 adapters, of 2",
    ]
