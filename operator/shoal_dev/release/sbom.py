"""The dependencies of Shoal's distribution, with versions and hashes, as CycloneDX."""

import json
from pathlib import Path
from typing import Any, cast

from cyclonedx.exception import CycloneDxException
from cyclonedx.model.bom import Bom

from shoal_dev.release import project
from shoal_dev.release.project import run, uv


def build(root: Path, dist: Path) -> Path:
    """Writes the SBOM of uv.lock without the groups for development. Raises ReleaseError when it is not valid.

    The image has an SBOM of its own, which also lists the packages of its base: BuildKit adds it.
    """
    path = dist / f"shoal-{project.version(root)}.cdx.json"
    run(
        [uv(), "export", "--frozen", "--quiet", "--no-dev", "--package", "shoal", "--format", "cyclonedx1.5",
         "--output-file", path],
        folder=root,
    )  # fmt: skip
    try:
        # Not the library's validator of the JSON schema: it needs minutes for the addresses of all files of the lock.
        bom = cast(Any, Bom).from_json(json.loads(path.read_text(encoding="utf-8")))  # a decorator adds the method
        bom.validate()
    except (ValueError, CycloneDxException) as error:
        raise project.ReleaseError(f"{path.name} is not valid CycloneDX: {error}") from error
    return path
