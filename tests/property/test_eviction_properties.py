"""What holds for every eviction: enough comes free or nothing goes, nothing in use goes, the oldest use goes first."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.eviction import Candidate, choose

BLOBS = {f"b{n}": (n + 1) * 10 for n in range(6)}
CANDIDATES = st.lists(
    st.builds(
        lambda blobs, used, pinned: Candidate("", {b: BLOBS[b] for b in blobs}, used, pinned),
        st.sets(st.sampled_from(sorted(BLOBS)), min_size=1),
        st.floats(0, 100),
        st.booleans(),
    ),
    max_size=8,
).map(lambda found: [Candidate(f"m{n}", c.blobs, c.last_used, c.pinned) for n, c in enumerate(found)])


def freed(known: list[Candidate], going: set[str]) -> int:
    kept = {blob for c in known if c.key not in going for blob in c.blobs}
    return sum(BLOBS[blob] for blob in {blob for c in known if c.key in going for blob in c.blobs} - kept)


@given(CANDIDATES, st.integers(0, 250))
def test_enough_comes_free_or_nothing_goes(known: list[Candidate], missing: int) -> None:
    choice = choose(known, missing)
    if choice.short:
        assert choice.evict == ()
        # Giving up everything that no pod uses would not be enough.
        assert freed(known, {c.key for c in known if not c.pinned}) == missing - choice.short < missing
    else:
        assert freed(known, set(choice.evict)) >= missing


@given(CANDIDATES, st.integers(0, 250))
def test_nothing_in_use_goes_and_the_last_to_go_was_needed(known: list[Candidate], missing: int) -> None:
    choice = choose(known, missing)
    by_key = {c.key: c for c in known}
    assert not any(by_key[key].pinned for key in choice.evict)
    used = [(by_key[key].last_used, key) for key in choice.evict]
    assert used == sorted(used)
    if choice.evict:
        assert freed(known, set(choice.evict[:-1])) < missing
