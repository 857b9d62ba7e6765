"""One lab for the whole folder: the real KEDA and Prometheus, and Shoal installed by helm."""

import os
from collections.abc import Generator

import pytest

from shoal_dev.lab.api import Lab
from tests.support.keda import NODES, KEDAFleet, prepare
from tests.support.lab import make_lab


@pytest.fixture(scope="session")
def fleet() -> Generator[KEDAFleet]:
    # The HPA's own 15 s between two looks would make each of these tests minutes long.
    given = os.environ.get("SHOAL_KEDA_LAB")  # one that somebody else made, and removes
    lab = Lab.get(given) if given else make_lab(NODES, addons=("keda", "prometheus"), hpa_sync_seconds=1.0)
    try:
        fleet = KEDAFleet(lab)
        prepare(fleet)
        yield fleet
    finally:
        if not given:
            lab.down()
