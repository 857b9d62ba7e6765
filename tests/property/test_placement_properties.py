"""Whatever the fleet looks like: no GPU is asked for twice, and what runs stays."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.gpus import Usage
from shoal.core.placement import Offer, place

_GPUS = st.integers(1, 8)


@st.composite
def _offers(draw: st.DrawFn) -> dict[str, Offer]:
    found: dict[str, Offer] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, max_size=4)):
        nodes = draw(st.lists(st.integers(0, 8), max_size=5))
        free = tuple(sorted((n for n in nodes if n), reverse=True))
        capacity = 8 * len(nodes)
        usage = Usage(len(nodes), capacity, capacity, capacity - sum(free), free)
        cost = draw(st.none() | st.integers(1, 900).map(lambda cents: Decimal(cents) / 100))
        found[name] = Offer(name, cost, usage, draw(st.integers(0, 12)))
    return found


@given(_offers(), st.integers(1, 20), _GPUS, st.lists(st.sampled_from("abcd"), unique=True), st.data())
def test_placement(offers: dict[str, Offer], wanted: int, gpus: int, listed: list[str], data: st.DataObject) -> None:
    current = {name: data.draw(st.integers(0, 5), label=name) for name in offers}
    placed = place(wanted=wanted, gpus=gpus, listed=listed, offers=offers, current=current)
    replicas = {v.gpu_class: v.replicas for v in placed.variants}

    assert sum(replicas.values()) + placed.missing == wanted
    assert all(name in offers and (not listed or name in listed) for name in replicas)
    for name, count in replicas.items():
        new = max(0, count - current[name])
        offer = offers[name]
        assert new <= offer.usage.fits(gpus)
        assert new == 0 or new * gpus + offer.promised <= sum(offer.usage.free)
    usable = {n: c for n, c in current.items() if not listed or n in listed}
    if sum(usable.values()) <= wanted:  # nothing has to go, so nothing goes
        assert all(replicas.get(name, 0) >= count for name, count in usable.items())
    assert (placed.reason == "Placed") == (placed.missing == 0)
    # The same again, from what was decided: nothing moves.
    again = place(
        wanted=wanted, gpus=gpus, listed=listed, offers=offers, current={n: replicas.get(n, 0) for n in offers}
    )
    if placed.missing == 0:
        assert {v.gpu_class: v.replicas for v in again.variants if v.replicas} == {
            n: c for n, c in replicas.items() if c
        }
