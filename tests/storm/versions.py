"""An earlier version of Shoal beside this one: its files from git, its locked environment, its row of the image table.

What is installed first in a storm with `--from`; a fault then upgrades to this checkout, another one goes back.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from shoal_dev.demo import steps
from shoal_dev.lab import images
from shoal_dev.lab.node.config import Bind, ImageConfig

REPOSITORY: Final = "shoal-earlier"
"""Name of the earlier version's image in the lab."""
IMAGE: Final = f"{REPOSITORY}:lab"
_SYNC_SECONDS: Final = 600


@dataclass(frozen=True, slots=True)
class Earlier:
    """A version of Shoal that lies in a folder of its own."""

    ref: str
    root: Path
    """Of its files."""

    @property
    def environment(self) -> Path:
        """Its virtual environment."""
        return self.root / ".venv"

    def row(self) -> ImageConfig:
        """Its row of the lab's image table. The tiny models are this checkout's."""
        own = images.defaults()[images.SHOAL]
        base = (self.environment / "bin" / "python").resolve().parent
        binds = {(bind.host, bind.container): bind for bind in own.binds}
        # A container has a /tmp of its own: the environment is bound in where it is, like everything it links to.
        for folder in (self.root, base.parent):
            binds[folder, str(folder)] = Bind(host=folder, container=str(folder))
        return own.model_copy(
            update={"path_prepend": (str(self.environment / "bin"), str(base)), "binds": tuple(binds.values())}
        )


def last_release() -> str | None:
    """The newest tag that this checkout descends from; None: nothing was released yet."""
    done = _git("describe", "--tags", "--abbrev=0", check=False)
    return done.strip() or None


@contextlib.contextmanager
def earlier(ref: str) -> Generator[Earlier]:
    """Checks `ref` out beside this checkout and installs what it locked; gone afterwards. Raises ClickException."""
    commit = _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", check=False).strip()
    if not commit:
        raise click.ClickException(f"--from {ref}: git knows no such commit or tag here")
    folder = Path(tempfile.mkdtemp(prefix="shoal-earlier-"))
    root = folder / "shoal"
    try:
        folder.chmod(0o755)  # containers run as another user
        _git("worktree", "add", "--detach", "--force", str(root), commit)
        print(f"installing what {ref} ({commit[:10]}) locked", flush=True)
        _sync(root)
        yield Earlier(ref, root)
    finally:
        _git("worktree", "remove", "--force", str(root), check=False)
        shutil.rmtree(folder, ignore_errors=True)
        _git("worktree", "prune", check=False)


def _sync(root: Path) -> None:
    program = shutil.which("uv") or str(steps.ROOT / ".venv-uv" / "bin" / "uv")
    command = [program, "sync", "--frozen", "--no-dev", "--compile-bytecode", "--quiet", "--python", sys.executable]
    try:
        done = subprocess.run(
            # Its own environment, whatever is active here.
            [*command, "--project", str(root), "--no-active"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=_SYNC_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise click.ClickException(f"uv sync in {root}: {error}") from error
    if done.returncode:
        raise click.ClickException(f"uv sync of the earlier version failed:\n{done.stderr.strip()}")


def _git(*arguments: str, check: bool = True) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(steps.ROOT), *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise click.ClickException(f"git {arguments[0]}: {error}") from error
    if check and done.returncode:
        raise click.ClickException(f"git {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done.stdout if done.returncode == 0 else ""
