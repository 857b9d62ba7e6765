"""The same fleets give the same plans as before: numbers and reasons, without the messages.

The first fleets are recorded line by line, so that a difference can be read; of many more there is a digest.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.core.placement import Placement
from tests.golden.recorded import compare
from tests.support.fleets import Fleet, FleetNode, candidate, demand

CLASSES: Final = ("a", "b", "c", "d")
STEPS: Final = 10
READABLE: Final = 60
DIGESTS: Final = 400


def fleet(seed: int) -> tuple[Fleet, random.Random]:
    dice = random.Random(seed)  # noqa: S311 - the same each time
    nodes = [
        FleetNode(f"{name}-{i}", name, dice.choice((1, 2, 4, 8))) for name in CLASSES for i in range(dice.randint(0, 3))
    ]
    models = [
        demand(
            f"ns/m{i}",
            *(
                candidate(
                    name,
                    dice.choice((1, 1, 2, 4)),
                    dice.choice(("1", "2", "3.5", "8", None)),
                    max_replicas=dice.choice((None, None, 1, 2)),
                    interruptible=name == "c",
                )
                for name in dice.sample(CLASSES, dice.randint(1, 4))
            ),
            wanted=dice.randint(0, 4),
            priority=dice.choice((0, 0, 10, 20)),
            age=i,
            interruptible_percent=dice.choice((100, 100, 50)),
        )
        for i in range(dice.randint(1, 7))
    ]
    return Fleet(nodes, models, seed=seed), dice


def disturb(it: Fleet, dice: random.Random) -> None:
    """Somebody wants more or less, or a node takes no pods any more."""
    if it.models and dice.random() < 0.5:
        uid = dice.choice(sorted(it.models))
        it.models[uid] = replace(it.models[uid], wanted=dice.randint(0, 4))
    if it.nodes and dice.random() < 0.15:
        node = it.nodes[dice.choice(sorted(it.nodes))]
        node.takes_pods = not node.takes_pods


def line(model: str, placement: Placement) -> str:
    parts = [
        f"{v.gpu_class}:{v.replicas}x{v.gpus}"
        + (f" waiting {v.waiting}" if v.waiting else "")
        + (" retired" if v.retired else "")
        + (f" leaving {sorted(dict(v.leaving).items())}" if v.leaving else "")
        for v in placement.variants
    ]
    without = [f"{one.gpu_class} {one.reason}" for one in placement.excluded]
    return (
        f"  {model} {placement.reason} missing {placement.missing} cost {placement.hourly_cost}"
        f" [{', '.join(parts)}] without [{', '.join(without)}]"
    )


def plans(seed: int) -> Iterator[str]:
    it, dice = fleet(seed)
    for step in range(STEPS):
        yield f"fleet {seed} step {step}"
        placements = it.step()
        yield from (line(model, placements[model]) for model in sorted(placements))
        disturb(it, dice)


def test_each_fleet_gets_the_plans_that_it_got_before() -> None:
    compare("plans.txt", "".join(f"{each}\n" for seed in range(READABLE) for each in plans(seed)))


def test_many_more_fleets_get_the_same_plans() -> None:
    digests = (hashlib.sha256("\n".join(plans(seed)).encode()).hexdigest()[:16] for seed in range(READABLE, DIGESTS))
    compare("plan-digests.txt", "".join(f"{READABLE + at} {each}\n" for at, each in enumerate(digests)))
