"""KEDA and the HPA land on exactly the number that was decided, from any number, and never pass through zero."""

import pytest

from shoal.core.keda import TARGET, Bounds, bounds, ceilings, floors, metric
from tests.support.hpa import hpa, keda

MOST = 200
TOLERANCES = [(0.0, True), (0.0, False), (0.1, False)]
"""What the HPA has, and whether it shows it."""


def settle(begin: int, decided: int, *, tolerance: float, limits: Bounds, exist: int | None = None) -> list[int]:
    """The numbers that the Deployment is brought to, look after look, until nothing changes. `exist`: pods that exist
    at the first look, where they are not as many as asked for."""
    active, spec, seen = decided > 0, begin, list[int]()
    for look in range(6):
        status = exist if look == 0 and exist is not None else spec
        spec = keda(spec, active=active, failed=False, bounds=limits)
        spec = hpa(spec, status, metric=metric(decided), target=TARGET, tolerance=tolerance, bounds=limits)
        seen.append(spec)
    return seen


@pytest.mark.parametrize(("tolerance", "exact"), TOLERANCES)
def test_any_number_is_reached_from_any_other(tolerance: float, exact: bool) -> None:
    for decided in range(MOST + 1):
        for begin in range(MOST + 1):
            limits = bounds(decided, floor=0, ceiling=MOST, existing=begin, exact=exact)
            seen = settle(begin, decided, tolerance=tolerance, limits=limits)
            assert seen[-1] == decided, f"{begin} -> {decided}: {seen}"
            if decided:
                assert 0 not in seen, f"{begin} -> {decided} passes through zero: {seen}"
                between = range(min(max(1, begin), decided), max(begin, decided) + 1)
                assert all(n in between for n in seen), f"{begin} -> {decided} overshoots: {seen}"


@pytest.mark.parametrize(("tolerance", "exact"), TOLERANCES)
def test_pods_that_surge_or_are_missing_change_nothing(tolerance: float, exact: bool) -> None:
    """A rollout has one pod more, a new replica is not made yet: within its tolerance an HPA takes the pods for the
    number."""
    for decided in range(1, MOST + 1):
        limits = bounds(decided, floor=0, ceiling=MOST + 2, existing=decided, exact=exact)
        for exist in range(max(0, decided - 2), decided + 3):
            seen = settle(decided, decided, tolerance=tolerance, limits=limits, exist=exist)
            assert set(seen) == {decided}, f"{decided} with {exist} pods: {seen}"


def test_without_compensation_an_hpa_would_miss() -> None:
    """What the mapping is for: with the plain number and the HPA's own tolerance, some are never reached."""
    wide = Bounds(1, MOST)
    missed = [n for n in range(2, MOST) if hpa(n - 1, n - 1, metric=n, target=1, tolerance=0.1, bounds=wide) != n]
    stuck = [n for n in range(1, MOST) if hpa(n + 1, n + 1, metric=n, target=1, tolerance=0.1, bounds=wide) != n]
    assert missed[0] in (11, 12)
    assert stuck[0] == 9


def test_a_look_that_fails_never_zeroes_what_is_wanted() -> None:
    """KEDA takes a failed look for "nobody asks" in a race; the minimum of one is what holds the replicas then."""
    for decided in range(1, 30):
        for exact in (True, False):
            limits = bounds(decided, floor=0, ceiling=30, existing=decided, exact=exact)
            assert keda(decided, active=False, failed=False, bounds=limits) == decided
            assert keda(decided, active=False, failed=True, bounds=limits) == decided
        # The mutation: with the minimum that KEDA would have by default it goes to zero.
        assert keda(decided, active=False, failed=False, bounds=Bounds(0, 30)) == 0


def test_more_than_the_maximum_may_stand() -> None:
    """maxReplicas was lowered: an HPA would write it at once, unmarked pods first; the decision says when."""
    limits = bounds(8, floor=0, ceiling=2, existing=8, exact=True)
    assert settle(8, 8, tolerance=0.0, limits=limits)[-1] == 8


def test_the_minimum_is_split_as_it_was_planned() -> None:
    assert floors(3, {"l40s": 2, "h100": 4}) == {"l40s": 2, "h100": 1}
    assert floors(5, {"l40s": 2, "h100": 0}) == {"l40s": 2, "h100": 0}, "no bound asks for GPUs that are not there"
    assert floors(0, {"l40s": 2}) == {"l40s": 0}


def test_each_variant_has_the_maximum_or_its_own() -> None:
    assert ceilings(6, {"l40s": None, "h100": 2, "h200": 0}) == {"l40s": 6, "h100": 2, "h200": 1}
