"""What an autoscaler says of a pending pod: words that end the wait for a node, and words that do not."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from shoal.core.facts import AutoscalerNews, NodeRefusal
from shoal.core.placement.autoscalerevents import PodEvent, news, refusal

NOW = datetime(2026, 11, 25, tzinfo=UTC)
FAILED = "Failed to schedule pod, "
NO_OFFERING = (
    'incompatible with nodepool "l4-spot", daemonset overhead={"pods":"1"}, no instance type has the required '
    "offering, requirements=karpenter.sh/nodepool In [l4-spot], resources={}"
)
OTHER_POOL = (
    'incompatible with nodepool "cpu", daemonset overhead={}, incompatible requirements, key '
    "karpenter.sh/nodepool, karpenter.sh/nodepool In [l4-spot] not in karpenter.sh/nodepool In [cpu]"
)
TAINTED = 'incompatible with nodepool "b", daemonset overhead={}, did not tolerate taint (taint=team=b:NoSchedule)'
LIMITS = "all available instance types exceed limits for nodepool (NodePool=l4-spot)"
TOO_SMALL = (
    'incompatible with nodepool "l4-spot", daemonset overhead={}, no instance type has enough resources, '
    "requirements=karpenter.sh/nodepool In [l4-spot], resources={cpu: 400}"
)
NOT = "pod didn't trigger scale-up: "
AFFINITY = "3 node(s) didn't match Pod's node affinity/selector"


def karpenter(reason: str, message: str, seconds: int = 0) -> PodEvent:
    return PodEvent("karpenter", message, NOW + timedelta(seconds=seconds), reason)


def cluster_autoscaler(reason: str, message: str, seconds: int = 0) -> PodEvent:
    return PodEvent("cluster-autoscaler", message, NOW + timedelta(seconds=seconds), reason)


def rejected(*parts: str, seconds: int = 0) -> PodEvent:
    return karpenter("FailedScheduling", FAILED + "; ".join(parts), seconds)


def not_triggered(message: str, seconds: int = 0) -> PodEvent:
    return cluster_autoscaler("NotTriggerScaleUp", NOT + message, seconds)


NOMINATED = karpenter("Nominated", "Pod should schedule on: nodeclaim/l4-spot-abc", 5)
NO_STOCK = karpenter("InsufficientCapacityError", "NodeClaim l4-spot-abc event: creating instance, with fleet error", 7)
TRIGGERED = cluster_autoscaler("TriggeredScaleUp", "pod triggered scale-up: [{l4 0->1 (max: 20)}]", 10)


def said(*events: PodEvent) -> tuple[str, bool] | None:
    found = refusal(events)
    return (found.reason, found.everyone) if found is not None else None


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([rejected(LIMITS)], "LimitReached"),
        ([rejected(OTHER_POOL, LIMITS, TAINTED)], "LimitReached"),
        ([rejected("node limits have been exhausted for nodepool (NodePool=l4-spot)")], "LimitReached"),
        ([NOMINATED, NO_STOCK], "StockOut"),
        ([NOMINATED, NO_STOCK, rejected(NO_OFFERING, seconds=9)], "StockOut"),
        ([not_triggered(f"1 max node group size reached, {AFFINITY}")], "LimitReached"),
        ([not_triggered('1 exceeded quota: "gpus", resources: nvidia.com/gpu, cpu')], "LimitReached"),
        ([not_triggered("1 max cluster cpu limit reached")], "LimitReached"),
        ([not_triggered("max total nodes in cluster reached")], "LimitReached"),
        ([TRIGGERED, not_triggered(f"{AFFINITY}, 1 in backoff after failed scale-up", 60)], "ScaleUpFailed"),
        ([cluster_autoscaler("FailedScaleUp", "Node scale up in zones us-central1-a associated with this pod failed: "
                             "GCE out of resources. Pod is at risk of not being scheduled.")], "StockOut"),
        ([cluster_autoscaler("FailedScaleUp", "Node scale up in zones us-central1-a associated with this pod failed: "
                             "GCE quota exceeded. Pod is at risk of not being scheduled.")], "LimitReached"),
    ],
)  # fmt: skip
def test_words_after_which_no_replica_of_the_class_gets_a_node(events: list[PodEvent], reason: str) -> None:
    assert said(*events) == (reason, True)


@pytest.mark.parametrize(
    "events",
    [
        [rejected(TOO_SMALL)],
        [rejected(LIMITS, TOO_SMALL)],
        [rejected(NO_OFFERING)],  # perhaps only in the zone of its volume
        [not_triggered(f"1 Insufficient memory, 1 max node group size reached, {AFFINITY}")],
    ],
)
def test_words_after_which_only_this_replica_gets_none(events: list[PodEvent]) -> None:
    assert said(*events) == ("NoInstanceType", False)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [TRIGGERED],
        [rejected(LIMITS), NOMINATED],  # Karpenter's first word, before a node was made room for
        [NO_STOCK, karpenter("Nominated", "Pod should schedule on: nodeclaim/l4-spot-def", 7)],
        [not_triggered("1 in backoff after failed scale-up"), TRIGGERED],
        [not_triggered("1 max node group size reached", 10), TRIGGERED],  # in the same second
        [not_triggered(f"1 not ready for scale-up, {AFFINITY}")],
        [not_triggered(AFFINITY)],  # no node group for the class: perhaps one is being made
        [not_triggered("1 max node group size reached, 1 node(s) had volume node affinity conflict")],
        [not_triggered("")],
        [rejected(OTHER_POOL, TAINTED)],
        [rejected(LIMITS, "unsatisfiable topology constraint for topology spread")],
        [rejected("nodepool requirements filtered out all available instance types")],
        [karpenter("NodeClassNotReady", "NodeClaim l4-spot-abc event: the NodeClass is not ready")],
        [cluster_autoscaler("FailedScaleUp", "Node scale up in zones a associated with this pod failed: GCE error.")],
        # Both autoscalers run in the cluster, and each one speaks of node groups that are not its own.
        [NOMINATED, not_triggered("2 max node group size reached", 20)],
        [rejected(LIMITS), not_triggered(AFFINITY, 20)],
        [PodEvent("someone", FAILED + LIMITS, NOW, "FailedScheduling")],
    ],
)  # fmt: skip
def test_words_after_which_a_node_may_come(events: list[PodEvent]) -> None:
    assert said(*events) is None


REFUSED = NodeRefusal("LimitReached", f"karpenter: {FAILED}{LIMITS}", everyone=True, repeated=True)


def look(before: AutoscalerNews, *events: PodEvent, seconds: int) -> AutoscalerNews:
    return news(events, before, now=NOW + timedelta(seconds=seconds), provision_seconds=600.0)


def test_a_refusal_is_believed_at_the_second_look_and_not_after_an_announcement() -> None:
    first = look(AutoscalerNews(), rejected(LIMITS), seconds=10)
    assert first.refusal == replace(REFUSED, repeated=False)
    again = look(first, rejected(LIMITS), seconds=40)
    assert again.refusal == REFUSED
    coming = karpenter("Nominated", "Pod should schedule on: nodeclaim/l4-spot-abc", 50)
    third = look(again, rejected(LIMITS), coming, seconds=70)
    assert (third.refusal, third.announced, third.late) == (None, True, False)
    fourth = look(third, rejected(LIMITS, seconds=80), seconds=100)
    assert fourth.refusal == replace(REFUSED, repeated=False), "it begins anew"


def test_an_announcement_between_two_refusals_begins_the_count_anew() -> None:
    """The autoscaler still tries, and each look saw only that it had just failed."""
    backoff = f"{AFFINITY}, 1 in backoff after failed scale-up"
    first = look(AutoscalerNews(), not_triggered(backoff, 5), seconds=10)
    tried = replace(TRIGGERED, at=NOW + timedelta(seconds=20))
    second = look(first, tried, not_triggered(backoff, 35), seconds=40)
    assert second.refusal is not None
    assert not second.refusal.repeated, "a scale-up began between the two refusals"
    third = look(second, tried, not_triggered(backoff, 65), seconds=70)
    assert third.refusal is not None
    assert third.refusal.repeated, "no node was announced since the last look"
    # Karpenter announces the next NodeClaim, which has no capacity either.
    stock_out = look(AutoscalerNews(), NOMINATED, NO_STOCK, seconds=10)
    again = replace(NOMINATED, at=NOW + timedelta(seconds=15)), replace(NO_STOCK, at=NOW + timedelta(seconds=17))
    other = look(stock_out, NOMINATED, NO_STOCK, *again, seconds=40)
    assert other.refusal is not None
    assert not other.refusal.repeated
    last = look(other, NOMINATED, NO_STOCK, *again, seconds=70)
    assert last.refusal is not None
    assert last.refusal.repeated


def test_an_announced_node_is_late_after_its_time() -> None:
    assert look(AutoscalerNews(), NOMINATED, seconds=30).announced
    assert look(AutoscalerNews(), NOMINATED, seconds=606).late
    assert look(AutoscalerNews(event="karpenter: x"), seconds=30) == AutoscalerNews(event="karpenter: x")


def test_a_node_is_late_counted_from_its_announcement_not_from_a_refusal_before() -> None:
    triggered = replace(TRIGGERED, at=NOW + timedelta(seconds=3000))
    assert not look(AutoscalerNews(), not_triggered("1 max node group size reached"), triggered, seconds=3005).late
    assert look(AutoscalerNews(), not_triggered("1 max node group size reached"), triggered, seconds=3600).late
