"""Whatever requests, shipping, tidying and crashes come in whichever order: nothing is lost, everything ends once."""

import contextlib
import tempfile
from pathlib import Path

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.metering.meter import Meter
from shoal.metering.spoolfile import Row, SpoolFile
from shoal.metering.spoolreader import Batches
from tests.support.records import meter

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 2)),
        st.tuples(st.just("checkpoint"), st.integers(0, 2)),
        st.tuples(st.just("attempt"), st.integers(0, 2)),
        st.tuples(st.just("final"), st.integers(0, 2)),
        st.tuples(st.just("mirror"), st.just(0)),
        st.tuples(st.just("send"), st.integers(1, 5)),
        st.tuples(st.just("answer"), st.just(0)),
        st.tuples(st.just("tidy"), st.integers(0, 1)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    min_size=10,
    max_size=80,
)


class World:
    """A gateway that lives several times on one disk, and a ledger that dedupes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger: dict[str, bytes] = {}
        self.written: dict[str, bytes] = {}
        self.live: dict[int, Meter] = {}
        self.made = self.copies = 0
        self.start()

    def start(self) -> None:
        self.file = SpoolFile(self.path, None, keep_seconds=0.0)
        self.batches = Batches(self.path)
        self.shipped = self.file.shipped()
        self.sent: int | None = None
        self.live.clear()
        for id, body in self.file.connection.execute("SELECT id, body FROM records WHERE kind = 'final'"):
            self.written.setdefault(id, body)  # closed as cut at the start

    def close(self) -> None:
        self.batches.close()
        self.file.close()

    def write(self, row: Row) -> None:
        self.file.insert([row])
        self.written[row[0]] = row[3]

    def step(self, what: str, n: int) -> None:
        it = self.live.get(n)
        match what:
            case "open" if it is None:
                self.made += 1
                self.live[n] = it = meter(f"r{self.made}")
                self.write(it.open_row())
            case "checkpoint" if it is not None:
                it.count(b'{"prompt_tokens":1,"completion_tokens":1}', "continuous")
                self.write(it.checkpoint_row())
            case "attempt" if it is not None:
                it.attempts += 1
                it.sent(100)
                self.write(it.attempt_row())
                it.forget_counts()
            case "final" if it is not None:
                it.outcome = "answered"
                self.write(it.final_row())
                del self.live[n]
            case "mirror":
                # A copy of a request has this one row.
                self.copies += 1
                copy = meter(f"m{self.copies}")
                copy.attempts = 1
                copy.sent(100)
                self.write(copy.attempt_row())
            case "send":
                # The ledger commits; its answer is another step, and a crash may come before it.
                if (batch := self.batches.after(self.shipped, rows=n, size=1200)) is not None:
                    for record in orjson.loads(batch.body):
                        self.ledger.setdefault(record["id"], orjson.dumps(record))
                    self.sent = batch.last
            case "answer" if self.sent is not None:
                self.shipped = max(self.shipped, self.sent)
                self.sent = None
            case "tidy":
                self.file.tidy.step(self.shipped, hurry=bool(n))
            case "crash":
                self.close()
                self.start()
            case _:
                pass

    def all_is_somewhere(self) -> None:
        there = {id for (id,) in self.file.connection.execute("SELECT id FROM records")}
        assert set(self.written) <= there | set(self.ledger)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_nothing_is_lost_and_everything_ends_once(steps: list[tuple[str, int]]):
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "spool.sqlite")
        with contextlib.closing(world):
            for what, n in steps:
                world.step(what, n)
                world.all_is_somewhere()
            world.step("crash", 0)
            while world.batches.after(world.shipped, rows=1, size=1) is not None:
                world.step("send", 5)
                world.step("answer", 0)
            ended = sorted(id.partition(":")[0] for id in world.ledger if id.endswith(":final"))
            assert ended == sorted(f"r{n}" for n in range(1, world.made + 1))
            assert set(world.written) <= set(world.ledger)
            for _ in range(5):  # as it is called each second
                world.step("tidy", 1)
            assert not world.file.connection.execute("SELECT count(*) FROM records").fetchone()[0]
