"""What Kueue says of replicas that wait for quota is read with few requests, whatever is in the namespace."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from shoal.controllers.queuemessages import AGAIN_SECONDS, QueueMessages
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.facts import Pod
from shoal.core.podquota import NO_KUEUE, NO_WORKLOAD
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.store import Table
from tests.support.operators import CONFIG

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

    async def list_pages(self, *_: Any, **__: Any) -> AsyncGenerator[Page]:
        for page in self.pages or [[]]:
            self.asked += 1
            if self.fails is not None:
                raise self.fails
            yield Page(page)


class Cluster:
    """One Model with gated pods."""

    def __init__(self, api: Api, *uids: str) -> None:
        self.pods: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda pod: (pod.model_uid,)})
        world = World(cast("Any", api), CONFIG, "s", cast("Any", None), now=lambda: START + timedelta(minutes=1))
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
        return {pod.uid: pod.queue_message for pod in self.pods.values()}


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
