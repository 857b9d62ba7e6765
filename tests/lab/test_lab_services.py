"""Services and cluster DNS as pods see them."""

import re
from typing import Any

import pytest

from shoal_dev.lab import api
from tests.support.lab import apply, eventually, get

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

_SERVE = (
    "mkdir /tmp/www && hostname > /tmp/www/index.html && "
    "exec python -m http.server --directory /tmp/www --bind 0.0.0.0 8080"
)


def _web(namespace: str, kind: str = "Deployment", replicas: int = 2) -> list[dict[str, Any]]:
    container = {
        "name": "web",
        "image": "shoal",
        "command": ["sh", "-c", _SERVE],
        "ports": [{"name": "web", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    labels = {"app": "web"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
    }
    workload = {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        | ({"serviceName": "web-pods"} if kind == "StatefulSet" else {}),
    }

    def service(name: str, **spec: Any) -> dict[str, Any]:
        ports = [{"name": "http", "port": 80, "targetPort": "web"}]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"selector": labels, "ports": ports} | spec,
        }

    return [workload, service("web"), service("web-pods", clusterIP="None")]


def _pods(lab: api.Lab, namespace: str) -> list[str]:
    items = get(lab, "pods", "-n", namespace)["items"]
    return sorted(p["metadata"]["name"] for p in items if "deletionTimestamp" not in p["metadata"])


def _ready(lab: api.Lab, namespace: str, count: int) -> None:
    def endpoints() -> bool:
        slices = get(lab, "endpointslices", "-n", namespace, "-l", "kubernetes.io/service-name=web")["items"]
        return sum(e["conditions"]["ready"] for s in slices for e in s.get("endpoints") or []) == count

    eventually(endpoints, f"{count} ready endpoints")


def _ask(lab: api.Lab, url: str, times: int = 1) -> list[str]:
    script = f"for i in $(seq {times}); do curl --silent --show-error --max-time 20 {url}; done"
    return lab.exec("sh", "-c", script).split()


def _inside(lab: api.Lab, pod: str, *command: str) -> str:
    import subprocess

    done = subprocess.run(
        lab.pod_command(pod, command), capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    return done.stdout + done.stderr


def test_service_balances_and_survives_a_pods_end(lab: api.Lab, namespace: str) -> None:
    apply(lab, *_web(namespace))
    _ready(lab, namespace, 2)
    url = f"http://web.{namespace}.svc.cluster.local"
    pods = _pods(lab, namespace)
    eventually(lambda: set(_ask(lab, url, 16)) == set(pods), "answers from both pods")

    # From a pod, by the short name, also when the Service leads back to itself.
    answers = _inside(lab, f"{namespace}/{pods[0]}", "sh", "-c", "for i in $(seq 16); do curl -sSm20 web; done").split()
    assert set(answers) == set(pods)

    lab.kubectl("delete", "pod", pods[0], "-n", namespace, "--wait=true")

    def others_answer() -> bool:
        answers = _ask(lab, url, 16)
        return len(answers) == 16 and pods[0] not in answers

    eventually(others_answer, "answers, and none of the pod that is gone")  # nodes hear of an endpoint by a watch


def test_service_without_ready_pod_refuses_at_once(lab: api.Lab, namespace: str) -> None:
    apply(lab, *_web(namespace, replicas=1))
    _ready(lab, namespace, 1)
    (pod,) = _pods(lab, namespace)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "nobody", "namespace": namespace},
        "spec": {"selector": {"app": "nobody"}, "ports": [{"port": 80}]},
    }
    apply(lab, service)
    command = ["curl", "--silent", "--show-error", "--max-time", "5", "http://nobody"]
    # exit text of curl for ECONNREFUSED; a dropped packet would read "timed out"
    eventually(lambda: re.search(r"\(7\)", _inside(lab, f"{namespace}/{pod}", *command)), "a refused connection")


def test_in_cluster_configuration_reaches_the_api_server(lab: api.Lab, namespace: str) -> None:
    apply(lab, *_web(namespace, replicas=1))
    _ready(lab, namespace, 1)
    (pod,) = _pods(lab, namespace)
    script = (
        "F=/var/run/secrets/kubernetes.io/serviceaccount; curl -sSm5 --cacert $F/ca.crt "
        '-H "Authorization: Bearer $(cat $F/token)" '
        "https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/apis/authentication.k8s.io/v1"
    )
    assert '"kind": "APIResourceList"' in _inside(lab, f"{namespace}/{pod}", "sh", "-c", script)


def test_names_of_services_and_stateful_pods(lab: api.Lab, namespace: str) -> None:
    apply(lab, *_web(namespace, kind="StatefulSet"))
    _ready(lab, namespace, 2)
    addresses = {p["metadata"]["name"]: p["status"]["podIP"] for p in get(lab, "pods", "-n", namespace)["items"]}
    cluster_ip = get(lab, "service", "web", "-n", namespace)["spec"]["clusterIP"]

    def look_up(name: str) -> set[str]:
        text = _inside(lab, f"{namespace}/web-0", "getent", "ahostsv4", name)
        return {line.split()[0] for line in text.splitlines()}

    assert look_up("web") == {cluster_ip}
    assert look_up(f"web.{namespace}.svc.cluster.local") == {cluster_ip}
    eventually(lambda: look_up("web-pods") == set(addresses.values()), "the addresses of both pods")
    assert look_up("web-1.web-pods") == {addresses["web-1"]}
    assert look_up("nothing") == set()


def test_terminating_pod_still_serves_when_it_is_the_last(lab: api.Lab, namespace: str) -> None:
    workload, *services = _web(namespace, replicas=1)
    template = workload["spec"]["template"]["spec"]
    template["terminationGracePeriodSeconds"] = 90
    template["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "60"]}}}
    apply(lab, workload, *services)
    _ready(lab, namespace, 1)
    (pod,) = _pods(lab, namespace)
    lab.kubectl("delete", "deployment", "web", "-n", namespace, "--wait=false")
    eventually(
        lambda: "deletionTimestamp" in get(lab, "pod", pod, "-n", namespace)["metadata"], "the pod's deletion", 45
    )
    assert _ask(lab, f"http://web.{namespace}.svc.cluster.local", 3) == [pod] * 3
