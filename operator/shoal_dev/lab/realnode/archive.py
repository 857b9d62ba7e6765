"""OCI image archives from a folder: what a node without a registry imports.

See the OCI image layout specification. One layer, all of it root's. Times are kept: Python's compiled files are only
good with those of their sources.
"""

import gzip
import hashlib
import io
import json
import platform
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_MEDIA: Final = "application/vnd.oci.image"
_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


class _Hashing(io.RawIOBase):
    """Hashes what is written through it."""

    def __init__(self, below: Any) -> None:
        self.below, self.digest, self.size = below, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self.below.write(data)


def write(folder: Path, reference: str, target: Path, entrypoint: Sequence[str] = ()) -> None:
    """Packs `folder` as the root of an image called `reference` (NAME:TAG) into `target`. Raises OSError."""
    with tempfile.TemporaryFile(dir=target.parent) as layer:
        packed = _Hashing(layer)
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as squeezed:
            plain = _Hashing(squeezed)
            with tarfile.open(fileobj=plain, mode="w|", format=tarfile.GNU_FORMAT) as tar:
                tar.add(folder, arcname=".", filter=_anonymous)
        config: dict[str, Any] = {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": [_PATH], "WorkingDir": "/"} | ({"Entrypoint": list(entrypoint)} if entrypoint else {}),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{plain.digest.hexdigest()}"]},
        }
        blobs = [json.dumps(config).encode()]
        layers = [
            {
                "mediaType": f"{_MEDIA}.layer.v1.tar+gzip",
                "digest": f"sha256:{packed.digest.hexdigest()}",
                "size": packed.size,
            }
        ]
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor(f"{_MEDIA}.config.v1+json", blobs[0]),
            "layers": layers,
        }
        blobs.append(json.dumps(manifest).encode())
        named = _descriptor(f"{_MEDIA}.manifest.v1+json", blobs[1]) | {
            "annotations": {
                "io.containerd.image.name": reference,
                "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
            }
        }
        with tarfile.open(target, "w") as tar:
            _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
            for blob in blobs:
                _add(tar, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
            entry = tarfile.TarInfo(f"blobs/sha256/{packed.digest.hexdigest()}")
            entry.size = packed.size
            layer.seek(0)
            tar.addfile(entry, layer)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.mtime = int(entry.mtime)  # a fraction would not survive, and differ from the original
    entry.uname = entry.gname = ""
    return entry


def _descriptor(media: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
