"""GPU slots of adapters: who fits into one batch, who is evicted, what a swap costs."""

import pytest

from shoal_dev.sim.kv import KVCache, Space
from shoal_dev.sim.scheduler import Scheduler, Sequence
from shoal_dev.sim.slots import COPY_BYTES_PER_SECOND, Slots
from shoal_dev.sim.timing import Timing

TIMING = Timing(t0=5.0, t1=0.05, t2=1.0, kd=0.0001, kp=0.0, a0=0.5)


def slots(total: int = 3, **pinned: bool) -> Slots:
    found = Slots(total)
    for name in "abcde":
        found.add(name, 25_000_000, pinned=pinned.get(name, False))
    return found


def test_a_batch_has_no_more_adapters_than_slots_and_the_base_counts():
    assert slots().fit({"a", "b", "c"})
    assert slots().fit({None, "a", "b"})
    assert not slots().fit({None, "a", "b", "c"})


def test_a_pinned_adapter_keeps_its_slot_from_others():
    assert slots(a=True).fit({None, "a", "b"})
    assert not slots(a=True).fit({None, "b", "c"})


def test_copying_costs_once_and_again_after_an_eviction():
    found = slots()
    copy = 25_000_000 / COPY_BYTES_PER_SECOND
    assert found.prepare({"a", "b"}) == pytest.approx(2 * copy)
    assert found.prepare({"a", "b"}) == 0
    assert found.prepare({"a", None}) == 0
    # Full: the least recently used goes, not the base.
    assert found.prepare({"c"}) == pytest.approx(copy)
    assert found.prepare({"a", None}) == 0
    assert found.prepare({"b"}) == pytest.approx(copy)


def test_a_pinned_one_is_not_evicted():
    found = slots(a=True)
    for batch in ({"a"}, {"b"}, {"c"}, {"d"}, {"e"}):
        found.prepare({*batch})
    assert found.prepare({"a"}) == 0


def test_what_was_unloaded_is_copied_again_when_it_was_loaded_again():
    found = slots()
    found.prepare({"a"})
    found.remove("a")
    found.add("a", 25_000_000, pinned=False)
    assert found.prepare({"a"}) > 0


class _Words:
    def token(self, index: int) -> tuple[int, str, bool]:
        return index, "w", False


def test_a_request_whose_adapter_finds_no_slot_waits_and_others_pass_it():
    scheduler = Scheduler(kv=KVCache(1000), timing=TIMING, chunk=100, max_running=8)
    scheduler.slots = slots(2)
    asked = [
        Sequence(rid=f"{i}", prompt=(i, i + 1), answer=_Words(), max_new_tokens=50, adapter=adapter)
        for i, adapter in enumerate(["a", "b", "c", "a", None])
    ]
    for sequence in asked:
        scheduler.submit(sequence, 0.0)
    scheduler.begin(0.0)
    scheduler.complete(0.1)
    assert [len(sequence.output) for sequence in asked] == [1, 1, 0, 1, 0]
    assert (scheduler.running, scheduler.waiting, scheduler.adapters_running) == (3, 2, 2)
    scheduler.abort(asked[1], 0.2)
    scheduler.begin(0.2)
    scheduler.complete(0.3)
    assert [len(sequence.output) for sequence in asked] == [2, 1, 1, 2, 0]


def test_one_adapters_prefix_is_no_others():
    cache = KVCache(100)
    assert cache.take(4)
    a, b = Space("a"), Space("b")
    cache.insert((1, 2, 3, 4), 4, a)
    assert cache.match((1, 2, 3, 4), a)[1] == 4
    assert cache.match((1, 2, 3, 4), b)[1] == 0
    assert cache.match((1, 2, 3, 4))[1] == 0
    # It is one pool all the same: what one adapter cached makes room for another.
    assert cache.take(98)
    assert cache.match((1, 2, 3, 4), a)[1] == 0
