"""The charts as packages, and their way into a registry."""

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from shoal_dev.lab import binaries, gobuild
from shoal_dev.lab.errors import LabError
from shoal_dev.release import project
from shoal_dev.release.project import run

_IMAGE: Final = re.compile(r"(?P<repository>[\w./:-]+)@(?P<digest>sha256:[0-9a-f]{64})")
_DIGEST: Final = re.compile(r"^Digest: (sha256:[0-9a-f]{64})$", re.MULTILINE)


def helm() -> Path:
    """The lab's helm; builds only helm where it is missing, from the module that images/lab/helm locks."""
    try:
        if (found := binaries.find()) is not None:
            return found.helm
        sources = gobuild.needed_sources()
        gobuild.build(sources, (binaries.HELM,), print)
        return gobuild.cached(sources, binaries.HELM) / binaries.HELM.program
    except LabError as error:
        raise project.ReleaseError(str(error)) from error


def package(root: Path, dist: Path, image: str | None) -> list[Path]:
    """Packages of all charts. With `image` (`repository@sha256:...`) the chart installs exactly that image."""
    made: list[Path] = []
    program = helm()
    with tempfile.TemporaryDirectory() as temporary:
        for name in project.CHARTS:
            chart = Path(temporary) / name
            shutil.copytree(root / "charts" / name, chart)
            if image is not None and name == "shoal":
                values = chart / "values.yaml"
                values.write_text(with_image(values.read_text(encoding="utf-8"), image), encoding="utf-8")
            run([program, "lint", "--strict", chart], folder=root)
            run([program, "package", chart, "--destination", dist], folder=root)
            made.append(package_path(root, dist, name))
    return made


def package_path(root: Path, dist: Path, name: str) -> Path:
    path = dist / f"{name}-{project.version(root)}.tgz"
    if not path.exists():
        raise project.ReleaseError(f"{path.name} is not in {dist}: run `python -m shoal_dev.release charts` first")
    return path


def with_image(values: str, image: str) -> str:
    """values.yaml with another image and everything else, comments too, as it was.

    Raises:
        project.ReleaseError: `image` has no digest, or values.yaml is laid out in another way than expected.
    """
    if (parts := _IMAGE.fullmatch(image)) is None:
        raise project.ReleaseError(f"{image!r} is not of the form repository@sha256:...: charts name no tag")
    wanted = parts.groupdict()
    changed = values
    for key, value in wanted.items():
        changed = re.sub(
            rf"^(image:\n(?:  .*\n)*?  {key}: ).*$", rf'\g<1>"{value}"', changed, count=1, flags=re.MULTILINE
        )
    before: dict[str, Any] = yaml.safe_load(values)
    if yaml.safe_load(changed) != before | {"image": before["image"] | wanted}:
        raise project.ReleaseError("values.yaml of the chart has no `image.repository` and `image.digest` to set")
    return changed


def push(root: Path, dist: Path, registry: str, *, plain_http: bool, sign: bool) -> list[str]:
    """Pushes the packages to `registry` (`oci://...`), and signs what the registry stored, by digest.

    Returns the reference with digest of each. The caller has logged in: `helm registry login`, `cosign login`.
    """
    pushed: list[str] = []
    program = helm()
    insecure: Sequence[str] = ["--plain-http"] if plain_http else []
    for name in project.CHARTS:
        answer = run([program, "push", package_path(root, dist, name), registry, *insecure], folder=root)
        if (digest := _DIGEST.search(answer)) is None:
            raise project.ReleaseError(f"helm push did not report a digest:\n{answer}")
        reference = f"{registry.removeprefix('oci://')}/{name}@{digest[1]}"
        if sign:
            run(["cosign", "sign", "--yes", reference], folder=root)
        pushed.append(reference)
    return pushed
