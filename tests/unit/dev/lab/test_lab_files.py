"""Fleet files, options and folders that a user gives to the lab, and what is said of bad ones."""

import os
from pathlib import Path
from typing import Any

import pytest

from shoal_dev.lab import api, binaries, fleet, forward, images, volumes
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.state import LabForward, Paths


def test_default_fleet_is_what_the_documentation_says() -> None:
    nodes = fleet.load(None).running(Path("/pki"))
    assert [n.name for n in nodes] == [
        "cpu-1", "h100-1", "h100-2", "l40s-1", "l40s-2", "l40s-3", "l4-1", "l4-2",
    ]  # fmt: skip
    assert [n.capacity.gpus for n in nodes] == [0, 8, 8, 4, 4, 4, 2, 2]
    assert nodes[1].labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert [t.key for t in nodes[1].taints] == ["nvidia.com/gpu"]
    assert nodes[0].taints == ()
    assert len({n.index for n in nodes}) == len({n.kubelet_port for n in nodes}) == len(nodes)


def test_status_only_nodes_are_apart() -> None:
    wanted = fleet.load(None).with_status_nodes(300)
    assert len(wanted.running(Path("/pki"))) == 8
    assert len(wanted.status_only()) == 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []", "nodes: Tuple should have at least 1 item"),
        ("node: []", "node: Extra inputs are not permitted"),
        ("nodes: [{name: a, count: 2}]", "nodes.0: name 'a' needs {n}, because count is 2"),
        ("nodes: [{name: a}, {name: a}]", "file: two nodes are called 'a'"),
        ("nodes: [{name: a, gpus: 2}]", "nodes.0: gpus needs gpuProduct and gpuMemoryMiB"),
        ("nodes: [{name: a, memory: 12 GB}]", "nodes.0.memory: String should match pattern"),
        ("nodes: [{name: 'a{n}', count: 251}]", "251 nodes that run processes; at most 250 fit"),
        ("nodes: [{name: a, gpu: 2}]", "nodes.0.gpu: Extra inputs are not permitted"),
        ("nodes: {", "is no YAML"),
    ],
)
def test_bad_fleet_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(LabError) as caught:
        fleet.load(file)
    assert str(caught.value).startswith(f"fleet file {file}")
    assert message in str(caught.value)


def test_missing_fleet_file(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="No such file or directory"):
        fleet.load(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["a/b", "a:80", "a/b:http", "a/b:0", "a/b:80=99999", "a/b:80="])
def test_bad_forward(text: str) -> None:
    with pytest.raises(LabError, match="expected NAMESPACE/SERVICE:PORT"):
        LabForward.parse(text)


def test_forward() -> None:
    assert LabForward.parse("a/b:80=8080") == LabForward(namespace="a", service="b", port=80, host_port=8080)
    assert LabForward.parse("a/b:80").host_port == 0


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (None, forward.ForwardTarget("", 0, "Service a/b does not exist in the lab (yet)")),
        ({"clusterIP": "10.96.0.7", "ports": [{"port": 80}]}, forward.ForwardTarget("10.96.0.7", 80)),
        (
            {"clusterIP": "10.96.0.7", "ports": [{"port": 81}]},
            forward.ForwardTarget("", 0, "Service a/b has no port 80; it has: 81"),
        ),
        (
            {"clusterIP": "None", "ports": [{"port": 80}]},
            forward.ForwardTarget("", 0, "Service a/b is headless: it has no address to forward to"),
        ),
    ],
)
def test_forwarder_follows_the_service(spec: dict[str, Any] | None, target: forward.ForwardTarget) -> None:
    known = {} if spec is None else {"a/b": {"spec": spec}}
    assert forward.service_target(LabForward.parse("a/b:80"), known) == target


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "../x", "a" * 33])
def test_bad_lab_name(name: str) -> None:
    with pytest.raises(LabError, match="is no lab name"):
        Paths.of(name)


def test_lab_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(LabError, match=r"there is no lab 'none': `shoal lab up --name none` makes it"):
        api.Lab.get("none")


@pytest.mark.parametrize("text", ["name", "=/tmp", "name=relative", "name="])
def test_bad_image_row(text: str) -> None:
    with pytest.raises(LabError, match="expected NAME=/FOLDER"):
        images.parse_row(text)


def test_image_row_with_a_folder_that_is_missing(tmp_path: Path) -> None:
    assert images.parse_row(f"mine={tmp_path}")[1].path_prepend == (str(tmp_path),)
    with pytest.raises(LabError, match="/none is not a folder"):
        images.parse_row(f"mine={tmp_path}/none")


def _programs(folder: Path, version: str, names: tuple[str, ...] = (*binaries.COMPONENTS, "helm")) -> Path:
    for name in names:
        program = folder / name
        program.write_text(f"#!/bin/sh\necho 'Kubernetes {version}'\n")
        program.chmod(0o755)
    return folder


def test_folder_of_release_binaries(tmp_path: Path) -> None:
    found = binaries.find(_programs(tmp_path, "v1.35.2"))
    assert found == binaries.Binaries(tmp_path, tmp_path / "helm")


@pytest.mark.parametrize(
    ("version", "names", "message"),
    [
        ("v1.30.1", (*binaries.COMPONENTS, "helm"), "is version 1.30; the lab needs 1.33 or newer"),
        ("v1.36.4", ("etcd", "kube-apiserver"), "lacks kube-controller-manager, kube-scheduler, kubectl"),
        ("nothing", (*binaries.COMPONENTS, "helm"), "which is no Kubernetes version"),
    ],
)
def test_bad_folder_of_binaries(tmp_path: Path, version: str, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(LabError, match=message):
        binaries.find(_programs(tmp_path, version, names))


def test_named_folder_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(binaries.BINARIES_ENV, f"{tmp_path}/none")
    with pytest.raises(LabError, match="is not a folder"):
        binaries.find()


def test_an_empty_cache_and_no_programs_means_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(binaries.BINARIES_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert binaries.find() is None


def _claim(**changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "data",
            "namespace": "ns",
            "uid": "12345678-aaaa",
            "annotations": {"volume.kubernetes.io/selected-node": "cpu-1"},
        },
        "spec": {
            "storageClassName": "standard",
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        }
        | changes,
    }


def test_volume_for_a_claim_is_on_the_node_that_the_scheduler_picked() -> None:
    assert volumes.wants_volume(_claim()) == "cpu-1"
    volume = volumes.volume_for(_claim(), "cpu-1")
    assert volume["spec"]["local"]["path"] == "/var/lib/lab-volumes/ns_data_12345678"
    assert volume["spec"]["claimRef"]["uid"] == "12345678-aaaa"


@pytest.mark.parametrize("changes", [{"volumeName": "x"}, {"storageClassName": "other"}])
def test_other_claims_are_left_alone(changes: dict[str, Any]) -> None:
    assert volumes.wants_volume(_claim(**changes)) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="is root")
def test_up_without_root_says_so() -> None:
    with pytest.raises(LabError, match="the lab needs root"):
        api.Lab.up("x")


def test_an_environment_below_tmp_is_put_into_the_container(tmp_path: Path) -> None:
    """A container has a /tmp of its own; a checkout or an engine's environment there must be seen all the same."""
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    assert str(tmp_path).startswith("/tmp/")
    hosts = {str(bind.host) for bind in images.defaults(environment)[images.SGLANG].binds}
    assert str(environment) in hosts
