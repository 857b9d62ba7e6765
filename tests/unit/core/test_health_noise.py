"""A day of noise on a class of 64 nodes: nothing healthy is taken out of use, and what is sick is."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from shoal.core.health import HealthMemory, HealthSignal, HealthSnapshot, Quarantine, Unit, decide
from shoal.core.layers import faults

START = datetime(2026, 11, 26, tzinfo=UTC)
DAY: int = 86_400
STEP = 5
NODES = [f"n{i:02}" for i in range(64)]


def disturbances(seed: int) -> Iterator[tuple[int, int, HealthSignal]]:
    """(from, to, signal): device plugins that restart and let kubelets call their devices unhealthy for some seconds,
    problem detectors that flap, drivers that are replaced."""
    chance = random.Random(seed)  # noqa: S311 - noise
    for node in NODES:
        at = 0.0
        while at < DAY:
            at += chance.expovariate(1 / 1800)  # every half an hour on each node
            length = chance.choice([1, 2, 3, 5, 8, 9])
            kind = chance.randrange(3)
            device = "" if kind == 0 else f"gpu.test/{node}/gpu-{chance.randrange(8)}"
            reason = chance.choice([faults.GPU_UNHEALTHY, faults.GPU_ECC_ERROR, faults.NVLINK_FAULT])
            yield int(at), int(at) + length, HealthSignal(Unit(node, device), reason, "noise")


def simulate(seed: int, *sick: tuple[int, Unit]) -> dict[Unit, int]:
    """Unit -> second at which it was taken out of use. `sick`: (since, unit)."""
    noise = sorted(disturbances(seed), key=lambda each: each[0])
    devices = {node: frozenset(f"gpu.test/{node}/gpu-{i}" for i in range(8)) for node in NODES}
    memory: HealthMemory | None = None
    quarantined: tuple[Quarantine, ...] = ()
    taken: dict[Unit, int] = {}
    present: list[tuple[int, int, HealthSignal]] = []
    for second in range(0, DAY, STEP):
        while noise and noise[0][0] <= second:
            present.append(noise.pop(0))
        present = [each for each in present if each[1] > second]
        there = [each[2] for each in present]
        there += [HealthSignal(unit, faults.GPU_LOST, "gone") for since, unit in sick if since <= second]
        seen = HealthSnapshot(
            capacity=dict.fromkeys(NODES, 8), usable=dict.fromkeys(NODES, 8), nodes=frozenset(NODES), devices=devices,
            quarantined=quarantined, signals=tuple(there),
        )  # fmt: skip
        plan, memory = decide(seen, memory, START + timedelta(seconds=second))
        quarantined = plan.quarantined
        for each in quarantined:
            taken.setdefault(each.unit, second)
    return taken


@pytest.mark.parametrize("seed", range(3))
def test_a_day_of_noise_takes_nothing_out_of_use_that_is_healthy(seed: int) -> None:
    since = 40_000
    sick = Unit("n07", "gpu.test/n07/gpu-3")
    taken = simulate(seed, (since, sick))
    assert set(taken) == {sick}, "false quarantines"
    assert taken[sick] - since <= 20, "a GPU that is sick amid all that noise is found at once"
