"""The files of ConfigMaps, Secrets and their like, as a kubelet lays them out in a volume."""

import base64
import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal_dev.lab.node import fields

Json = dict[str, Any]


def content(found: Json) -> dict[str, bytes]:
    """A ConfigMap's or Secret's keys."""
    if "data" in found and found.get("kind") == "Secret":
        return {key: base64.b64decode(value) for key, value in fields.mapping(found, "data").items()}
    text = {key: value.encode() for key, value in fields.mapping(found, "data").items()}
    binary = {key: base64.b64decode(value) for key, value in fields.mapping(found, "binaryData").items()}
    return text | binary


def publish(folder: Path, files: Mapping[str, tuple[bytes, int]], group: int | None) -> None:
    """Replaces the volume's files all at once, as a kubelet does: a new folder, and one link renamed over the old."""
    data = folder / "..data"
    old = folder / os.readlink(data) if data.is_symlink() else None
    if old is not None and _same(old, files):
        return
    fresh = folder / f"..{datetime.now().strftime('%Y_%m_%d_%H_%M_%S.%f')}"  # noqa: DTZ005 - only has to be new
    fresh.mkdir(0o755)
    for path, (value, mode) in files.items():
        target = fresh / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(value)
        if group is not None:
            os.chown(target, -1, group)
        target.chmod(mode | (0o440 if group is not None else 0))
    link = folder / "..data_tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    link.replace(data)
    tops = {path.split("/")[0] for path in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _same(folder: Path, files: Mapping[str, tuple[bytes, int]]) -> bool:
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return present == set(files) and all((folder / path).read_bytes() == value for path, (value, _) in files.items())
