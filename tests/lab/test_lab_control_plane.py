"""What a user finds after `shoal lab up`: a real cluster that real kubectl and helm talk to."""

import http.client
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from shoal_dev.lab import api
from tests.support.lab import apply, eventually, get

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


def test_nodes_are_ready_with_gpus_labels_and_taints(lab: api.Lab) -> None:
    def found() -> dict[str, dict[str, Any]]:
        return {n["metadata"]["name"]: n for n in get(lab, "nodes")["items"]}

    # A node that another test cordoned or switched off has a taint more, for a moment after it is back.
    eventually(lambda: len(found()["l4-1"]["spec"]["taints"]) == 1, "the taints of a node that is well")
    nodes = found()
    assert sorted(nodes) == ["cpu-1", "l4-1", "l4-2"]
    gpu = nodes["l4-1"]
    assert gpu["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert gpu["metadata"]["labels"]["nvidia.com/gpu.product"] == "NVIDIA-L4"
    assert gpu["metadata"]["labels"]["nvidia.com/gpu.memory"] == "23034"
    assert [(t["key"], t["effect"]) for t in gpu["spec"]["taints"]] == [("nvidia.com/gpu", "NoSchedule")]
    assert "nvidia.com/gpu" not in nodes["cpu-1"]["status"]["allocatable"]
    for node in nodes.values():
        assert [c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"] == ["True"]


def test_kubeconfig_works_with_plain_kubectl(lab: api.Lab) -> None:
    kubectl = str(lab.state.binaries / "kubectl")
    done = subprocess.run(
        [kubectl, f"--kubeconfig={lab.kubeconfig}", "auth", "whoami", "-o", "name"],
        capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin", "HOME": "/nonexistent"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    server = yaml.safe_load(lab.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    assert server == f"https://127.0.0.1:{lab.state.api_port}"


def test_helm_lists_no_release(lab: api.Lab) -> None:
    assert lab.helm("list", "--all-namespaces", "--output", "json").strip() == "[]"


def test_a_second_up_with_the_same_options_finds_the_lab_and_with_others_says_so(lab: api.Lab) -> None:
    with pytest.raises(api.LabError, match="is up with another fleet or other options"):
        api.Lab.up(lab.state.name, faults=False)


def test_forwarder_explains_that_the_service_is_not_there(lab: api.Lab) -> None:
    client = http.client.HTTPConnection("127.0.0.1", lab.forward_port(), timeout=20)
    client.request("GET", "/v1/models")
    answer = client.getresponse()
    assert answer.status == 503
    assert answer.read() == b"shoal lab: Service shoal-system/shoal-gateway does not exist in the lab (yet)\n"
    client.close()


def _shoal(lab: api.Lab, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", "lab", command, f"--name={lab.state.name}", *arguments],
        capture_output=True, text=True, timeout=90, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_status_names_every_process_and_the_ways_in(lab: api.Lab) -> None:
    done = _shoal(lab, "status")
    assert done.returncode == 0, done.stderr
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "node-cpu-1", "node-l4-1"):
        assert re.search(rf"^  {name} +running for ", done.stdout, re.MULTILINE), done.stdout
    assert f"export KUBECONFIG={lab.kubeconfig}" in done.stdout
    assert f"http://127.0.0.1:{lab.forward_port()} leads to shoal-system/shoal-gateway:80" in done.stdout


def test_exec_is_inside_the_lab(lab: api.Lab) -> None:
    assert _shoal(lab, "exec", "--", "getent", "hosts", "kubernetes.default").stdout.split()[0] == "10.96.0.1"
    assert _shoal(lab, "exec", "--", "sh", "-c", "exit 7").returncode == 7
    missing = _shoal(lab, "exec", "--pod", "default/none", "--", "true")
    assert f"Error: no pod default/none runs in lab '{lab.state.name}'" in missing.stderr
    assert missing.returncode == 1


def test_logs_of_a_component_and_of_an_unknown_one(lab: api.Lab) -> None:
    assert "kube-scheduler" in _shoal(lab, "logs").stdout.split()
    assert _shoal(lab, "logs", "kube-apiserver", "--lines=3").stdout.count("\n") == 3
    assert "no log of 'nothing'; there are: " in _shoal(lab, "logs", "nothing").stderr


def test_claim_gets_a_volume_and_its_folder_goes_with_it(lab: api.Lab, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "writer", "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "writer",
                    "image": "shoal",
                    "command": ["sh", "-c", "echo kept > /data/file"],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        },
    }
    apply(lab, claim, pod)
    eventually(lambda: get(lab, "pod", "writer", "-n", namespace)["status"]["phase"] == "Succeeded", "the pod's end")
    folders = list(lab.paths.node_data.glob(f"*/disk/var/lib/lab-volumes/{namespace}_data_*"))
    assert [(f / "file").read_text() for f in folders] == ["kept\n"]
    lab.kubectl("delete", "pod/writer", "pvc/data", "-n", namespace)
    eventually(
        lambda: not list(lab.paths.node_data.glob(f"*/disk/var/lib/lab-volumes/{namespace}_data_*")),
        "the folder's removal",
    )

    def volumes() -> list[str]:
        items = get(lab, "pv")["items"]
        return [v["metadata"]["name"] for v in items if v["spec"].get("claimRef", {}).get("namespace") == namespace]

    eventually(lambda: not volumes(), "the volume's removal")
