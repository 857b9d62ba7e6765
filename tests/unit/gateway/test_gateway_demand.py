"""What a gateway has of each Model: the counts, and what is told at once."""

import asyncio

import orjson
import pytest

from shoal.api.demand import DemandMessage, ModelDemand
from shoal.core.quota.limits import Cost, Limits
from shoal.gateway import demand
from shoal.gateway.demand import DemandPublisher, DemandState
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> DemandState:
    return DemandState(clock)


def told(content: bytes | None) -> dict[str, ModelDemand | None]:
    """As a reader of this version understands it."""
    assert content is not None
    message = DemandMessage.model_validate({"boot": "b", "seq": 1, "models": orjson.loads(content)})
    assert message.models is not None
    return message.models


def test_a_request_is_counted_from_its_arrival_to_its_end(book: DemandState):
    book.arrived("m")
    book.held("m", 500, 100.0)
    assert told(book.take()) == {"m": ModelDemand(arrivals=1, held=1, held_tokens=500)}
    book.released("m", 500, 100.0)
    book.sent("m")
    assert told(book.take()) == {"m": ModelDemand(arrivals=1, in_flight=1)}
    book.ended("m")
    assert told(book.take()) == {"m": ModelDemand(arrivals=1)}
    assert book.take() is None


def test_the_age_is_that_of_the_oldest_that_still_waits(book: DemandState, clock: Clock):
    for since in (90.0, 80.0, 95.0):
        book.held("m", 1, since)
    assert book.demand("m").oldest_seconds == 20
    book.released("m", 1, 80.0)
    assert book.demand("m").oldest_seconds == 10
    book.released("m", 1, 95.0)
    clock.now += 5
    assert book.demand("m").oldest_seconds == 15
    book.released("m", 1, 90.0)
    assert book.demand("m") == ModelDemand()
    book.held("m", 1, 104.0)
    assert book.demand("m").oldest_seconds == 1


def test_two_that_began_to_wait_in_the_same_moment_are_two(book: DemandState):
    book.held("m", 1, 90.0)
    book.held("m", 1, 90.0)
    book.released("m", 1, 90.0)
    assert book.demand("m").oldest_seconds == 10
    assert book.held_count("m") == 1


def test_holding_is_told_at_once_and_only_of_that_model(book: DemandState):
    due: list[demand.Due] = []
    book.due = due.append
    book.sent("busy")
    assert due == ["urgent"]
    assert told(book.take_urgent()) == {"busy": ModelDemand(in_flight=1)}
    due.clear()
    book.sent("busy")
    assert due == ["regular"]
    book.held("asleep", 7, 100.0)
    assert due == ["regular", "urgent"]
    assert told(book.take_urgent()) == {"asleep": ModelDemand(held=1, held_tokens=7)}
    book.released("asleep", 7, 100.0)
    assert due == ["regular", "urgent", "urgent"]
    assert told(book.take()) == {"busy": ModelDemand(in_flight=2), "asleep": ModelDemand()}


def test_the_first_request_of_a_quiet_model_is_told_at_once_though_it_neither_waits_nor_runs(book: DemandState):
    due: list[demand.Due] = []
    book.due = due.append
    book.arrived("asleep")
    assert due == ["urgent"]
    assert told(book.take_urgent()) == {"asleep": ModelDemand(arrivals=1)}
    book.arrived("asleep")
    assert due == ["urgent", "regular"]


def test_a_small_model_that_flaps_is_told_of_at_most_every_second(book: DemandState, clock: Clock):
    due: list[demand.Due] = []
    book.sent("m")
    book.take_urgent()
    book.due = due.append
    for _ in range(50):
        book.ended("m")
        book.sent("m")
    assert due == ["regular"]
    clock.now += 1.0
    book.take()
    clock.now += 1.0
    book.ended("m")
    assert due == ["regular", "urgent"]


def test_a_deleted_model_is_told_as_null_once_nothing_of_it_is_here(book: DemandState):
    book.arrived("gone")
    book.arrived("busy")
    book.sent("busy")
    book.take()
    book.retain({"another"})
    assert told(book.take()) == {"gone": None}
    assert set(orjson.loads(b'{"models":%b}' % book.full())["models"]) == {"busy"}
    book.ended("busy")
    book.retain({"another"})
    assert told(book.take()) == {"busy": None}


def test_counts_never_fall_below_nothing(book: DemandState):
    with pytest.raises(ValueError, match="was not sent"):
        book.ended("m")
    with pytest.raises(ValueError, match="was not held"):
        book.released("m", 1, 100.0)


async def test_a_reader_hears_of_a_held_request_without_waiting_for_the_second(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demand, "QUIET_SECONDS", 3600.0)
    book = DemandState()
    publisher = DemandPublisher(book)
    with publisher.hub.reader() as reader:
        assert orjson.loads((await reader.next(5))[5:])["models"] == {}  # pyright: ignore[reportOptionalSubscript]
        book.arrived("m")  # the first of all goes out, and the next hour has none
        assert b'"arrivals":1' in (await reader.next(5) or b"")
        book.arrived("m")
        book.held("m", 3, 0.0)
        message = await reader.next(5)
        assert message is not None
        assert told(orjson.dumps(orjson.loads(message[5:])["models"]))["m"] == book.demand("m").model_copy(
            update={"oldest_seconds": orjson.loads(message[5:])["models"]["m"]["oldestSeconds"]}
        )
    publisher.close()
    book.arrived("m")
    await asyncio.sleep(0)


async def test_a_place_that_a_tenant_frees_is_told_within_moments_if_it_stays_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demand, "QUIET_SECONDS", 3600.0)
    book = DemandState()
    publisher = DemandPublisher(book)
    account = book.tenants.of("acme")
    account.change(Limits(concurrent=1))

    def begin() -> None:
        assert account.reserve(asyncio.get_running_loop().time(), Cost(1), tuple) is None
        book.tenants.note("acme")

    def end() -> None:
        account.settle(asyncio.get_running_loop().time(), Cost(1), 0)
        book.tenants.ended("acme")

    with publisher.hub.reader() as reader:
        await reader.next(5)
        begin()
        assert b'"inFlight":1' in (await reader.next(5) or b"")  # the next hour has no regular message
        for _ in range(100):  # a client that comes back at once keeps its place
            end()
            begin()
        with pytest.raises(TimeoutError):
            await reader.next(3 * demand.FREED_SECONDS)
        end()
        message = orjson.loads((await reader.next(5) or b"")[5:])
        assert message["models"] == {}
        assert message["tenants"] == {"acme": {"requests": 101}}
        begin()
        end()
        with pytest.raises(TimeoutError):  # nobody was told that it had one
            await reader.next(3 * demand.FREED_SECONDS)
    begin()
    publisher.close()
    end()
    await asyncio.sleep(0)


async def test_tenants_that_free_places_share_their_messages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demand, "QUIET_SECONDS", 3600.0)
    book = DemandState()
    publisher = DemandPublisher(book)
    names = [f"t{n}" for n in range(500)]
    now = asyncio.get_running_loop().time()
    for name in names:
        book.tenants.of(name).change(Limits(concurrent=1))
        assert book.tenants.of(name).reserve(now, Cost(1), tuple) is None
        book.tenants.note(name)
    book.take()
    before = publisher.hub.seq
    for name in names:
        book.tenants.of(name).settle(now, Cost(1), 0)
        book.tenants.ended(name)
    await asyncio.sleep(3 * demand.FREED_SECONDS)
    # One with all of them, and the regular one that was due before.
    assert publisher.hub.seq - before <= 2
    assert not any(book.tenants.of(name).frees_place for name in names)
    publisher.close()
