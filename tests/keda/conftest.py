"""One lab for the whole folder: the real KEDA and Prometheus, and Shoal installed by helm."""

from collections.abc import Generator

import pytest

from tests.support.keda import NODES, KEDAFleet, prepare
from tests.support.lab import make_lab


@pytest.fixture(scope="session")
def fleet() -> Generator[KEDAFleet]:
    # The HPA's own 15 s between two looks would make each of these tests minutes long.
    lab = make_lab(NODES, addons=("keda", "prometheus"), hpa_sync_seconds=1.0)
    try:
        fleet = KEDAFleet(lab)
        prepare(fleet)
        yield fleet
    finally:
        lab.down()
