"""Stores readings and GPU time, each exactly once: the position is stored in the same transaction as the counts. After
a failure before the commit nothing is counted, and the next call catches up."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Table, case, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from shoal.core.reconcile import (
    DAY_MS,
    HOUR_MS,
    MOST,
    CounterReading,
    Held,
    Price,
    by_hour,
    gpu_cost,
    grown,
    held_since,
    misread,
)
from shoal.ledger.schema import engine_hours, engines, gpu_pods

FORGET_MS: Final = 92 * DAY_MS
"""A pod or engine process without reports for this long is forgotten. If it came back, it would be counted from its
beginning again."""
_AT_ONCE: Final = 500
"""Keys per query: databases limit the number of parameters."""

Hour = tuple[int, str, str, str]
"""hour, model, GPU class, currency: the key of `engine_hours`."""


@dataclass(slots=True)
class _Sum:
    prompt: int = 0
    generation: int = 0
    gpu_ms: int = 0
    cost: int = 0


@dataclass(frozen=True, slots=True)
class KeptReadings:
    """Result of `keep_readings`."""

    grown: int
    """Increase of the counters in tokens."""
    lower: tuple[str, ...]
    """Boot ids whose counter decreased: a read error, so the old value is kept."""


def keep_readings(
    connection: Connection, readings: Sequence[CounterReading], prices: Mapping[str, Price | None]
) -> KeptReadings:
    """Stores the last reading of each engine boot, and adds the increase since the previous reading to the hour of the
    reading. `prices` are the current prices of GPU classes."""
    counted: dict[str, tuple[int, int, int]] = {}
    for part in _parts([reading.boot for reading in readings]):
        query = select(engines.c.boot, engines.c.prompt_tokens, engines.c.generation_tokens, engines.c.last_heard)
        for boot, prompt, generation, last_heard in connection.execute(query.where(engines.c.boot.in_(part))):
            counted[boot] = (prompt, generation, last_heard)
    sums: defaultdict[Hour, _Sum] = defaultdict(_Sum)
    rows: list[dict[str, Any]] = []
    lower: list[str] = []
    for reading in readings:
        prompt, generation, last_heard = counted.get(reading.boot, (0, 0, 0))
        more = (grown(prompt, reading.prompt), grown(generation, reading.generation))
        # An older reading, of a ledger that was on standby, may be lower.
        counters = ((prompt, reading.prompt), (generation, reading.generation))
        if reading.read_at >= last_heard and any(now is not None and misread(before, now) for before, now in counters):
            lower.append(reading.boot)
        rows.append(
            {
                "boot": reading.boot,
                "model": reading.model,
                "gpu_class": reading.gpu_class,
                "replica": reading.replica,
                "node": reading.node,
                "first_heard": reading.read_at,
                "last_heard": max(last_heard, reading.read_at),
                "prompt_tokens": prompt + more[0],
                "generation_tokens": generation + more[1],
            }
        )
        hour = reading.read_at - reading.read_at % HOUR_MS
        booked = sums[hour, reading.model, reading.gpu_class, _currency(prices.get(reading.gpu_class))]
        booked.prompt += more[0]
        booked.generation += more[1]
    if rows:
        insert = _insert(connection, engines)
        changed = ("replica", "node", "last_heard", "prompt_tokens", "generation_tokens")
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=[engines.c.boot], set_={name: insert.excluded[name] for name in changed}
            ),
            rows,
        )
    _add(connection, sums)
    return KeptReadings(sum(each.prompt + each.generation for each in sums.values()), tuple(sorted(lower)))


def knows_gpu_time(connection: Connection) -> bool:
    """Whether GPU time was ever counted. Pods from before the first count are not counted back to their start."""
    return connection.execute(select(gpu_pods.c.pod).limit(1)).first() is not None


def keep_gpu_time(
    connection: Connection, held: Iterable[Held], prices: Mapping[str, Price | None], now: int, first_look: int
) -> int:
    """Adds the time for which pods have held GPUs since the last count, at the current prices; returns GPU
    milliseconds. New pods are not counted for the time before `first_look`."""
    pods = {each.pod: each for each in held}
    counted: dict[str, int] = {}
    for part in _parts(sorted(pods)):
        query = select(gpu_pods.c.pod, gpu_pods.c.counted_until).where(gpu_pods.c.pod.in_(part))
        counted |= {row[0]: row[1] for row in connection.execute(query)}
    sums: defaultdict[Hour, _Sum] = defaultdict(_Sum)
    rows: list[dict[str, Any]] = []
    for each in pods.values():
        begin = held_since(each, counted.get(each.pod), first_look)
        end = now if each.until is None else each.until
        currency = _currency(prices.get(each.gpu_class))
        for hour, length in by_hour(begin, end):
            sums[hour, each.model, each.gpu_class, currency].gpu_ms += length * each.gpus
        if end > begin or each.pod not in counted:
            rows.append(
                {"pod": each.pod, "model": each.model, "gpu_class": each.gpu_class, "counted_until": max(begin, end)}
            )
    for (_, _, gpu_class, _), booked in sums.items():
        if (known := prices.get(gpu_class)) is not None:
            booked.cost = gpu_cost(booked.gpu_ms, known.hourly)
    if rows:
        insert = _insert(connection, gpu_pods)
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=[gpu_pods.c.pod], set_={"counted_until": insert.excluded.counted_until}
            ),
            rows,
        )
    _add(connection, sums)
    return sum(each.gpu_ms for each in sums.values())


def forget(connection: Connection, now: int) -> None:
    """Deletes positions of pods and engines that are long gone. Sums are kept."""
    connection.execute(delete(gpu_pods).where(gpu_pods.c.counted_until < now - FORGET_MS))
    connection.execute(delete(engines).where(engines.c.last_heard < now - FORGET_MS))


def _add(connection: Connection, sums: Mapping[Hour, _Sum]) -> None:
    if not sums:
        return
    insert = _insert(connection, engine_hours)
    added = {
        name: engine_hours.c[name] + insert.excluded[name]
        for name in ("prompt_tokens", "generation_tokens", "gpu_seconds", "cost")
    }
    added["cost"] = case((added["cost"] > MOST, MOST), else_=added["cost"])
    connection.execute(
        insert.on_conflict_do_update(index_elements=list(engine_hours.primary_key.columns), set_=added),
        [
            {
                "hour": hour,
                "model": model,
                "gpu_class": gpu_class,
                "currency": currency,
                "prompt_tokens": each.prompt,
                "generation_tokens": each.generation,
                "gpu_seconds": each.gpu_ms / 1000,
                "cost": each.cost,
            }
            for (hour, model, gpu_class, currency), each in sums.items()
        ],
    )


def _insert(connection: Connection, table: Table) -> "postgresql.Insert | sqlite.Insert":
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def _currency(known: Price | None) -> str:
    return "" if known is None else known.currency


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(keys), _AT_ONCE):
        yield keys[at : at + _AT_ONCE]
