"""The plugin's manifest for krew, kubectl's plugin manager."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from shoal_dev.release import checksums, plugin, project
from shoal_dev.release.project import Platform

FILE: Final = "shoal.yaml"
"""krew requires the plugin's name as the name of the file."""


def manifest(version: str, archives: Mapping[Platform, str]) -> dict[str, Any]:
    """`archives`: SHA-256 of the archive of each platform."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "shoal"},
        "spec": {
            "version": f"v{version}",
            "homepage": project.REPOSITORY,
            "shortDescription": "See and manage GPU inference fleets of Shoal",
            "description": (
                "Shows Models, their replicas and the decisions behind them, keys, usage and bills of tenants, and\n"
                "explains where a Model would run. Needs Shoal in the cluster for all commands that read one.\n"
            ),
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": platform.os, "arch": platform.arch}},
                    "uri": f"{project.REPOSITORY}/releases/download/v{version}/"
                    + plugin.archive_name(version, platform),
                    "sha256": digest,
                    "bin": plugin.PROGRAM,
                }
                for platform, digest in sorted(archives.items())
            ],
        },
    }


def build(root: Path, dist: Path, *, every_platform: bool) -> tuple[Path, list[Platform]]:
    """Writes the manifest for the archives in `dist`; also returns the platforms without one.

    Raises:
        project.ReleaseError: there is no archive, or with `every_platform` not all of them.
    """
    version = project.version(root)
    paths = {platform: dist / plugin.archive_name(version, platform) for platform in project.PLATFORMS}
    there = {platform: checksums.sha256(path) for platform, path in paths.items() if path.exists()}
    missing = [platform for platform in project.PLATFORMS if platform not in there]
    if not there or (every_platform and missing):
        raise project.ReleaseError(f"no archive of the plugin in {dist} for {', '.join(str(one) for one in missing)}")
    path = dist / FILE
    path.write_text(yaml.safe_dump(manifest(version, there), sort_keys=False, width=100), encoding="utf-8")
    return path, missing
