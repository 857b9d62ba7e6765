"""A release on this machine: everything is built and checked, nothing is signed or published."""

from collections.abc import Callable
from pathlib import Path

from shoal_dev.release import charts, checksums, image, krew, notes, plugin, project, python, sbom, versions

NOTES = "release-notes.md"


def run(root: Path, dist: Path, announce: Callable[[str], None]) -> None:
    """Fills `dist`, after it has removed the files of an earlier release there.

    Needs the files of `make models`, and no network.

    Raises:
        project.ReleaseError: a release of this checkout would fail.
    """
    if problems := [*versions.disagreements(root), *image.problems(root)]:
        raise project.ReleaseError("\n".join(problems))
    dist.mkdir(parents=True, exist_ok=True)
    for path in (*checksums.published(dist), dist / checksums.FILE, dist / NOTES):
        path.unlink(missing_ok=True)
    version = project.version(root)
    announce(f"version: {version}, in every file that names it")
    announce(f"image: not built here, as this needs docker; {image.DOCKERFILE} and its build arguments are checked")
    for path in python.build(root, dist):
        announce(f"python: {_described(path)}")
    for path in charts.package(root, dist, f"{project.IMAGE}@sha256:{'0' * 64}"):
        announce(f"chart: {_described(path)}")
    announce("chart: the image's digest in it is zeros, as there is no image")
    announce(f"plugin: {_described(plugin.build(root, dist))}")
    path, missing = krew.build(root, dist, every_platform=False)
    announce(f"krew: {_described(path)}; not built here: {', '.join(str(one) for one in missing)}")
    announce(f"sbom: {_described(sbom.build(root, dist))}")
    text = notes.release_notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    (dist / NOTES).write_text(text, encoding="utf-8")
    announce(f"notes: {_described(dist / NOTES)}")
    announce(f"checksums: {_described(checksums.build(dist))}")
    announce("signatures, provenance and publishing: only in the workflow, which has an identity to sign with")
    for each in versions.open_for_tag(root):
        announce(f"before the tag v{version}: {each}")


def _described(path: Path) -> str:
    return f"{path.name}, {path.stat().st_size / 1e6:.2f} MB"
