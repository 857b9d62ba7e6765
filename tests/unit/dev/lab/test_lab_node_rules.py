"""What a lab node decides without asking anybody: a volume's affinity, GPUs, folders."""

from pathlib import Path
from typing import Any

import pytest

from shoal_dev.lab.kubeapi import KubeAPIError
from shoal_dev.lab.node import disk
from shoal_dev.lab.node.affinity import admits
from shoal_dev.lab.node.context import Gpus
from shoal_dev.lab.node.ownnode import DRA_DRIVER, HEALTHY_GPUS, driver_away, healthy_gpus, taken_for_lost
from shoal_dev.lab.node.pod import is_of_another_pod


def volume(*terms: list[dict[str, Any]], key: str = "matchExpressions") -> dict[str, Any]:
    return {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{key: term} for term in terms]}}}}


LABELS = {"zone": "a", "cores": "64"}


@pytest.mark.parametrize(
    ("requirement", "fits"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "rack", "operator": "In", "values": ["a"]}, False),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "rack", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "cores", "operator": "Gt", "values": ["32"]}, True),
        ({"key": "cores", "operator": "Lt", "values": ["32"]}, False),
        ({"key": "rack", "operator": "Gt", "values": ["32"]}, False),
    ],
)
def test_a_volume_is_mounted_where_its_affinity_allows(requirement: dict[str, Any], fits: bool) -> None:
    assert admits(volume([requirement]), "n1", LABELS) is fits


def test_terms_are_alternatives_and_their_expressions_are_not() -> None:
    zone, rack = {"key": "zone", "operator": "Exists"}, {"key": "rack", "operator": "Exists"}
    assert admits(volume([rack], [zone]), "n1", LABELS)
    assert not admits(volume([rack, zone]), "n1", LABELS)
    assert not admits(volume([]), "n1", LABELS)
    assert admits({"spec": {}}, "n1", LABELS)
    name = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    assert admits(volume([name], key="matchFields"), "n1", LABELS)
    assert not admits(volume([name], key="matchFields"), "n2", LABELS)


@pytest.mark.parametrize(("text", "healthy"), [("3", 3), ("0", 0), ("99", 8), ("-1", 8), ("some", 8)])
def test_healthy_gpus_are_read_from_the_annotation(text: str, healthy: int) -> None:
    assert healthy_gpus({"metadata": {"annotations": {HEALTHY_GPUS: text}}}, 8) == healthy


@pytest.mark.parametrize(
    ("annotations", "away"), [({}, False), ({DRA_DRIVER: "away"}, True), ({DRA_DRIVER: ""}, False)]
)
def test_a_driver_is_away_while_the_annotation_says_so(annotations: dict[str, str], away: bool) -> None:
    assert driver_away({"metadata": {"annotations": annotations}}) is away


def test_a_pod_keeps_its_failed_gpu_and_the_next_gets_a_healthy_one() -> None:
    gpus = Gpus(4)
    first = gpus.take(3)
    gpus.set_healthy(2)
    with pytest.raises(ValueError, match="Requested: 1, Available: 0"):
        gpus.take(1)
    gpus.give_back(first)
    assert gpus.take(2) == [0, 1]
    gpus.set_healthy(4)
    assert gpus.take(2) == [2, 3]


def test_links_on_a_nodes_disk_do_not_lead_off_it(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "up").symlink_to("../../..")
    own = disk.NodeDisk(tmp_path)
    assert own.find("/out/passwd") == tmp_path / "etc/passwd"
    assert own.find("/up/x/../../y") == tmp_path / "y"


def test_an_untyped_host_path_that_is_nowhere_is_made(tmp_path: Path) -> None:
    path = f"/nowhere{tmp_path}"
    assert disk.NodeDisk(tmp_path).host_path({"path": path}) == (tmp_path / path.removeprefix("/"), False)
    assert (tmp_path / path.removeprefix("/")).is_dir()
    with pytest.raises(disk.DiskError, match="is not a file"):
        disk.NodeDisk(tmp_path).host_path({"path": path, "type": "FileOrCreate"})
    with pytest.raises(disk.DiskError, match="path /nowhere/at/all does not exist"):
        disk.NodeDisk(tmp_path).host_path({"path": "/nowhere/at/all", "type": "Socket"})


def test_a_node_notices_that_it_is_taken_for_lost() -> None:
    def node(*conditions: tuple[str, str]) -> dict[str, Any]:
        return {"metadata": {}, "status": {"conditions": [{"type": t, "status": s} for t, s in conditions]}}

    assert taken_for_lost(node(("MemoryPressure", "False"), ("Ready", "Unknown")))
    assert not taken_for_lost(node(("MemoryPressure", "Unknown"), ("Ready", "True")))
    assert not taken_for_lost(node())


@pytest.mark.parametrize(
    ("status", "message", "gone"),
    [
        (422, 'Pod "a-0" is invalid: metadata.uid: Invalid value: "1": field is immutable', True),
        (
            403,
            'pods "a-0" is forbidden: node "n" can only update pod status for pods with spec.nodeName set to itself',
            True,
        ),
        (422, 'Pod "a-0" is invalid: status.phase: Invalid value: "x"', False),
        (403, 'pods "a-0" is forbidden: User "system:node:n" cannot patch resource "pods/status"', False),
        (500, "metadata.uid", False),
    ],
)
def test_a_pod_whose_name_another_one_has_tells_nothing_more(status: int, message: str, gone: bool) -> None:
    """It was deleted by force while its kubelet did not hear of it: told on and on, it would never end."""
    assert is_of_another_pod(KubeAPIError(status, message)) is gone
