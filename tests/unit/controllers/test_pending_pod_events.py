"""Why the ResourceClaim of a replica is not made is read from its events, with few requests."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.controllers import pendingpodevents
from shoal.controllers.pendingpodevents import MOST_AT_ONCE, PendingPodEvents
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.facts import Pod
from shoal.kube.errors import KubeError
from shoal.kube.resources import Resource
from tests.support.operators import CONFIG
from tests.support.owners import LabelsSuffice

START = datetime(2026, 1, 1, tzinfo=UTC)
FULL = (
    'PodResourceClaim gpus: create ResourceClaim : resourceclaims.resource.k8s.io "x" is forbidden: '
    "exceeded quota: devices, requested: a/devices=1, used: a/devices=1, limited: a/devices=1"
)
ROOM = "ResourceQuota devices has no room for a replica: requested a/devices=1, used a/devices=1, limited a/devices=1"
FULL_NODES = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "3 Insufficient nvidia.com/gpu.",
}  # fmt: skip
NO_STOCK = "NodeClaim spot-abc event: creating instance, insufficient capacity, with fleet error(s)"


def karpenter(reason: str, about: str, message: str, seconds: int) -> dict[str, Any]:
    return {
        "reason": reason, "note": message, "reportingController": "karpenter", "regarding": {"name": about},
        "deprecatedLastTimestamp": f"2026-01-01T00:00:{seconds:02}Z",
    }  # fmt: skip


def refused(message: str = FULL) -> dict[str, Any]:
    return {
        "reason": "FailedResourceClaimCreation", "note": message, "reportingController": "resource_claim",
        "deprecatedLastTimestamp": "2026-01-01T00:00:05Z",
    }  # fmt: skip


@dataclass
class Page:
    items: list[dict[str, Any]]


@dataclass
class Api:
    """Answers a list of events page by page."""

    pages: list[list[dict[str, Any]]] = field(default_factory=list)
    fails: KubeError | None = None
    asked: list[str] = field(default_factory=list[str])
    """Field selectors."""
    of_claims: list[dict[str, Any]] | KubeError = field(default_factory=list[dict[str, Any]])
    """Events of NodeClaims, in the namespace `default`; or why they cannot be read."""

    async def list_pages(self, _: Resource, *, namespace: str, field_selector: str, **__: Any) -> AsyncGenerator[Page]:
        if namespace == "default":
            self.asked.append(field_selector)
            if isinstance(self.of_claims, KubeError):
                raise self.of_claims
            yield Page(self.of_claims)
            return
        for page in self.pages or [[]]:
            self.asked.append(field_selector)
            if self.fails is not None:
                raise self.fails
            yield Page(page)


class NotAutoscaled:
    def provision_seconds(self, _: str) -> None:
        return None


class Autoscaled:
    def provision_seconds(self, _: str) -> float:
        return 600.0


class Cluster:
    """Pods of one Model. Each wants a ResourceClaim from a template."""

    def __init__(self, api: Api, *uids: str, age: int = 60, cold: object | None = None) -> None:
        now = START + timedelta(seconds=age)
        none = cast("Any", None)
        self.world = World(cast("Any", api), CONFIG, "s", none, now=lambda: now, ownership=LabelsSuffice())
        for uid in uids:
            self.see(uid)
        state = FleetState(self.world)
        state.starting.add("m")
        self.reader = PendingPodEvents(self.world, state, cast("Any", cold or NotAutoscaled()))

    def see(self, uid: str, *, claim: str | None = None, version: int = 1) -> None:
        """What the API server shows of the pod. `claim`: name of the one that was made."""
        labels = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL_UID: "m",
                  names.LABEL_GPU_CLASS: "h100"}  # fmt: skip
        made = [{"name": "gpus", "resourceClaimName": claim}] if claim else []
        metadata = {"namespace": "chat", "name": f"p-{uid}", "uid": uid, "resourceVersion": str(version),
                    "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}  # fmt: skip
        spec = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "t"}], "containers": []}
        status = {"phase": "Pending", "resourceClaimStatuses": made, "conditions": [FULL_NODES]}
        self.world.pods.upsert({"metadata": metadata, "spec": spec, "status": status})

    def pod(self, uid: str) -> Pod:
        return next(pod for pod in self.world.pods.values() if pod.uid == uid)

    def said(self, uid: str) -> str | None:
        found = self.pod(uid).claim_refusal
        return found.message if found is not None else None


async def test_a_pod_without_its_claim_gets_the_quotas_words_with_one_request() -> None:
    api = Api([[refused()]])
    cluster = Cluster(api, "a")
    await cluster.reader.check()
    assert cluster.said("a") == ROOM
    assert cluster.pod("a").gated, "placement takes no GPU for it"
    await cluster.reader.check()
    assert api.asked == ["regarding.uid=a"]


async def test_a_pod_is_as_any_other_once_its_claim_is_made() -> None:
    cluster = Cluster(Api([[refused()]]), "a")
    await cluster.reader.check()
    cluster.see("a", version=2)
    assert cluster.said("a") == ROOM, "it is remembered over a change of the pod"
    cluster.see("a", claim="p-a-gpus-x", version=3)
    assert (cluster.said("a"), cluster.pod("a").gated) == (None, False)
    assert cluster.pod("a").waited_for_quota, "how long it waited says nothing of the next cold start"


async def test_no_events_are_read_of_pods_that_have_their_claim_or_are_new() -> None:
    api = Api([[refused()]])
    cluster = Cluster(api)
    cluster.see("a", claim="p-a-gpus-x")
    await cluster.reader.check()
    await Cluster(api, "b", age=1).reader.check()
    assert api.asked == []


async def test_of_many_pods_and_events_few_are_read_at_once() -> None:
    api = Api([[refused("another")], [refused()]])
    cluster = Cluster(api, *(str(number) for number in range(3 * MOST_AT_ONCE)))
    await cluster.reader.check()
    assert len(api.asked) == MOST_AT_ONCE, "one page of each"
    await cluster.reader.check()
    assert len(set(api.asked)) == 2 * MOST_AT_ONCE, "those of the others come next"


async def test_what_cannot_be_read_ends_nothing_and_what_is_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pendingpodevents, "AGAIN_SECONDS", 0.0)
    api = Api([[refused()]])
    cluster = Cluster(api, "a")
    await cluster.reader.check()
    api.fails = KubeError("no")
    await cluster.reader.check()
    api.fails, api.pages = None, [[]]
    await cluster.reader.check()
    assert cluster.said("a") == ROOM
    api.pages = [[refused("quotas are unreachable")]]
    await cluster.reader.check()
    assert (cluster.said("a"), cluster.pod("a").gated) == ("quotas are unreachable", False)


async def test_a_stock_out_is_read_from_the_node_claims_with_one_request_for_all_pods() -> None:
    nominated = karpenter("Nominated", "p-a", "Pod should schedule on: nodeclaim/spot-abc", 5)
    failed = karpenter("InsufficientCapacityError", "spot-abc", NO_STOCK, 6)
    api = Api([[nominated]], of_claims=[failed])
    cluster = Cluster(api, "a", "b", cold=Autoscaled())
    await cluster.reader.check()
    assert {cluster.pod(uid).autoscaler_event for uid in "ab"} == {f"karpenter: {NO_STOCK}"}
    assert sorted(api.asked) == ["regarding.kind=NodeClaim,type=Warning", "regarding.uid=a", "regarding.uid=b"]
    api = Api([[nominated]], of_claims=KubeError("events is forbidden"))
    cluster = Cluster(api, "a", cold=Autoscaled())
    await cluster.reader.check()
    assert cluster.pod("a").autoscaler_event == "karpenter: Pod should schedule on: nodeclaim/spot-abc"
    api = Api([[karpenter("FailedScheduling", "p-a", "Failed to schedule pod, no instance type", 5)]])
    await Cluster(api, "a", cold=Autoscaled()).reader.check()
    assert api.asked == ["regarding.uid=a"], "nothing was announced"
