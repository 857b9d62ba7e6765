"""The node cache on nodes: the chart's DaemonSet, read-only volumes per namespace, and pods of two namespaces."""

import json
import signal
from collections.abc import Generator
from typing import Any

import pytest

from shoal.api import names, reasons
from shoal.api.config import Cache
from shoal.manifests import cache as manifests
from shoal_dev.lab import api
from tests.support import slowhub
from tests.support.charts import rendered
from tests.support.helperpods import helper_pod
from tests.support.lab import apply, eventually, get

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]

SYSTEM = "shoal-system"
CONFIG = Cache(enabled=True, size="64Mi")
URI = f"hf://{slowhub.REPO}"
USER = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}


def labelled(name: str, level: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def hub_objects() -> list[dict[str, Any]]:
    cpu = {"kubernetes.io/hostname": "cpu-1"}
    metadata = {"name": "hub", "namespace": SYSTEM}
    service = {"selector": {"app": "hub"}, "ports": [{"port": 80, "targetPort": 8080}]}
    return [
        helper_pod("hub", SYSTEM, "tests.support.slowhub", "8080", image="shoal:test", nodeSelector=cpu),
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
    ]


@pytest.fixture(scope="module")
def nodes(lab: api.Lab) -> Generator[api.Lab]:
    """The lab with the cache on every node, as the chart installs it, two namespaces with a share, and a hub."""
    values = {
        "image": {"repository": "shoal", "tag": "lab"},
        "hubEndpoint": f"http://hub.{SYSTEM}.svc",
        "cache": {
            "size": CONFIG.size,
            "freePercent": 1,
            "extraEnv": [{"name": "SHOAL_CACHE_GRACE_SECONDS", "value": "3"}],
        },
    }
    objects = [o for o in rendered(values) if "shoal-cache" in o["metadata"]["name"]]
    spaces = [labelled(SYSTEM, "privileged"), *(labelled(name, "restricted") for name in ("team-a", "team-b"))]
    shares = [make(name, CONFIG) for name in ("team-a", "team-b") for make in (manifests.volume, manifests.claim)]
    apply(lab, *spaces)
    for name in (SYSTEM, "team-a", "team-b"):
        eventually(lambda name=name: lab.kubectl("get", "serviceaccount", "default", "-n", name), "the ServiceAccount")
    apply(lab, *objects, *hub_objects(), *shares, secret("team-a", slowhub.TOKEN), secret("team-b", "wrong"))
    try:
        lab.kubectl("rollout", "status", "-n", SYSTEM, "daemonset/shoal-cache", "--timeout=180s", timeout=190)
        lab.kubectl("wait", "-n", SYSTEM, "--for=condition=Ready", "pod/hub", "--timeout=120s", timeout=130)
        yield lab
    finally:
        lab.kubectl("delete", "namespace", *(o["metadata"]["name"] for o in spaces), "--wait=false")
        lab.kubectl("delete", "pv", *(manifests.volume(n, CONFIG)["metadata"]["name"] for n in ("team-a", "team-b")),
                    "--wait=false")  # fmt: skip
        lab.kubectl("delete", "clusterrole,clusterrolebinding", "shoal-cache")


def secret(namespace: str, token: str) -> dict[str, Any]:
    metadata = {"name": "hub", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": token}}


def pod(namespace: str, name: str, node: str, *, with_secret: bool = True) -> dict[str, Any]:
    """An engine pod without an engine: agent, stage and a process that reads, as the operator makes them."""
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    run, models = {"name": "run", "mountPath": names.RUN_DIR}, {"name": "models", "mountPath": names.MODELS_DIR}
    own = {"name": "secret", "mountPath": names.SOURCE_SECRET_DIR}
    common = {"image": "shoal:lab", "securityContext": locked}
    # The pod's author may leave `readOnly` out: neither mount nor claim has it here.
    cache = {"name": "cache", "mountPath": names.CACHE_DIR}
    agent = {"name": "agent", "command": ["shoal", "agent", "serve"], "restartPolicy": "Always",
             "env": [manifests.AGENT_ENV], "volumeMounts": [run, cache]}  # fmt: skip
    stage = {"name": "stage", "command": ["shoal", "agent", "stage"], "volumeMounts": [run, models, cache],
             "env": [{"name": "SHOAL_STAGE_URI", "value": URI}, manifests.STAGE_ENV]}  # fmt: skip
    engine = {"name": "engine", "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done"],
              "volumeMounts": [run, models, cache]}  # fmt: skip
    volumes: list[dict[str, Any]] = [
        {"name": "run", "emptyDir": {}},
        {"name": "models", "emptyDir": {}},
        {"name": "cache", "persistentVolumeClaim": {"claimName": manifests.share(namespace, CONFIG).claim}},
    ]
    if with_secret:
        stage["volumeMounts"] = [*stage["volumeMounts"], own]
        volumes.append({"name": "secret", "secret": {"secretName": "hub"}})
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **USER},
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "tolerations": [{"operator": "Exists"}],
        "initContainers": [common | agent, common | stage],
        "containers": [common | engine],
        "volumes": volumes,
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def ready(lab: api.Lab, namespace: str, *pods: str) -> None:
    for name in pods:
        lab.kubectl("wait", "-n", namespace, "--for=condition=Ready", f"pod/{name}", "--timeout=120s", timeout=130)


def sh(lab: api.Lab, namespace: str, name: str, script: str) -> str:
    """A command in the engine's container; its error output is part of the answer."""
    return lab.kubectl("exec", "-n", namespace, name, "-c", "engine", "--", "sh", "-c", f"({script}) 2>&1 || true")


def hub(lab: api.Lab, query: str = "") -> dict[str, Any]:
    text = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/control{query}').read().decode())"
    return json.loads(lab.kubectl("exec", "-n", SYSTEM, "hub", "--", "python", "-c", text))


def stage_failure(lab: api.Lab, namespace: str, name: str) -> dict[str, Any] | None:
    for status in get(lab, "pod", "-n", namespace, name)["status"].get("initContainerStatuses", []):
        for state in (status.get("state", {}), status.get("lastState", {})):
            if status["name"] == "stage" and (ended := state.get("terminated")) and ended["exitCode"]:
                return json.loads(ended["message"])
    return None


def cache_pod(lab: api.Lab, node: str) -> str:
    found = get(lab, "pods", "-n", SYSTEM, "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_CACHE}")["items"]
    return next(p["metadata"]["name"] for p in found if p["spec"]["nodeName"] == node)


def test_a_node_fetches_once_and_a_private_model_stays_in_its_namespace(nodes: api.Lab) -> None:
    size = sum(map(len, slowhub.model_files(slowhub.SIZE).values()))
    apply(nodes, pod("team-a", "first", "l4-1"), pod("team-a", "second", "l4-1"))
    ready(nodes, "team-a", "first", "second")
    for name in ("first", "second"):
        assert "model.safetensors" in sh(nodes, "team-a", name, f"ls {names.MODEL_PATH}/")
        assert sh(nodes, "team-a", name, f"cat {names.MODEL_PATH}/tokenizer.json") == "{}"
    told = hub(nodes)
    assert size <= told["sent"] < size + 1000, told  # and the byte that proves that each pod may read it
    assert sh(nodes, "team-a", "first", f"ls {names.CACHE_DIR}").split() == [names.CACHE_SOCKET, "models"]

    # The other namespace, on the same node: no credentials, and wrong ones.
    apply(nodes, pod("team-b", "without", "l4-1", with_secret=False), pod("team-b", "wrong", "l4-1"))
    for name in ("without", "wrong"):
        failure = eventually(lambda name=name: stage_failure(nodes, "team-b", name), f"{name} to be refused")
        assert failure["reason"] == reasons.GATED, failure
    look = pod("team-b", "look", "l4-1", with_secret=False)
    look["spec"]["initContainers"] = []
    apply(nodes, look)
    ready(nodes, "team-b", "look")
    seen = sh(nodes, "team-b", "look", f"cd {names.CACHE_DIR} && find . -mindepth 1").split()
    assert sorted(seen) == [f"./{names.CACHE_SOCKET}", "./models"]
    # With the right ones it is served from the node.
    apply(nodes, secret("team-b", slowhub.TOKEN), pod("team-b", "right", "l4-1"))
    ready(nodes, "team-b", "right")
    assert hub(nodes)["sent"] < size + 1000


def test_no_pod_can_write_the_cache(nodes: api.Lab) -> None:
    apply(nodes, secret("team-a", slowhub.TOKEN), pod("team-a", "writer", "l4-1"))
    ready(nodes, "team-a", "writer")
    for script in (
        f"echo x > {names.CACHE_DIR}/mine",
        f"echo x >> {names.MODEL_PATH}/config.json",
        f"rm -f {names.MODEL_PATH}/config.json",
        f"chmod g+w {names.CACHE_DIR}/models",
        f"rm {names.CACHE_DIR}/{names.CACHE_SOCKET}",
    ):
        answer = sh(nodes, "team-a", "writer", script)
        assert "Read-only file system" in answer or "Permission denied" in answer, (script, answer)
    # fsGroup did not give the files to the pod's group.
    owners = sh(nodes, "team-a", "writer", f"stat -L -c %u:%g:%a {names.CACHE_DIR} {names.MODEL_PATH}/config.json")
    assert owners.split() == ["0:0:755", "0:0:444"]


def test_a_cache_killed_in_the_middle_of_a_fetch_goes_on_with_it(nodes: api.Lab) -> None:
    size = slowhub.SIZE
    before = hub(nodes, "?pause=0.4")["sent"]
    apply(nodes, pod("team-a", "patient", "l4-2"))
    eventually(lambda: hub(nodes)["sent"] - before > 0.4 * size, "a good part of the model", 120)
    hub(nodes, "?pause=30")  # no more comes until it is killed
    victim = cache_pod(nodes, "l4-2")
    nodes.signal_container(f"{SYSTEM}/{victim}", signal.SIGKILL)
    at_kill = hub(nodes, "?pause=0")["sent"]
    ready(nodes, "team-a", "patient")
    assert hub(nodes)["sent"] - at_kill < 0.9 * size, "what had arrived was not fetched again"

    assert sh(nodes, "team-a", "patient", f"stat -L -c %s {names.MODEL_PATH}/model.safetensors").strip() == str(
        len(slowhub.model_files(size)["model.safetensors"])
    )
    eventually(
        lambda: get(nodes, "pod", "-n", SYSTEM, victim)["status"]["containerStatuses"][0]["restartCount"] >= 1,
        "the report of the cache's second life",
    )
    stage = get(nodes, "pod", "-n", "team-a", "patient")["status"]["initContainerStatuses"][1]
    assert stage["restartCount"] == 0, "the stage container waited for the cache"
    assert "stage.cache_retry" in nodes.kubectl("logs", "-n", "team-a", "patient", "-c", "stage")
