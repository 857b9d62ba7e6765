"""The kubectl plugin for people without Python: the wheel, its libraries and a Python interpreter in one archive, made
by PyInstaller on the platform that it is for."""

import tarfile
import tempfile
from pathlib import Path
from typing import Final

from shoal_dev.release import project, python
from shoal_dev.release.project import Platform, run

NAME: Final = "kubectl-shoal"
PROGRAM: Final = f"{NAME}/{NAME}"
"""Path of the program in an archive."""
_START: Final = "from shoal.cli.main import kubectl\n\nkubectl()\n"


def archive_name(version: str, platform: Platform) -> str:
    return f"{NAME}-{version}-{platform.os}-{platform.arch}.tar.gz"


def build(root: Path, dist: Path) -> Path:
    """The archive of this machine's platform. Needs the wheel in `dist`."""
    platform = project.this_platform()
    if platform not in project.PLATFORMS:
        raise project.ReleaseError(f"the plugin is not made for {platform}")
    wheel = python.wheel(root, dist)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        programs = python.environment(root, folder / "environment", wheel, groups=["plugin"])
        _freeze(programs, folder)
        target = dist / archive_name(project.version(root), platform)
        _pack(target, folder / "frozen" / NAME, root / "LICENSE", project.commit_time(root))
    return target


def _freeze(programs: Path, folder: Path) -> None:
    start = folder / f"{NAME}.py"
    start.write_text(_START, encoding="utf-8")
    run(
        # Commands are imported by name when they are called, so PyInstaller does not find them by itself. The
        # processes that the chart starts (shoal.runtime) are left out: see shoal.cli.main.
        [programs / "python", "-m", "PyInstaller", "--noconfirm", "--log-level=WARN", "--onedir", f"--name={NAME}",
         "--collect-submodules=shoal.cli", "--collect-data=shoal.cli", "--collect-data=shoal.engine",
         "--copy-metadata=shoal", "--distpath=frozen", "--workpath=work", "--specpath=work", start],
        folder=folder,
        timeout=1200,
        environment={"PYTHONHASHSEED": "0"},
    )  # fmt: skip


def _pack(target: Path, frozen: Path, license_file: Path, modified: int) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = modified
        return entry

    # dereference: krew refuses archives with links.
    with tarfile.open(target, "w:gz", dereference=True, compresslevel=6) as archive:
        archive.add(license_file, "LICENSE", filter=plain)
        archive.add(frozen, NAME, filter=plain)
