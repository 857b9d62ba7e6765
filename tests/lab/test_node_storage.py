"""Volumes that live on a node: hostPath, `local` PersistentVolumes, emptyDir limits, and what a lost node loses."""

from pathlib import Path
from typing import Any

import pytest

from shoal_dev.lab import api
from tests.support.lab import apply, eventually, get

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

ANYWHERE = [{"operator": "Exists"}]


def pod(namespace: str, name: str, script: str, **spec: Any) -> dict[str, Any]:
    mounts = spec.pop("mounts", [])
    resources = spec.pop("resources", {})
    main = {
        "name": "main", "image": "shoal:test", "command": ["sh", "-c", script], "volumeMounts": mounts,
        "resources": resources,
    }  # fmt: skip
    base = {"terminationGracePeriodSeconds": 1, "tolerations": ANYWHERE, "containers": [main]}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": base | spec}


def host_path(path: str, kind: str = "DirectoryOrCreate") -> list[dict[str, Any]]:
    return [{"name": "data", "hostPath": {"path": path, "type": kind}}]


def claimed(name: str, **options: Any) -> list[dict[str, Any]]:
    return [{"name": "data", "persistentVolumeClaim": {"claimName": name, **options}}]


ROOT = {"runAsUser": 0}
DATA = [{"name": "data", "mountPath": "/data"}]


def volume(namespace: str, path: str, label: str, **spec: Any) -> list[dict[str, Any]]:
    """A `local` PersistentVolume bound beforehand to the claim `cache`, and the claim."""
    name = f"cache-{namespace}"
    shared: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    expression = {"key": label, "operator": "In", "values": ["yes"]}
    made = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": shared
        | {
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": path},
            "claimRef": {"namespace": namespace, "name": "cache"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
        }
        | spec,
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cache", "namespace": namespace},
        "spec": shared | {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
    }
    return [made, claim]


def daemon_set(namespace: str, path: str, script: str) -> dict[str, Any]:
    # As root: a kubelet makes the folder for root alone to write.
    template = pod(namespace, "x", script, volumes=host_path(path), mounts=DATA, securityContext=ROOT)["spec"]
    template["containers"][0]["env"] = [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    labels = {"app": "cache"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "cache", "namespace": namespace},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": template}},
    }


def wait(lab: api.Lab, namespace: str, name: str, condition: str = "condition=Ready") -> None:
    lab.kubectl("wait", "-n", namespace, f"--for={condition}", f"pod/{name}", "--timeout=90s", timeout=100)


def run(lab: api.Lab, namespace: str, name: str, script: str) -> str:
    """A command in a pod; its error output is part of the answer."""
    return lab.kubectl("exec", "-n", namespace, name, "--", "sh", "-c", f"({script}) 2>&1 || true").strip()


def messages(lab: api.Lab, namespace: str, name: str, reason: str) -> list[str]:
    events = get(lab, "events", "-n", namespace, f"--field-selector=involvedObject.name={name},reason={reason}")
    return [event["message"] for event in events["items"]]


def test_a_read_only_local_volume_shows_each_node_its_own_cache_and_nobody_can_write_it(
    lab: api.Lab, namespace: str
) -> None:
    path, label = f"/var/lib/cache-{namespace}", f"cache-{namespace}"
    fill = "mkdir -p /data/blobs; echo $NODE > /data/blobs/node; chmod -R a+rX /data; exec sleep 10000"
    apply(lab, daemon_set(namespace, path, fill), *volume(namespace, path, label, mountOptions=["ro"]))
    lab.kubectl("rollout", "status", "-n", namespace, "daemonset/cache", "--timeout=120s", timeout=130)
    assert len(get(lab, "pods", "-n", namespace)["items"]) == 3
    lab.kubectl("label", "node", "l4-1", "l4-2", f"{label}=yes")
    user = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 2000}
    for node in ("l4-1", "l4-2"):
        # Without `readOnly`, on the claim or on the mount: the PersistentVolume alone protects.
        apply(
            lab,
            pod(namespace, f"on-{node}", "exec sleep 10000", volumes=claimed("cache"), mounts=DATA,
                securityContext=user, nodeSelector={"kubernetes.io/hostname": node}),
        )  # fmt: skip
    for node in ("l4-1", "l4-2"):
        name = f"on-{node}"
        wait(lab, namespace, name)
        eventually(lambda name=name, node=node: run(lab, namespace, name, "cat /data/blobs/node") == node, "the file")
        assert "Read-only file system" in run(lab, namespace, name, "echo x > /data/blobs/mine")
        assert "Read-only file system" in run(lab, namespace, name, "chmod g+w /data/blobs")
        assert run(lab, namespace, name, "stat -c %g:%a /data/blobs /data/blobs/node").split() == ["0:755", "0:644"]
        assert not Path(path).exists(), "the machine's own disk was written"
    # What the cache writes later is there at once.
    writers = get(lab, "pods", "-n", namespace, "-l", "app=cache")["items"]
    writer = next(p["metadata"]["name"] for p in writers if p["spec"]["nodeName"] == "l4-1")
    run(lab, namespace, writer, "echo late > /data/part && mv /data/part /data/blobs/late")
    assert run(lab, namespace, "on-l4-1", "cat /data/blobs/late") == "late"
    assert "No such file" in run(lab, namespace, "on-l4-2", "cat /data/blobs/late")


def test_without_ro_an_fs_group_makes_the_cache_writable_and_a_second_one_does_not_change_it(
    lab: api.Lab, namespace: str
) -> None:
    path, label = f"/var/lib/open-{namespace}", f"open-{namespace}"
    folder = lab.paths.node_disk("l4-1") / path.removeprefix("/")
    folder.mkdir(parents=True)
    (folder / "file").write_text("x")
    apply(lab, *volume(namespace, path, label))
    lab.kubectl("label", "node", "l4-1", f"{label}=yes")

    def start(name: str, group: int, **claim: Any) -> None:
        user = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": group}
        apply(
            lab,
            pod(namespace, name, "exec sleep 10000", volumes=claimed("cache", **claim), mounts=DATA,
                securityContext=user),
        )  # fmt: skip
        wait(lab, namespace, name)

    start("careful", 2000, readOnly=True)
    assert run(lab, namespace, "careful", "stat -c %g:%a /data/file") == "0:644"
    lab.kubectl("delete", "pod", "-n", namespace, "careful")
    start("first", 2000)
    assert run(lab, namespace, "first", "stat -c %g:%a /data /data/file").split() == ["2000:2775", "2000:664"]
    assert run(lab, namespace, "first", "echo y > /data/file && cat /data/file") == "y"
    start("second", 3000)
    assert run(lab, namespace, "second", "stat -c %g /data") == "2000"
    warning = (
        f"The requested fsGroup is 3000, but the volume cache-{namespace} has GID 2000. "
        "The volume may not be shareable."
    )
    eventually(lambda: messages(lab, namespace, "second", "AlreadyMountedVolume") == [warning], "the warning")


def test_a_local_volume_whose_folder_or_node_is_not_there_says_so(lab: api.Lab, namespace: str) -> None:
    path, label = f"/var/lib/later-{namespace}", f"later-{namespace}"
    apply(lab, *volume(namespace, path, label, mountOptions=["ro"]))
    apply(lab, pod(namespace, "unlabelled", "exec sleep 10000", volumes=claimed("cache"), mounts=DATA))
    # The first reason may be that the claim is not bound yet.
    why = "didn't match PersistentVolume's node affinity"
    eventually(lambda: any(why in m for m in messages(lab, namespace, "unlabelled", "FailedScheduling")), "a reason")
    # Bound to a node without the scheduler: the node itself refuses.
    apply(lab, pod(namespace, "forced", "exec sleep 10000", volumes=claimed("cache"), mounts=DATA, nodeName="l4-1"))
    refused = (
        f'MountVolume.SetUp failed for volume "data" : MountVolume.NodeAffinity check failed for volume '
        f'"cache-{namespace}" : no matching NodeSelectorTerms'
    )
    eventually(lambda: refused in messages(lab, namespace, "forced", "FailedMount"), "the node's refusal")
    lab.kubectl("label", "node", "l4-1", f"{label}=yes")
    absent = f'MountVolume.SetUp failed for volume "data" : path "{path}" does not exist'
    eventually(lambda: absent in messages(lab, namespace, "forced", "FailedMount"), "the missing folder")
    (lab.paths.node_disk("l4-1") / path.removeprefix("/")).mkdir(parents=True)
    wait(lab, namespace, "forced")
    wait(lab, namespace, "unlabelled")


def test_a_claim_waits_for_its_first_pod_and_both_go_where_the_volume_is(lab: api.Lab, namespace: str) -> None:
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": f"local-{namespace}"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    path, label = f"/var/lib/wait-{namespace}", f"wait-{namespace}"
    (lab.paths.node_disk("l4-2") / path.removeprefix("/")).mkdir(parents=True)
    made, claim = volume(namespace, path, label, storageClassName=f"local-{namespace}")
    del made["spec"]["claimRef"], claim["spec"]["volumeName"]
    claim["spec"]["storageClassName"] = f"local-{namespace}"
    lab.kubectl("label", "node", "l4-2", f"{label}=yes")
    apply(lab, storage_class, made, claim)
    eventually(
        lambda: [e for e in get(lab, "events", "-n", namespace)["items"] if e["reason"] == "WaitForFirstConsumer"],
        "the claim waits",
    )
    apply(lab, pod(namespace, "first", "exec sleep 10000", volumes=claimed("cache"), mounts=DATA))
    wait(lab, namespace, "first")
    assert get(lab, "pod", "-n", namespace, "first")["spec"]["nodeName"] == "l4-2"


def test_what_is_on_a_nodes_disk_survives_its_switch_and_not_its_replacement(lab: api.Lab, namespace: str) -> None:
    path = f"/var/lib/kept-{namespace}"
    script = "ls /data; echo here >> /data/visits; exec sleep 10000"
    apply(
        lab,
        pod(namespace, "keeper", script, volumes=host_path(path), mounts=DATA, nodeName="l4-2", securityContext=ROOT),
    )
    wait(lab, namespace, "keeper")
    file = lab.paths.node_disk("l4-2") / path.removeprefix("/") / "visits"
    eventually(file.exists, "the first visit")

    def lives(count: int) -> bool:
        return get(lab, "pod", "-n", namespace, "keeper")["status"]["containerStatuses"][0]["restartCount"] == count

    lab.kill_node("l4-2")
    lab.start_node("l4-2")
    eventually(lambda: lives(1), "its second life")
    eventually(lambda: file.read_text() == "here\nhere\n", "the second visit")
    lab.kubectl("cordon", "l4-2")
    lab.replace_node("l4-2")
    eventually(lambda: lives(2), "its third life")
    eventually(lambda: file.exists() and file.read_text() == "here\n", "an empty disk, visited once")
    assert not get(lab, "node", "l4-2")["spec"].get("unschedulable")


def test_what_only_the_machine_has_is_read_only(lab: api.Lab, namespace: str) -> None:
    made = pod(namespace, "reader", "exec sleep 10000", volumes=host_path("/etc", "Directory"), mounts=DATA)
    apply(lab, made, pod(namespace, "wrong", "true", volumes=host_path("/etc/passwd", "Directory"), mounts=DATA))
    wait(lab, namespace, "reader")
    assert run(lab, namespace, "reader", "head -1 /data/passwd").startswith("root:")
    assert "Read-only file system" in run(lab, namespace, "reader", "touch /data/mine")
    expected = 'MountVolume.SetUp failed for volume "data" : hostPath type check failed: /etc/passwd is not a directory'
    eventually(lambda: expected in messages(lab, namespace, "wrong", "FailedMount"), "the reason")


def test_ephemeral_storage_is_counted_by_the_scheduler(lab: api.Lab, namespace: str) -> None:
    for name, size in (("fits", "700Gi"), ("does-not", "2Ti")):
        storage = {"requests": {"ephemeral-storage": size}}
        apply(lab, pod(namespace, name, "exec sleep 10000", resources=storage))
    wait(lab, namespace, "fits")
    reason = eventually(lambda: messages(lab, namespace, "does-not", "FailedScheduling"), "a reason")
    assert "Insufficient ephemeral-storage" in reason[0]


def test_an_empty_dir_over_its_limit_evicts_the_pod(lab: api.Lab, namespace: str) -> None:
    volumes = [{"name": "data", "emptyDir": {"sizeLimit": "1Mi"}}]
    script = "head -c 3000000 /dev/urandom > /data/big; exec sleep 10000"
    apply(lab, pod(namespace, "greedy", script, volumes=volumes, mounts=DATA, terminationGracePeriodSeconds=60))
    wait(lab, namespace, "greedy", "jsonpath={.status.phase}=Failed")
    status = get(lab, "pod", "-n", namespace, "greedy")["status"]
    assert status["reason"] == "Evicted"
    assert status["message"] == 'Usage of EmptyDir volume "data" exceeds the limit "1Mi". '
    conditions = {c["type"]: c for c in status["conditions"]}
    assert conditions["DisruptionTarget"]["reason"] == "TerminationByKubelet"
    assert conditions["Ready"]["status"] == "False"
