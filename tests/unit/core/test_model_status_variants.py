"""What a Model's status says of each class, and how what runs is protected from corrections."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from shoal.core.candidates import Considered
from shoal.core.facts import Container, Deployment, Pod
from shoal.core.placement import Candidate, Excluded, Held, Placement, Rejected, ReplicaState, VariantPlan
from shoal.core.proven import keep_what_runs
from shoal.core.status.variants import cold_start, step, variants

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def container(name: str, *, running: bool = False, restarts: int = 0, ready: bool = False) -> Container:
    return Container(name, ready, restarts, None, None, None, None, None, running)


def pod(*containers: Container, node: str | None = "n", ready: bool = False, **more: Any) -> Pod:
    return Pod(
        "ns", "p", "p", node, False, more.pop("deleting", False), ready, {}, "u", "l4", containers=containers, **more
    )


STAGING = pod(container("stage", running=True), container("engine"))
LOADING = pod(container("stage"), container("engine", running=True))
LOST = pod(container("stage", ready=True), container("engine", running=True, ready=True))
"""Its node died: the pod is not ready, and what its containers last were still stands there."""


@pytest.mark.parametrize(
    ("desired", "pods", "found"),
    [
        (0, [], None),
        (1, [], "Waiting"),
        (1, [pod(node=None)], "Waiting"),
        (1, [STAGING], "Fetching"),
        (1, [LOADING], "Loading"),
        (1, [pod(container("engine", restarts=2))], "Loading"),
        (1, [LOST], "Waiting"),
        (1, [pod(ready=True)], "Ready"),
        (2, [pod(ready=True), LOADING], "Loading"),
        (2, [STAGING, LOADING], "Fetching"),
        (2, [pod(ready=True)], "Waiting"),
        (1, [pod(ready=True), pod(deleting=True)], "Ready"),
    ],
)
def test_the_step_is_that_of_the_replica_that_is_the_least_far(
    desired: int, pods: list[Pod], found: str | None
) -> None:
    assert step(desired, pods) == found


def test_a_cold_start_is_measured_from_the_pods_creation_and_not_after_a_restart() -> None:
    later = NOW + timedelta(seconds=83)
    assert cold_start(pod(container("engine"), ready=True, created=NOW, ready_since=later)) == 83
    restarted = container("engine", restarts=1)
    assert cold_start(pod(restarted, ready=True, created=NOW, ready_since=later)) is None
    assert cold_start(LOADING) is None


def test_a_class_that_is_not_used_says_why_and_what_it_would_cost() -> None:
    excluded = Excluded("l4", "weights 65 GiB " + "x" * 600, "NoFit", kv_tokens=None, hourly_cost="0.43", gpus=1)
    placement = Placement((VariantPlan("h100", 2, 4, "19.92", waiting=1),), (excluded,), 0, "DrainingOthers", "")
    deployed = Deployment(
        "ns", "chat-h100", "d", "1", "u", "h100", 4, "nvidia.com/gpu", 1, 1, 2,
        frozenset(), 2, 1, 2, None, deleting=False,
    )  # fmt: skip
    serves = replace(pod(ready=True), gpu_class="h100")
    used, left = variants(
        placement, deployments=[deployed], pods=[serves], sized={}, tokens={"h100": 415_000}, cold_starts={"h100": 91}
    )
    assert (used.desired, used.ready, used.waiting, used.step) == (2, 1, 1, "Waiting")
    assert used.kv_tokens_per_replica is not None
    assert used.kv_tokens_per_replica.engine == 415_000
    assert used.cold_start_seconds == 91
    assert left.excluded is not None
    assert left.excluded.startswith("weights 65 GiB")
    assert len(left.excluded) <= 512
    assert (left.gpus_per_replica, left.hourly_cost) == (1, "0.43")


def test_a_move_ends_without_a_moment_in_which_none_seems_to_serve() -> None:
    """The new replica's pod is ready and the old class is decided to go; the Deployments, whose numbers come of the
    pods and later, still say it the other way round."""

    def deployed(gpu_class: str, *, ready: int) -> Deployment:
        return Deployment(
            "ns", f"chat-{gpu_class}", "d", "1", "u", gpu_class, 1, "nvidia.com/gpu", 1, 1, 1,
            frozenset(), 1, ready, 1, None, deleting=False,
        )  # fmt: skip

    placement = Placement((VariantPlan("l4", 1, 1, "0.43"), VariantPlan("h100", 0, 1, None)), (), 0, "Placed", "")
    old = replace(pod(ready=True), uid="old", gpu_class="h100")

    def ready(deployments: list[Deployment], pods: list[Pod]) -> dict[str, tuple[int, int]]:
        found = variants(placement, deployments=deployments, pods=pods, sized={}, tokens={}, cold_starts={})
        return {v.gpu_class: (v.desired, v.ready) for v in found}

    before = [deployed("l4", ready=0), deployed("h100", ready=1)]
    assert ready(before, [pod(ready=True), old]) == {"l4": (1, 1), "h100": (0, 0)}
    late = [deployed("l4", ready=1), deployed("h100", ready=0)]
    assert ready(late, [replace(pod(ready=True), deleting=True)]) == {"l4": (1, 0), "h100": (0, 0)}


def kept(considered: Considered, tokens: int | None, *, ready: int = 1) -> Considered:
    return keep_what_runs(
        considered,
        {"l4": ReplicaState(1, 1, {"n": Held(1, ready)}, pods=1)},
        {} if tokens is None else {"l4": tokens},
        context_length=8192,
        hourly_cost={"l4": Decimal("0.43")},
        max_replicas={},
        interruptible={},
    )


MISFIT = Considered((), (Rejected("l4", "NoFit", "leaves KV for 7000 tokens"),), {})


def test_an_engine_that_holds_the_context_is_not_taken_away_by_a_sum() -> None:
    found = kept(MISFIT, 9000)
    assert found.rejected == ()
    assert found.candidates == (Candidate("l4", 1, Decimal("0.43"), kv_tokens=9000),)
    two = Considered((Candidate("l4", 2, Decimal("0.86"), kv_tokens=30_000),), (), {})
    assert kept(two, 9000).candidates[0].gpus == 1


@pytest.mark.parametrize(("tokens", "ready"), [(None, 1), (7000, 1), (9000, 0)])
def test_nothing_is_proven_without_an_engine_that_serves_and_holds_it(tokens: int | None, ready: int) -> None:
    assert kept(MISFIT, tokens, ready=ready) == MISFIT


def test_an_argument_that_is_refused_is_refused_whatever_runs() -> None:
    refused = Considered((), (Rejected("l4", "Invalid", "fp8 needs compute capability 8.9"),), {})
    assert kept(refused, 9000) == refused
