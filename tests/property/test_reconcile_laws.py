"""Whatever restarts, repeats, is late or is never kept: each token and each GPU millisecond is booked once."""

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.pool import StaticPool

from shoal.core.reconcile import HOUR_MS, Compared, CounterReading, Held, Tokens, by_hour
from shoal.ledger.reconcile.keep import keep_gpu_time, keep_readings
from shoal.ledger.reconcile.readings import Readings
from shoal.ledger.schema import engine_hours, metadata

BEGIN = 1_000 * 24 * HOUR_MS
BOOTS = ("e1", "e2", "e3")


class Refused(Exception):
    """The commit failed."""


def tables() -> Engine:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    metadata.create_all(engine)
    return engine


def booked(engine: Engine, *columns: Any) -> tuple[Any, ...]:
    with engine.begin() as connection:
        return tuple(value or 0 for value in connection.execute(select(*map(func.sum, columns))).one())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("count", "hear", "again", "forget", "keep", "fail", "restart")),
        st.sampled_from(BOOTS),
        st.integers(0, 500),
        st.integers(0, 2 * HOUR_MS),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_each_token_that_was_kept_is_booked_once(steps: list[tuple[str, str, int, int]]):
    engine = tables()
    clock = [BEGIN]
    counters: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    kept: dict[str, tuple[int, int]] = {}
    ledger = Readings({}, lambda: clock[0])
    last: list[CounterReading] = []
    for what, boot, number, passed in steps:
        clock[0] += passed
        if what == "count":
            counters[boot][number % 2] += number
        elif what in ("hear", "forget"):
            told = (None, None) if what == "forget" else (counters[boot][0], counters[boot][1])
            ledger.give_back([CounterReading(boot, "chat/m", "c", "chat/p", "n", clock[0], *told)])
        elif what == "again":
            ledger.give_back(last)
        elif what == "restart":
            ledger, last = Readings({}, lambda: clock[0]), []
        elif taken := ledger.take():
            last = taken
            try:
                with engine.begin() as connection:
                    keep_readings(connection, taken, {})
                    if what == "fail":
                        raise Refused
                for each in taken:
                    before = kept.get(each.boot, (0, 0))
                    kept[each.boot] = (max(before[0], each.prompt or 0), max(before[1], each.generation or 0))
            except Refused:
                ledger.give_back(taken)
    sums = booked(engine, engine_hours.c.prompt_tokens, engine_hours.c.generation_tokens)
    assert sums == (sum(k[0] for k in kept.values()), sum(k[1] for k in kept.values()))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-HOUR_MS, 3 * HOUR_MS), st.sampled_from(("look", "fail"))), max_size=20),
    st.integers(0, HOUR_MS),
    st.integers(1, 8),
)
def test_gpu_time_is_that_of_the_pod_as_far_as_anybody_looked(looks: list[tuple[int, str]], since: int, gpus: int):
    engine = tables()
    now = reached = BEGIN + since
    pod = Held("p", "chat/m", "c", gpus, BEGIN + since)
    for passed, what in looks:
        now += passed
        try:
            with engine.begin() as connection:
                keep_gpu_time(connection, [pod], {}, now, 0)
                if what == "fail":
                    raise Refused
            reached = max(reached, now)
        except Refused:
            continue
    (seconds,) = booked(engine, engine_hours.c.gpu_seconds)
    assert round(seconds * 1000) == (reached - BEGIN - since) * gpus


@given(st.integers(0, 10 * HOUR_MS), st.integers(0, 10 * HOUR_MS))
def test_spans_are_whole_and_within_their_hours(begin: int, length: int):
    parts = list(by_hour(begin, begin + length))
    assert sum(part for _, part in parts) == length
    assert all(hour % HOUR_MS == 0 and 0 < part <= HOUR_MS for hour, part in parts)
    assert len({hour for hour, _ in parts}) == len(parts)


COUNT = st.integers(0, 10**9)
TOKENS = st.builds(Tokens, COUNT, COUNT)


@given(st.lists(st.builds(Compared, st.none() | TOKENS, TOKENS, TOKENS, st.none() | COUNT), max_size=6))
def test_billed_and_unattributed_are_the_engines_counters(rows: list[Compared]):
    found = sum(rows, Compared(None))
    if all(row.engine is None for row in rows):
        assert found.engine is found.unattributed is found.share is None
    else:
        assert found.unattributed is not None
        assert found.billed + found.unattributed == found.engine
