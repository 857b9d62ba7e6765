"""What a process node does beyond the order of things: volumes, users, images, logs, exec, and its own death."""

import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal_dev.lab import api
from tests.support.lab import apply, eventually, get, make_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

FLEET = {
    "nodes": [
        {"name": "cpu-1"},
        {"name": "l4-1", "gpus": 2, "gpuProduct": "NVIDIA-L4", "gpuMemoryMiB": 23034},
        {"name": "paper-{n}", "count": 10, "statusOnly": True, "labels": {"paper": "yes"}},
    ]
}


@pytest.fixture(scope="module")
def lab() -> Generator[api.Lab]:
    made = make_lab(FLEET, faults=True)
    try:
        yield made
    finally:
        made.down()


def pod(namespace: str, name: str, script: str, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "shoal:test", "command": ["sh", "-c", script]} | (container or {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"nodeName": "cpu-1", "terminationGracePeriodSeconds": 1, "containers": [main]} | spec,
    }


def wait(lab: api.Lab, namespace: str, name: str, condition: str = "condition=Ready") -> None:
    lab.kubectl("wait", "-n", namespace, f"--for={condition}", f"pod/{name}", "--timeout=120s", timeout=130)


def state(lab: api.Lab, namespace: str, name: str) -> dict[str, Any]:
    """Of the container; nothing until the node has said something."""
    statuses = get(lab, "pod", "-n", namespace, name)["status"].get("containerStatuses")
    return statuses[0]["state"] if statuses else {}


def why_it_waits(lab: api.Lab, namespace: str, name: str) -> str:
    return eventually(lambda: state(lab, namespace, name).get("waiting", {}).get("message"), "a reason")


def messages(lab: api.Lab, namespace: str, name: str, reason: str) -> list[str]:
    events = get(lab, "events", "-n", namespace, f"--field-selector=involvedObject.name={name},reason={reason}")
    return [event["message"] for event in events["items"]]


def processes(marker: str) -> list[int]:
    """Pids on this machine whose command line holds the marker."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and marker in Path(f"/proc/{entry}/cmdline").read_text():
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_a_container_sees_a_world_of_its_own(lab: api.Lab, namespace: str) -> None:
    script = (
        "id -u; id -g; hostname; grep -E '^(NoNewPrivs|CapBnd|CapEff)' /proc/self/status; ls /proc | grep -c '^[0-9]';"
        "touch /x 2>&1; touch /tmp/y /scratch/z && echo written; df -k /dev/shm | tail -1; cat /etc/resolv.conf"
    )
    container = {
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "scratch", "mountPath": "/scratch"}],
    }
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    security = {"runAsUser": 65532, "runAsGroup": 65531, "fsGroup": 65530, "runAsNonRoot": True}
    made = pod(namespace, "own", script, container, volumes=volumes, securityContext=security, restartPolicy="Never")
    apply(lab, made)
    wait(lab, namespace, "own", "jsonpath={.status.phase}=Succeeded")
    out = lab.kubectl("logs", "-n", namespace, "own")
    assert out.splitlines()[:3] == ["65532", "65531", "own"], out
    assert "NoNewPrivs:\t1" in out
    assert "CapBnd:\t0000000000000000" in out
    assert "Read-only file system" in out
    assert "written" in out
    assert " 8192 " in out
    assert f"search {namespace}.svc.cluster.local svc.cluster.local cluster.local" in out


def test_environment(lab: api.Lab, namespace: str) -> None:
    env: list[dict[str, Any]] = [
        {"name": "PORT", "value": "80"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "URL", "value": "http://$(IP):$(PORT)/$(UNKNOWN)/$$(PORT)"},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "x", "optional": True}}},
    ]
    container = {
        "env": env,
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "S_"}],
        "resources": {"limits": {"memory": "1Gi"}},
    }
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": namespace}}
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": namespace}}
    made = pod(namespace, "env", "env", container, restartPolicy="Never")
    apply(lab, settings | {"data": {"MODE": "fast"}}, keys | {"stringData": {"token": "abc"}}, made)
    wait(lab, namespace, "env", "jsonpath={.status.phase}=Succeeded")
    lines = lab.kubectl("logs", "-n", namespace, "env").splitlines()
    address = get(lab, "pod", "-n", namespace, "env")["status"]["podIP"]
    assert f"URL=http://{address}:80/$(UNKNOWN)/$(PORT)" in lines
    assert {"MEMORY=1024", "TOKEN=abc", "S_MODE=fast", "KUBERNETES_SERVICE_HOST=10.96.0.1"} <= set(lines)
    assert not [line for line in lines if line.startswith("NONE=")]


def test_a_config_map_follows_its_object(lab: api.Lab, namespace: str) -> None:
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "live", "namespace": namespace}}
    mounts = [{"name": "live", "mountPath": "/live"}]
    volumes = [{"name": "live", "configMap": {"name": "live"}}]
    made = pod(namespace, "live", "exec sleep 1000", {"volumeMounts": mounts}, volumes=volumes)
    apply(lab, settings | {"data": {"a": "1"}}, made)
    wait(lab, namespace, "live")
    apply(lab, settings | {"data": {"a": "2", "b": "new"}})
    read = ("exec", "-n", namespace, "live", "--", "cat", "/live/a", "/live/b")
    eventually(lambda: lab.kubectl(*read) == "2new", "the new content")


def test_a_missing_secret_is_waited_for(lab: api.Lab, namespace: str) -> None:
    mounts = [{"name": "later", "mountPath": "/later"}]
    volumes = [{"name": "later", "secret": {"secretName": "later"}}]
    reference = {"name": "K", "valueFrom": {"secretKeyRef": {"name": "later", "key": "k"}}}
    apply(
        lab,
        pod(namespace, "volume", "exec sleep 1000", {"volumeMounts": mounts}, volumes=volumes),
        pod(namespace, "variable", "exec sleep 1000", {"env": [reference]}),
    )
    found = eventually(lambda: messages(lab, namespace, "volume", "FailedMount"), "FailedMount")
    assert found[0] == 'MountVolume.SetUp failed for volume "later" : secrets "later" not found'
    waiting = why_it_waits(lab, namespace, "variable")
    assert waiting == 'secrets "later" not found'
    assert state(lab, namespace, "variable")["waiting"]["reason"] == "CreateContainerConfigError"
    lab.kubectl("create", "secret", "generic", "later", "-n", namespace, "--from-literal=k=v")
    wait(lab, namespace, "volume")
    wait(lab, namespace, "variable")


def test_an_unknown_image_names_the_known_ones(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "unknown", "true", {"image": "registry.example/nothing:v1"}))
    waiting = why_it_waits(lab, namespace, "unknown")
    assert state(lab, namespace, "unknown")["waiting"]["reason"] in ("ErrImagePull", "ImagePullBackOff")
    assert (
        'Failed to pull image "registry.example/nothing:v1": the lab\'s image table has no such repository' in waiting
    )
    assert "shoal" in waiting.rpartition("it has:")[2]


def test_root_is_refused_where_it_must_not_be(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "root", "true", securityContext={"runAsUser": 0, "runAsNonRoot": True}))
    waiting = why_it_waits(lab, namespace, "root")
    assert waiting == "container has runAsNonRoot and image will run as root"


def test_a_program_that_is_not_there(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "typo", "", {"command": ["no-such-program"]}, restartPolicy="Never"))
    wait(lab, namespace, "typo", "jsonpath={.status.phase}=Failed")
    end = state(lab, namespace, "typo")["terminated"]
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert 'exec: "no-such-program": executable file not found in $PATH' in end["message"]


def test_logs_and_messages_of_a_crash(lab: api.Lab, namespace: str) -> None:
    container = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    apply(lab, pod(namespace, "crash", "echo one; echo two; kill -9 $$$$; exit 3", container))
    status = eventually(
        lambda: [
            s
            for s in get(lab, "pod", "-n", namespace, "crash")["status"].get("containerStatuses", [])
            if s["restartCount"]
        ],
        "a restart",
    )[0]
    # PID 1 of a pid namespace: its own SIGKILL does not reach it ($$$$ because $$ in a pod's spec is one dollar)
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert status["lastState"]["terminated"]["message"].strip() == "one\ntwo"
    assert lab.kubectl("logs", "-n", namespace, "crash", "--previous") == "one\ntwo\n"
    # The next life may be one that has only begun.
    eventually(lambda: lab.kubectl("logs", "-n", namespace, "crash", "--tail=1") == "two\n", "its last line")
    stamped, *_ = eventually(
        lambda: lab.kubectl("logs", "-n", namespace, "crash", "--timestamps").splitlines(), "a log"
    )
    assert stamped.startswith("20")
    assert stamped.endswith("Z one")


def test_logs_are_followed_to_the_end(lab: api.Lab, namespace: str) -> None:
    script = "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.5; done"
    apply(lab, pod(namespace, "talk", script, restartPolicy="Never"))
    eventually(lambda: state(lab, namespace, "talk").keys() & {"running", "terminated"}, "the start")
    assert lab.kubectl("logs", "-n", namespace, "-f", "talk").splitlines()[-1] == "line 6"


def test_exec(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "shell", "exec sleep 1000", securityContext={"runAsUser": 65532}))
    wait(lab, namespace, "shell")
    assert lab.kubectl("exec", "-n", namespace, "shell", "--", "id", "-u") == "65532\n"
    assert lab.kubectl("exec", "-i", "-n", namespace, "shell", "--", "cat", stdin="through\n") == "through\n"
    with pytest.raises(api.LabError, match="command terminated with exit code 7"):
        lab.kubectl("exec", "-n", namespace, "shell", "--", "sh", "-c", "exit 7")


def test_term_reaches_the_main_process_alone(lab: api.Lab, namespace: str) -> None:
    """A process group would take the workers down before the server has drained."""
    script = (
        "(trap 'echo child-TERM' TERM; while :; do sleep 0.1; done) & "
        "trap 'echo main-TERM; sleep 0.5; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    )
    apply(lab, pod(namespace, "group", script, terminationGracePeriodSeconds=10))
    wait(lab, namespace, "group")
    follow = subprocess.Popen(
        [lab.state.binaries / "kubectl", "logs", "-n", namespace, "-f", "group"],
        env=lab.environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert follow.stdout is not None
        assert follow.stdout.readline() == "up\n"  # it listens before the pod goes
        lab.kubectl("delete", "pod", "-n", namespace, "group")
        out = follow.stdout.read()
    finally:
        follow.kill()
        follow.communicate()
    assert "main-TERM" in out
    assert "child-TERM" not in out


def test_gpus_are_not_shared(lab: api.Lab, namespace: str) -> None:
    container = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    script = "echo $CUDA_VISIBLE_DEVICES; exec sleep 1000"
    tolerations = [{"operator": "Exists"}]
    apply(lab, *(pod(namespace, n, script, container, nodeName="l4-1", tolerations=tolerations) for n in ("g1", "g2")))
    wait(lab, namespace, "g1")
    wait(lab, namespace, "g2")
    seen = {eventually(lambda name=name: lab.kubectl("logs", "-n", namespace, name), "a log") for name in ("g1", "g2")}
    assert seen == {"0\n", "1\n"}


def test_a_node_that_dies_leaves_nothing_and_starts_its_pods_again(lab: api.Lab, namespace: str) -> None:
    marker = f"marker-{namespace}"
    tolerations = [{"operator": "Exists"}]
    made = pod(
        namespace, "phoenix", f"sh -c 'sleep 1000; true {marker}' & wait", nodeName="l4-1", tolerations=tolerations
    )
    apply(lab, made)
    wait(lab, namespace, "phoenix")
    assert processes(marker)
    lab.kill_node("l4-1")
    eventually(lambda: not processes(marker), "the end of all processes")
    eventually(lambda: "p2-" not in lab.exec("ip", "-brief", "link"), "the end of the pods' networks")
    lab.start_node("l4-1")
    eventually(
        lambda: get(lab, "pod", "-n", namespace, "phoenix")["status"]["containerStatuses"][0]["restartCount"] == 1,
        "the pod's second life",
    )
    wait(lab, namespace, "phoenix")
    assert processes(marker)
    lab.kubectl("delete", "pod", "-n", namespace, "phoenix")
    assert not processes(marker)


def test_a_node_that_was_taken_for_lost_says_otherwise_of_itself_and_its_pods(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "there", "sleep 300"))
    wait(lab, namespace, "there")

    def ready(*what: str) -> str:
        conditions = get(lab, *what)["status"]["conditions"]
        return next(c["status"] for c in conditions if c["type"] == "Ready")

    # As the node lifecycle controller writes them when no Lease came in time.
    for what, value in ((("node", "cpu-1"), "Unknown"), (("pod", "there", "-n", namespace), "False")):
        status = {"status": {"conditions": [{"type": "Ready", "status": value, "reason": "NodeStatusUnknown"}]}}
        lab.kubectl("patch", *what, "--subresource=status", "--type=strategic", "-p", orjson.dumps(status).decode())
        eventually(lambda what=what: ready(*what) == "True", f"{what[0]} says Ready again")


def test_status_only_nodes_take_hundreds_of_pods(lab: api.Lab, namespace: str) -> None:
    count = 200
    template = {
        "metadata": {"labels": {"app": "many"}},
        "spec": {
            "nodeSelector": {"paper": "yes"},
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "anything"}],
        },
    }
    spec = {"replicas": count, "selector": {"matchLabels": {"app": "many"}}, "template": template}
    meta = {"name": "many", "namespace": namespace}
    apply(lab, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec})
    lab.kubectl("wait", "-n", namespace, f"--for=jsonpath={{.status.readyReplicas}}={count}", "deployment/many",
                "--timeout=300s", timeout=310)  # fmt: skip
    lab.kubectl("scale", "-n", namespace, "deployment/many", "--replicas=0")
    eventually(lambda: not get(lab, "pods", "-n", namespace)["items"], "the end of all pods", 180)
