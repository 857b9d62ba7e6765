"""Invariant 5 in the ledger: rows in any order, as often as they like, in any batches, with gateways closed in between,
end in one final row per request and in sums that are those of the rows. Each with its mutation."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, event, func, select

from shoal.ledger import bulk, ingest, maintenance, schema
from shoal.ledger.parse import Good, parse
from shoal.ledger.sums import free
from tests.support.ledger import NOW_MS, check_balance, record

_KINDS = ("open", "checkpoint:1", "checkpoint:2", "checkpoint:3", "attempt:1", "final")
_REQUESTS = 4


def _row(request: int, kind: str) -> Good:
    tokens = {"checkpoint:1": 1, "checkpoint:2": 2, "checkpoint:3": 3, "final": 4}.get(kind)
    said: dict[str, Any] = {"gateway": f"gw-{request % 2}", "tenant": f"t{request % 3}"}
    if tokens is not None:
        said |= {"outputTokens": tokens}
    row = parse(record(f"r{request}", kind, **said), NOW_MS)
    assert isinstance(row, Good)
    return row


_ROWS = {(request, kind): _row(request, kind) for request in range(_REQUESTS) for kind in _KINDS}

_steps = st.lists(
    st.one_of(
        st.lists(st.sampled_from(sorted(_ROWS)), min_size=1, max_size=8),
        st.sampled_from(["gw-0", "gw-1"]),
    ),
    max_size=12,
)
"""Batches of rows, and gateways whose open rows are closed."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://")
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    schema.metadata.create_all(engine)
    yield engine
    engine.dispose()


def _play(engine: Engine, steps: list[list[tuple[int, str]] | str]) -> None:
    """Plays the steps and then everything once, in order, and looks at the books after each."""
    whole: list[list[tuple[int, str]]] = [[(r, kind) for kind in _KINDS] for r in range(_REQUESTS)]
    with engine.connect() as connection:
        for table in schema.metadata.tables.values():
            with connection.begin():
                connection.execute(table.delete())
        told: set[tuple[int, str]] = set()
        for step in [*steps, *whole]:
            with connection.begin():
                if isinstance(step, str):
                    maintenance._close(connection, step, free)
                else:
                    (taken,), _ = ingest.write(connection, [[_ROWS[each] for each in step]], NOW_MS)
                    assert (taken.new + taken.known, taken.aside) == (len(step), 0)
                    told |= set(step)
                check_balance(connection)
                finals = sum(1 for _, kind in told if kind == "final")
                counted = connection.execute(select(func.count()).where(schema.usage.c.outcome == "answered"))
                assert counted.scalar_one() == finals, "each final row that came counts, and once"
        with connection.begin():
            usage = {(r.request, r.attempt): r for r in connection.execute(select(schema.usage)).all()}
            assert len(usage) == 2 * _REQUESTS
            assert all(row.ended for row in usage.values())
            assert all(usage[f"r{n}", 0].output_tokens == 4 for n in range(_REQUESTS))
            hours = schema.hours.c
            sums = connection.execute(select(func.sum(hours.requests), func.sum(hours.output_tokens))).one()
            assert tuple(sums) == (_REQUESTS, _REQUESTS * 4 + _REQUESTS * 3)
            billed = connection.execute(select(func.sum(hours.output_tokens)).where(hours.billed)).scalar_one()
            assert billed == _REQUESTS * 4


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_the_books_balance_whatever_comes(engine: Engine, steps: list[list[tuple[int, str]] | str]) -> None:
    _play(engine, steps)


def test_mutation_without_dedupe_a_replay_counts_twice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are known are called new, and what stands is not looked at."""
    real = bulk.select

    def forgets(connection: Any, table: Any, columns: Any, keys: Any) -> Any:
        return [] if columns is ingest._KNOWN_COLUMNS else real(connection, table, columns, keys)

    monkeypatch.setattr(bulk, "select", forgets)
    monkeypatch.setattr(ingest, "_ONCE", "ON CONFLICT DO UPDATE SET kind = excluded.kind RETURNING source, id")
    with pytest.raises(AssertionError):
        _play(engine, [[(0, "final")], [(0, "final")]])


def test_mutation_without_steps_a_late_checkpoint_reopens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row counts as the newest."""
    real = bulk.select

    def oldest(connection: Any, table: Any, columns: Any, keys: Any) -> Any:
        rows = real(connection, table, columns, keys)
        return (
            [type("R", (), dict(row._mapping) | {"step": -1})() for row in rows]
            if columns is ingest._KNOWN_COLUMNS
            else rows
        )

    monkeypatch.setattr(bulk, "select", oldest)
    with pytest.raises(AssertionError):
        _play(engine, [[(0, "final")], [(0, "checkpoint:1")]])


def test_mutation_without_taking_back_a_cut_that_ended_counts_twice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ledger counted when it closed a request stays when the request's own end comes."""
    from shoal.ledger.sums import Changes

    real = Changes.add
    monkeypatch.setattr(Changes, "add", lambda self, row, sign=1: real(self, row) if sign == 1 else None)
    with pytest.raises(AssertionError):
        _play(engine, [[(0, "checkpoint:2")], "gw-0", [(0, "final")]])
