"""From image names to rows of the lab's image table."""

from pathlib import Path
from typing import Any

import pytest

from shoal_dev.lab.node import rootfs
from shoal_dev.lab.node.config import ImageConfig, NodeConfig
from shoal_dev.lab.node.images import UnknownImage, find, passable_folders, repository

TABLE = {"shoal": ImageConfig(), "lmsysorg/sglang": ImageConfig()}


@pytest.mark.parametrize(
    ("image", "row"),
    [
        ("shoal", "shoal"),
        ("shoal:v1.2", "shoal"),
        ("registry.example:5000/team/shoal:v1@sha256:abc", "shoal"),
        ("lmsysorg/sglang:v0.5", "lmsysorg/sglang"),
        ("docker.io/lmsysorg/sglang", "lmsysorg/sglang"),
    ],
)
def test_find(image: str, row: str) -> None:
    assert find(TABLE, image) == row


def test_unknown_image_says_what_is_known() -> None:
    with pytest.raises(UnknownImage, match=r'"x/sglang:1".*it has: lmsysorg/sglang, shoal'):
        find(TABLE, "x/sglang:1")


def test_repository_keeps_a_registrys_port() -> None:
    assert repository("host:5000/a/b") == "host:5000/a/b"


def test_links_out_of_a_virtual_environment_are_made_passable(tmp_path: Path) -> None:
    home = tmp_path / "home" / "versions" / "bin"
    home.mkdir(parents=True)
    (home / "python3").touch()
    environment = tmp_path / "venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(home / "python3")
    found = passable_folders(ImageConfig(path_prepend=(str(environment),)))
    assert {str(home), str(home.parent), str(environment.parent)} <= set(found)


def test_a_mounts_target_stays_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "run").symlink_to("/run")
    (tmp_path / "up").symlink_to("../../../etc")
    assert rootfs.inside(str(tmp_path), "/var/run/secrets") == f"{tmp_path}/run/secrets"
    assert rootfs.inside(str(tmp_path), "/up/passwd") == f"{tmp_path}/etc/passwd"
    assert rootfs.inside(str(tmp_path), "/../../x") == f"{tmp_path}/x"


def test_a_file_system_that_went_away_keeps_no_container_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the layers of an image that somebody was building on this machine when the node began."""
    bound: list[str] = []
    monkeypatch.setattr(rootfs.linux, "mount", lambda *_, **__: None)
    monkeypatch.setattr(rootfs.linux, "bind", lambda source, *_, **__: bound.append(source))
    monkeypatch.setattr(rootfs.linux, "pivot_root", lambda _: None)
    monkeypatch.setattr(rootfs, "_devices", lambda _: None)
    (tmp_path / "home").mkdir()
    spec: Any = {"folder": str(tmp_path), "passable": [], "mounts": [], "read_only_root": False}
    rootfs.build(spec | {"host_mounts": [str(tmp_path / "home"), str(tmp_path / "gone")]})
    assert bound == [str(tmp_path / "home"), "/sys"]


def test_one_process_runs_one_node(tmp_path: Path) -> None:
    node = {"name": "a", "index": 1, "kubeletPort": 10250}
    paths = ("kubeconfig", "servingCert", "servingKey", "clientCa", "logDir", "runDir", "dataDir")
    data = {"lab": "l", "apiServer": "https://x", "nodes": [node, node | {"name": "b"}]}
    with pytest.raises(ValueError, match="a process runs exactly one node, unless the nodes are status-only"):
        NodeConfig.model_validate(data | dict.fromkeys(paths, str(tmp_path)))
