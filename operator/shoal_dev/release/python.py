"""Wheels and source distributions, and environments made from the lock file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from shoal_dev.release import project
from shoal_dev.release.project import run, uv


def build(root: Path, dist: Path) -> list[Path]:
    """The distributions `shoal` and `shoal-dev` in `dist`.

    The build backend is the locked one of this environment: nothing is fetched, and two builds of a commit are equal.
    """
    run(
        [uv(), "build", "--all-packages", "--wheel", "--sdist", "--no-build-isolation", "--offline",
         "--no-create-gitignore", "--python", sys.executable, "--out-dir", dist],
        folder=root,
        environment={"SOURCE_DATE_EPOCH": str(project.commit_time(root))},
    )  # fmt: skip
    made = sorted([*dist.glob("shoal*.whl"), *dist.glob("shoal*.tar.gz")])
    number = Version(project.version(root))
    wanted = {f"{name}-{number}{end}" for name in ("shoal", "shoal_dev") for end in ("-py3-none-any.whl", ".tar.gz")}
    if missing := wanted - {path.name for path in made}:
        raise project.ReleaseError(f"uv build did not make {', '.join(sorted(missing))}")
    return [path for path in made if path.name in wanted]


def wheel(root: Path, dist: Path) -> Path:
    """The wheel of `shoal`. Raises ReleaseError when it is not built."""
    path = dist / f"shoal-{Version(project.version(root))}-py3-none-any.whl"
    if not path.exists():
        raise project.ReleaseError(f"{path.name} is not in {dist}: run `python -m shoal_dev.release python` first")
    return path


def environment(root: Path, folder: Path, built: Path, *, groups: Sequence[str] = ()) -> Path:
    """A new virtual environment in `folder` with the wheel `built`, its locked dependencies and those of `groups`.

    After `make setup` everything is in uv's cache and no network is needed. Returns its folder of programs.
    """
    place = {"UV_PROJECT_ENVIRONMENT": str(folder), "VIRTUAL_ENV": str(folder)}
    chosen = [part for group in groups for part in ("--group", group)]
    run(
        [uv(), "sync", "--frozen", "--quiet", "--no-default-groups", *chosen, "--no-install-workspace",
         "--python", sys.executable],
        folder=root,
        environment=place,
    )  # fmt: skip
    programs = folder / "bin"
    run(
        [uv(), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", programs / "python", built],
        folder=folder,
        environment=place,
    )
    return programs
