"""From a Model with a source on the network to replicas that share one fetch per node: operator, cache, agents, lab."""

import json
import re
from collections.abc import Generator
from typing import Any

import pytest

from shoal.api import names
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import LabCluster
from tests.support import s3pod
from tests.support.helperpods import helper_pod
from tests.support.lab import make_lab
from tests.support.pages import page
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

TEAM = "team-a"
NODE, OTHER = "l4-1", "l4-2"
BUCKET = f"s3://{s3pod.BUCKET}/{s3pod.PREFIX}"


def shoal(kind: str, name: str, spec: dict[str, Any], **metadata: str) -> dict[str, Any]:
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": kind, "metadata": {"name": name} | metadata, "spec": spec}


def namespace(name: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


class Cached(LabCluster):
    """The lab with Shoal, an S3 server with the tiny models and adapters, and one GPU class on one node."""

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def make_model(self, name: str, replicas: int = 1, where: str = TEAM) -> None:
        source = {"uri": f"{BUCKET}/models/tiny-chat", "secretRef": {"name": "bucket"}}
        spec = {"source": source, "scaling": {"minReplicas": replicas}}
        self.apply(shoal("Model", name, spec, namespace=where))

    def condition(self, name: str, type: str, where: str = TEAM, kind: str = "models") -> dict[str, Any]:
        model = json.loads(self.kubectl("get", f"{kind}.shoal.dev", name, "-n", where, "-o", "json"))
        conditions = model.get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type), {"status": None, "message": ""})

    def ready(self, name: str, where: str = TEAM) -> None:
        until(
            lambda: self.condition(name, "Ready", where)["status"] == "True",
            240,
            lambda: (self.condition(name, "Ready", where), self.kubectl("get", "pods,pv,pvc,jobs", "-A", "-o", "wide")),
        )

    def engines(self, where: str = TEAM) -> list[dict[str, Any]]:
        return self.get("pods", "-n", where, "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}")

    def fetches(self, node: str = NODE) -> dict[str, int]:
        """What the daemon of a node answered so far, by result; holds beside."""
        (pod,) = [p for p in self.get("pods", "-n", "shoal-system", "-l", f"{names.LABEL_COMPONENT}=cache")
                  if p["spec"]["nodeName"] == node]  # fmt: skip
        text = page(self, pod["status"]["podIP"])
        found = {m[1]: int(float(m[2])) for m in re.finditer(r'shoal_cache_fetches_total{result="(\w+)"} (\S+)', text)}
        held = re.search(r"^shoal_cache_holds (\S+)", text, re.M)
        assert held
        return found | {"holds": int(float(held[1]))}


@pytest.fixture(scope="module")
def cached() -> Generator[Cached]:
    lab = make_lab()
    try:
        cluster = Cached(lab)
        steps.install(
            cluster,
            "simulator",
            steps.LAB_IMAGE,
            {
                "cache": {"size": "1Gi", "freePercent": 1},
                "operator": {"replicas": 1},
                "sources": {"allowPrivateAddresses": True, "ports": [80, 443, 8080]},
            },
        )
        service = {"selector": {"app": "s3"}, "ports": [{"port": 80, "targetPort": 8080}]}
        metadata = {"name": "s3", "namespace": "shoal-system"}
        files = "/opt/shoal"
        cpu = {"kubernetes.io/hostname": "cpu-1"}
        cluster.apply(
            helper_pod(
                "s3", "shoal-system", "tests.support.s3pod", "8080", files, image=steps.LAB_IMAGE, nodeSelector=cpu
            ),
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        )
        # By address: of a name, this server takes the first part for a bucket.
        address = cluster.kubectl("get", "service", "s3", "-n", "shoal-system", "-o", "jsonpath={.spec.clusterIP}")
        keys = s3pod.KEYS | {"AWS_ENDPOINT_URL": f"http://{address}"}
        cluster.apply(
            *(namespace(name) for name in (TEAM, "team-b")),
            *({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket", "namespace": name},
               "stringData": keys} for name in (TEAM, "team-b")),
            shoal("GPUClass", "l4", {
                "nodeSelector": {"kubernetes.io/hostname": NODE},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "memoryPerGPU": "24Gi",
            }),
        )  # fmt: skip
        cluster.kubectl("wait", "--for=condition=Ready", "pod/s3", "-n", "shoal-system", "--timeout=120s", timeout=130)
        until(lambda: "ready" in cluster.kubectl("logs", "-n", "shoal-system", "s3"), 60)
        yield cluster
    finally:
        lab.down()


def test_two_replicas_on_a_node_fetch_once_and_hold_their_model(cached: Cached) -> None:
    cached.make_model("one", replicas=2)
    cached.ready("one")

    pods = cached.engines()
    assert [p["spec"]["nodeName"] for p in pods] == [NODE, NODE]
    assert cached.fetches().get("fetched") == 1
    assert cached.fetches().get("hit") == 1
    until(lambda: cached.fetches()["holds"] == 2, 30, cached.fetches)
    # The engine reads the namespace's folder, through a volume that the API server has as read-only.
    (volume,) = cached.get("pv", "-l", f"{names.LABEL_COMPONENT}=cache")
    assert volume["spec"]["mountOptions"] == ["ro"]
    assert volume["spec"]["claimRef"]["namespace"] == TEAM
    where = cached.lab.kubectl(
        "exec", "-n", TEAM, pods[0]["metadata"]["name"], "-c", "engine", "--", "readlink", names.MODEL_PATH
    )
    assert where.startswith(names.CACHE_DIR)


def test_a_pod_that_is_replaced_starts_from_the_node(cached: Cached) -> None:
    before = cached.fetches()
    victim = cached.engines()[0]["metadata"]["name"]
    cached.kubectl("delete", "pod", "-n", TEAM, victim, "--wait=true", timeout=120)
    until(lambda: cached.fetches().get("hit", 0) > before.get("hit", 0), 120, cached.fetches)
    cached.ready("one")
    assert cached.fetches()["fetched"] == before["fetched"]


def test_the_share_goes_with_the_last_model_and_comes_back(cached: Cached) -> None:
    fetched = cached.fetches()["fetched"]
    cached.kubectl("delete", "models.shoal.dev", "one", "-n", TEAM, timeout=120)
    until(lambda: not cached.get("pv", "-l", f"{names.LABEL_COMPONENT}=cache") + cached.get("pvc", "-n", TEAM), 180)

    cached.make_model("again")
    cached.ready("again")
    assert cached.fetches()["fetched"] == fetched, "the node had it still"


def test_a_claim_that_somebody_deletes_is_made_and_bound_again(cached: Cached) -> None:
    (claim,) = cached.get("pvc", "-n", TEAM)
    name = claim["metadata"]["name"]
    cached.kubectl("delete", "pvc", name, "-n", TEAM, "--wait=false")  # it stays until its last pod is gone
    cached.kubectl("delete", "pod", "-n", TEAM, "-l", f"{names.LABEL_COMPONENT}=engine", "--wait=true", timeout=120)

    def bound_again() -> bool:
        found = cached.get("pvc", "-n", TEAM)
        other = [c for c in found if c["metadata"]["uid"] != claim["metadata"]["uid"]]
        return bool(other) and other[0]["status"]["phase"] == "Bound"

    until(bound_again, 240, lambda: cached.kubectl("get", "pvc,pv,pods", "-A", "-o", "wide"))
    cached.ready("again")


def test_adapters_of_a_bucket_are_fetched_once_per_node_with_the_pools_credentials(cached: Cached) -> None:
    credentials = [{"uriPrefix": f"{BUCKET}/", "secretRef": {"name": "bucket"}}]
    spec = {"modelRef": {"name": "tuned"}, "maxRank": 8, "slotsPerReplica": 4, "credentials": credentials}
    cached.apply(shoal("LoRAPool", "tuned", spec, namespace=TEAM))
    cached.make_model("tuned", replicas=2)
    # The node has two GPUs.
    cached.kubectl("delete", "models.shoal.dev", "again", "-n", TEAM, "--ignore-not-found", timeout=120)
    cached.ready("tuned")
    before = cached.fetches()

    def adapter(name: str, path: str) -> dict[str, Any]:
        said = {
            "poolRef": {"name": "tuned"},
            "source": {"uri": f"{BUCKET}/{path}"},
            "residency": "Warm",
            "minCopies": 2,
        }
        return shoal("LoRAAdapter", name, said | {"tenants": ["*"]}, namespace=TEAM)

    cached.apply(adapter("legal", "adapters/legal"), adapter("no-adapter", "models/tiny-chat"))
    try:
        until(
            lambda: cached.condition("legal", "Ready", kind="loraadapters").get("reason") == "Resident",
            240,
            lambda: (cached.condition("legal", "Ready", kind="loraadapters"), cached.kubectl("get", "pods,jobs", "-A")),
        )
        # The replica that was heard of last loads it last.
        until(lambda: cached.fetches()["hit"] > before["hit"], 120, cached.fetches)
        after = cached.fetches()
        assert after["fetched"] == before["fetched"] + 1
        assert after["hit"] == before["hit"] + 1
        # What is no adapter disturbs nobody. Each of the two may have had a Job of its own.
        until(
            lambda: cached.condition("no-adapter", "Ready", kind="loraadapters").get("reason") == "Corrupt",
            120,
            lambda: cached.condition("no-adapter", "Ready", kind="loraadapters"),
        )
        bad = cached.condition("no-adapter", "Ready", kind="loraadapters")
        assert bad["status"] == "False"
        assert f"{BUCKET}/models/tiny-chat has no adapter_config.json (found: config.json" in bad["message"]
    finally:
        cached.kubectl("delete", "loraadapters.shoal.dev", "--all", "-n", TEAM, timeout=60)
        cached.kubectl("delete", "lorapools.shoal.dev", "tuned", "-n", TEAM, timeout=60)
        cached.kubectl("delete", "models.shoal.dev", "tuned", "-n", TEAM, timeout=120)


def test_weights_are_on_the_nodes_before_anybody_asks_and_a_start_fetches_nothing(cached: Cached) -> None:
    cached.apply(
        shoal("GPUClass", "other", {
            "nodeSelector": {"kubernetes.io/hostname": OTHER},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "memoryPerGPU": "24Gi",
        })
    )  # fmt: skip
    where = [NODE, OTHER]
    before = {node: cached.fetches(node) for node in where}
    # Another namespace: a cache shares no answers between them.
    metadata = {"name": "ahead", "namespace": "team-b"}
    spec: dict[str, Any] = {
        "source": {"uri": f"{BUCKET}/models/tiny-chat", "secretRef": {"name": "bucket"}},
        "prefetch": {"nodes": 1, "classes": ["l4", "other"]},
        "scaling": {"minReplicas": 0, "idleSeconds": 1},
    }
    cached.apply({"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": spec})

    def status() -> dict[str, Any]:
        return json.loads(cached.kubectl("get", "models.shoal.dev", "ahead", "-n", "team-b", "-o", "json"))["status"]

    def prefetched() -> list[tuple[str, int, int]]:
        return [(each["class"], each["nodes"], each.get("ready", 0)) for each in status().get("prefetch", [])]

    def grown(node: str) -> tuple[int, int]:
        now = cached.fetches(node)
        return tuple(now.get(name, 0) - before[node].get(name, 0) for name in ("fetched", "hit"))  # pyright: ignore[reportReturnType]

    until(
        lambda: prefetched() == [("l4", 1, 1), ("other", 1, 1)],
        240,
        lambda: (status(), cached.kubectl("get", "pods,jobs,pvc", "-A", "-o", "wide")),
    )
    # A new Model starts one replica, so that a wrong one is seen at once. Nobody asks, and it goes.
    until(lambda: not cached.engines("team-b"), 120, lambda: cached.engines("team-b"))
    asked = {node: grown(node) for node in where}
    assert all(fetched == 1 for fetched, _ in asked.values()), f"{asked}: each node fetches the weights once"

    cached.apply(
        {"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "metadata": metadata,
         "spec": spec | {"scaling": {"minReplicas": 1}}}
    )  # fmt: skip
    cached.ready("ahead", "team-b")
    (pod,) = cached.engines("team-b")
    node = pod["spec"]["nodeName"]
    assert grown(node) == (asked[node][0], asked[node][1] + 1), "the replica's weights were there"
    until(lambda: any("coldStart" in each for each in status()["variants"]), 30, status)
    (last,) = [each["coldStart"]["last"] for each in status()["variants"] if "coldStart" in each]
    print("cold start with prefetched weights:", last)  # the fetch stage is a look at files
    cached.kubectl("delete", "models.shoal.dev", "ahead", "-n", "team-b", timeout=120)
