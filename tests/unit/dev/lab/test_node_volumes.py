"""Contents of volumes, and their replacement all at once."""

import base64
import os
from pathlib import Path

from shoal_dev.lab.node import volumes


def test_keys_of_objects() -> None:
    secret = {"kind": "Secret", "data": {"token": base64.b64encode(b"abc").decode()}}
    assert volumes.content(secret) == {"token": b"abc"}
    config_map = {"kind": "ConfigMap", "data": {"a": "1"}, "binaryData": {"b": base64.b64encode(b"\xff").decode()}}
    assert volumes.content(config_map) == {"a": b"1", "b": b"\xff"}
    assert volumes.content({"kind": "ConfigMap"}) == {}


def test_files_change_all_at_once(tmp_path: Path) -> None:
    volumes.publish(tmp_path, {"a": (b"1", 0o644), "d/b": (b"2", 0o400)}, None)
    first = os.readlink(tmp_path / "..data")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert (tmp_path / "d" / "b").stat().st_mode & 0o777 == 0o400
    volumes.publish(tmp_path, {"a": (b"1", 0o644), "d/b": (b"2", 0o400)}, None)
    assert os.readlink(tmp_path / "..data") == first, "an unchanged volume is not touched"
    volumes.publish(tmp_path, {"a": (b"new", 0o644), "c": (b"3", 0o644)}, None)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert not (tmp_path / "d").exists(), "a key that is gone takes its file along"
    assert sorted(os.listdir(tmp_path)) == sorted(["a", "c", "..data", os.readlink(tmp_path / "..data")])


def test_a_group_can_read_what_a_pod_mounts(tmp_path: Path) -> None:
    volumes.publish(tmp_path, {"key": (b"secret", 0o400)}, os.getgid())
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o440
