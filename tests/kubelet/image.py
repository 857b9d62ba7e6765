"""Shoal's image as an archive, for a node that pulls nothing: built from images/shoal as `make image` does."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from shoal_dev.demo.steps import LAB_IMAGE
from shoal_dev.lab import gobuild, network
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.gobuild import Announce
from shoal_dev.lab.realnode import archive

NAME: Final = f"docker.io/library/{LAB_IMAGE}"
"""What a runtime makes of the name under which a lab knows Shoal's image."""
_BASE: Final = "localhost/python:shoal-base"
_ROOT: Final = Path(__file__).resolve().parents[2]
_SUITE: Final = "bookworm"
"""Debian 12: Python 3.11, the oldest that Shoal supports."""
_PULL_SECONDS: Final = 60
_BUILD_SECONDS: Final = 1800


def build(say: Announce) -> Path:
    """The archive, from the cache or built: with docker, podman or buildah, whichever works. Raises LabError."""
    target = gobuild.cache_root() / f"image-{_digest()}.tar"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "images/shoal/make_models.py"], {}, "making the tiny models", say)
    if _docker_works():
        _run(
            ["images/shoal/build.sh", NAME],
            {"BUILDER": "docker", "DEV": "1"},
            "building Shoal's image with docker",
            say,
        )
        save = ["docker", "save", "--output", f"{target}.new", NAME]
    else:
        network.require_programs(say, {"buildah": "buildah"})
        environment = {"BUILDER": "buildah", "DEV": "1", "ARGS": "--isolation chroot --pull=never --network host"}
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        if certificates.exists():  # a registry behind an authority of this machine's own
            environment["ARGS"] += f" --volume {certificates}:{certificates}:ro"
        base = _base(say)
        _run(["images/shoal/build.sh", NAME], environment | {"BASE": base}, "building Shoal's image with buildah", say)
        save = ["buildah", "push", "--quiet", NAME, f"docker-archive:{target}.new:{NAME}"]
    Path(f"{target}.new").unlink(missing_ok=True)
    _run(save, {}, f"writing {target}", say)
    os.rename(f"{target}.new", target)
    if save[0] == "buildah":
        _quiet(["buildah", "rmi", NAME])  # the archive is what is kept
    for old in target.parent.glob("image-*.tar"):
        if old != target:
            old.unlink()
    return target


def _digest() -> str:
    """Of everything that goes into the image."""
    digest = hashlib.sha256()
    files = [_ROOT / name for name in ("pyproject.toml", "uv.lock", "images/shoal/Dockerfile")]
    files += sorted(p for p in (_ROOT / "operator").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    files += [_ROOT / "images/shoal/make_models.py"]
    for file in files:
        digest.update(str(file.relative_to(_ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _docker_works() -> bool:
    if shutil.which("docker") is None:
        return False
    result = subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False)
    return result.returncode == 0


def _base(say: Announce) -> str:
    """The Dockerfile's own base image where its registry is reached; else Debian with Python, made here."""
    if given := os.environ.get("BASE"):
        return given
    text = (_ROOT / "images/shoal/Dockerfile").read_text()
    official = next(line.partition("=")[2] for line in text.splitlines() if line.startswith("ARG BASE="))
    try:
        pulled = subprocess.run(
            ["buildah", "pull", "--quiet", official], capture_output=True, timeout=_PULL_SECONDS, check=False
        )
        if pulled.returncode == 0:
            return official
    except subprocess.TimeoutExpired:
        pass
    if _quiet(["buildah", "images", "--quiet", _BASE]):
        return _BASE
    say(f"{official} cannot be pulled: making a base image with debootstrap")
    network.require_programs(say, {"debootstrap": "debootstrap"})
    with tempfile.TemporaryDirectory(dir=gobuild.cache_root()) as folder:
        root, packed = Path(folder, "root"), Path(folder, "base.tar")
        include = "--include=ca-certificates,python3,python3-venv"
        command = ["debootstrap", "--variant=minbase", include, _SUITE, str(root), *_mirror()]
        _run(command, {}, "debootstrap", say)
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(root / waste, ignore_errors=True)
        archive.write(root, _BASE, packed)
        made = _run(["buildah", "pull", "--quiet", f"oci-archive:{packed}"], {}, "importing the base image", say)
        _run(["buildah", "tag", made.strip(), _BASE], {}, "naming the base image", say)
    return _BASE


def _mirror() -> list[str]:
    """Of this machine's own package sources, so that a private mirror is used where there is one."""
    found = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"],
        capture_output=True, text=True, timeout=60, check=False,
    ).stdout.split()  # fmt: skip
    debian = [site for site in found if site.rstrip("/").endswith("/debian")]
    return debian[:1]


def _quiet(command: Sequence[str]) -> bool:
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    return result.returncode == 0 and bool(result.stdout.strip())


def _run(command: Sequence[str], environment: Mapping[str, str], what: str, say: Announce) -> str:
    """What it prints. Raises LabError."""
    say(what)
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=_ROOT, timeout=_BUILD_SECONDS,
        env=os.environ | dict(environment), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if result.returncode != 0:
        raise LabError(f"{what} failed:\n{(result.stdout + result.stderr)[-2000:]}")
    return result.stdout
