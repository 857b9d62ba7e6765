"""What Kueue says of replicas that wait for quota is read with few requests, whatever is in the namespace."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.controllers import queuemessages
from shoal.controllers.queuemessages import AGAIN_SECONDS, QueueMessages
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.facts import Pod
from shoal.core.podquota import NO_KUEUE, NO_WORKLOAD
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.resources import PROVISIONINGREQUESTS, WORKLOADS, WORKLOADS_BETA2, Resource
from shoal.kube.store import Table
from tests.support.operators import CONFIG, gpu_class

START = datetime(2026, 1, 1, tzinfo=UTC)


def workload(uid: str, message: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"pod-{uid}", "ownerReferences": [{"kind": "Pod", "uid": uid}]},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]},
    }


@dataclass
class Page:
    items: list[dict[str, Any]]


@dataclass
class Api:
    """Answers a list of Workloads page by page."""

    pages: list[list[dict[str, Any]]] = field(default_factory=list)
    fails: KubeError | None = None
    asked: int = 0
    requests: list[dict[str, Any]] | KubeError = field(default_factory=list[dict[str, Any]])
    """ProvisioningRequests."""
    asked_for_requests: int = 0
    serves: tuple[Resource, ...] = (WORKLOADS, WORKLOADS_BETA2)
    """Versions of Workloads."""

    async def list_pages(self, resource: Resource, **_: Any) -> AsyncGenerator[Page]:
        if resource is PROVISIONINGREQUESTS:
            self.asked_for_requests += 1
            if isinstance(self.requests, KubeError):
                raise self.requests
            yield Page(self.requests)
            return
        if resource not in self.serves:
            self.asked += 1
            raise NotFound("the server could not find the requested resource")
        for page in self.pages or [[]]:
            self.asked += 1
            if self.fails is not None:
                raise self.fails
            yield Page(page)


class Cluster:
    """One Model with gated pods."""

    def __init__(self, api: Api, *uids: str) -> None:
        self.pods: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda pod: (pod.model_uid,)})
        self.world = world = World(
            cast("Any", api), CONFIG, "s", cast("Any", None), now=lambda: START + timedelta(minutes=1)
        )
        world.pods = self.pods
        for number, uid in enumerate(uids):
            pod = Pod(
                "chat", f"p-{uid}", uid, None, False, False, False, {}, "m", "h100", created=START,
                gates=("kueue.x-k8s.io/admission",), queue="serving", queue_managed=True,
            )  # fmt: skip
            meta = {"name": pod.name, "namespace": "chat", "uid": uid, "resourceVersion": str(number)}
            self.pods.upsert({"metadata": meta, "value": pod}, since=None)
        state = FleetState(world)
        state.starting.add("m")
        self.reader = QueueMessages(world, state)

    def said(self) -> dict[str, str | None]:
        return {pod.uid: pod.queue_wait.message if pod.queue_wait else None for pod in self.pods.values()}


async def test_each_pod_gets_its_own_workloads_message_with_one_request() -> None:
    api = Api([[workload("x", "another's"), workload("a", "no GPUs left"), workload("b", "no GPUs either")]])
    cluster = Cluster(api, "a", "b")
    await cluster.reader.check()
    assert cluster.said() == {"a": "no GPUs left", "b": "no GPUs either"}
    await cluster.reader.check()
    assert api.asked == 1, f"not again within {AGAIN_SECONDS:.0f} s"


async def test_a_pod_without_a_workload_names_what_kueue_needs() -> None:
    cluster = Cluster(Api([[workload("x", "another's")]]), "a")
    await cluster.reader.check()
    assert cluster.said() == {"a": NO_WORKLOAD}


async def test_a_cluster_without_kueue_is_said() -> None:
    cluster = Cluster(Api(fails=NotFound("the server could not find the requested resource")), "a")
    await cluster.reader.check()
    assert cluster.said() == {"a": NO_KUEUE}


async def test_a_kueue_that_serves_only_its_newer_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queuemessages, "AGAIN_SECONDS", 0.0)
    api = Api([[workload("a", "no GPUs left")]], serves=(WORKLOADS_BETA2,))
    cluster = Cluster(api, "a")
    await cluster.reader.check()
    assert cluster.said() == {"a": "no GPUs left"}
    await cluster.reader.check()
    assert api.asked == 3, "the version that is not served is asked for once"


async def test_a_kueue_whose_older_version_goes_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queuemessages, "AGAIN_SECONDS", 0.0)
    api = Api([[workload("a", "no GPUs left")]], serves=(WORKLOADS,))
    cluster = Cluster(api, "a")
    await cluster.reader.check()
    api.serves, api.pages = (WORKLOADS_BETA2,), [[workload("a", "no GPUs yet")]]
    await cluster.reader.check()
    assert cluster.said() == {"a": "no GPUs yet"}


async def test_of_a_namespace_full_of_workloads_a_few_pages_are_read_and_nothing_is_claimed() -> None:
    api = Api([[workload(f"x{page}", "another's")] for page in range(100)])
    cluster = Cluster(api, "a")
    await cluster.reader.check()
    assert api.asked == 4
    assert cluster.said() == {"a": None}, "it may be on a page that was not read"


async def test_an_api_server_that_refuses_ends_nothing() -> None:
    cluster = Cluster(Api(fails=KubeError("no")), "a")
    await cluster.reader.check()
    assert cluster.said() == {"a": None}


def checked_workload(uid: str) -> dict[str, Any]:
    return workload(uid, "") | {
        "metadata": {"name": f"pod-{uid}", "uid": f"w-{uid}", "ownerReferences": [{"kind": "Pod", "uid": uid}]},
        "spec": {"active": True},
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": "True", "message": "reserved"}],
            "admissionChecks": [{"name": "nodes", "state": "Pending", "message": ""}],
        },
    }


async def test_the_request_for_nodes_is_read_where_an_admission_check_holds_a_replica_back() -> None:
    request = {
        "metadata": {
            "name": "pod-a-nodes-1", "namespace": "chat", "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{"kind": "Workload", "uid": "w-a"}],
        },
        "status": {"conditions": [{"type": "Failed", "status": "True", "message": "no stock"}]},
    }  # fmt: skip
    api = Api([[checked_workload("a")]], requests=[request])
    cluster = Cluster(api, "a")
    await cluster.reader.check()
    assert cluster.said() == {"a": "admission check nodes: ProvisioningRequest chat/pod-a-nodes-1: Failed, no stock"}
    plain = Api([[workload("a", "no GPUs left")]])
    await Cluster(plain, "a").reader.check()
    assert plain.asked_for_requests == 0, "a queue without checks costs no request more"


async def test_a_request_that_failed_for_good_says_since_when_no_node_could_be_had() -> None:
    failed = {"type": "Failed", "status": "True", "message": "no stock", "lastTransitionTime": "2026-01-01T00:00:09Z"}
    request = {
        "metadata": {
            "name": "pod-a-nodes-3", "namespace": "chat", "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{"kind": "Workload", "uid": "w-a"}],
        },
        "status": {"conditions": [failed]},
    }  # fmt: skip
    api = Api([[checked_workload("a") | {"spec": {"active": False}}]], requests=[request])
    autoscaled = gpu_class("h100", "H100")
    autoscaled["metadata"] |= {"uid": "h100", "resourceVersion": "1", "generation": 1}
    autoscaled["spec"]["nodes"] = {"autoscaled": {"max": 3, "gpusPerNode": 4}}
    waits: list[Any] = []
    for classes in ([], [autoscaled]):
        cluster = Cluster(api, "a")
        for raw in classes:
            cluster.world.classes.upsert(raw)
        await cluster.reader.check()
        waits += [pod.queue_wait for pod in cluster.pods.values()]
    other, wait = waits
    assert (other.reason, other.refusal) == ("AdmissionRejected", None), "no autoscaler adds nodes to the class"
    assert (wait.reason, wait.refusal.reason, wait.refused_at) == (
        "AdmissionRejected", "StockOut", START + timedelta(seconds=9),
    )  # fmt: skip


async def test_the_check_is_named_where_requests_cannot_be_read() -> None:
    for error in (NotFound("no such kind"), Forbidden("no")):
        cluster = Cluster(Api([[checked_workload("a")]], requests=error), "a")
        await cluster.reader.check()
        assert cluster.said() == {"a": "admission check nodes is Pending"}
