"""The lab's image table: from an image's repository name to how its processes run on this machine.

The lab pulls nothing. A container sees this machine's files with its own layer above them, so an "image" is only what
is put in front: folders on PATH, files bound in, an environment.
"""

import os
import sys
from pathlib import Path
from typing import Final

from shoal_dev.lab.errors import LabError
from shoal_dev.lab.node.config import Bind, ImageConfig

SHOAL: Final = "shoal"
SGLANG: Final = "sglang"
_MODELS: Final = "/opt/shoal"
_FRESH: Final = ("/tmp", "/run", "/dev")  # noqa: S108
"""Folders of which a container does not see this machine's."""


def _repository() -> Path:
    return Path(__file__).resolve().parents[3]


def _python_path(prefix: Path) -> tuple[str, ...]:
    """PATH of a virtual environment. The base interpreter's folder is in it so that its parents become passable: a
    virtual environment's `python` is a link, often into somebody's home."""
    base = (prefix / "bin" / "python").resolve().parent
    return (str(prefix / "bin"), str(base))


def _hidden(*folders: Path) -> tuple[Bind, ...]:
    """Binds for what a container needs of this machine below folders that it has afresh: a checkout in /tmp, say."""
    wanted = dict.fromkeys(folder.resolve() for folder in folders)
    return tuple(
        Bind(host=folder, container=str(folder))
        for folder in wanted
        if folder.is_dir() and any(folder.is_relative_to(fresh) for fresh in _FRESH)
    )


def defaults(engine_environment: Path | None = None) -> dict[str, ImageConfig]:
    """Shoal itself (this Python environment and the tiny models), and SGLang for the CPU if its environment is given.

    `engine_environment` is the virtual environment that `images/engine-cpu` installs.
    """
    models = _repository() / "images" / "shoal" / "rootfs" / "opt" / "shoal"
    table = {
        SHOAL: ImageConfig(
            command=("shoal",),
            path_prepend=_python_path(Path(sys.prefix)),
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            # Bound from a folder that may not exist yet would fail each pod; the demo makes the models first.
            binds=(
                *((Bind(host=models, container=_MODELS),) if models.is_dir() else ()),
                *_hidden(Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]),
            ),
            user=65532,
        )
    }
    if engine_environment is not None:
        base = (engine_environment / "bin" / "python").resolve().parents[1]
        table[SGLANG] = ImageConfig(
            path_prepend=_python_path(engine_environment), binds=_hidden(engine_environment, base), user=0
        )
    return table


def parse_row(text: str) -> tuple[str, ImageConfig]:
    """From NAME=FOLDER[:FOLDER...], folders that come first on PATH. Raises LabError.

    Richer rows (environment, binds, default command) are written in the fleet file.
    """
    name, separator, folders = text.partition("=")
    parts = tuple(folders.split(":")) if separator else ()
    if not name or not parts or not all(os.path.isabs(part) for part in parts):
        raise LabError(f"--image {text!r}: expected NAME=/FOLDER[:/FOLDER...], folders that come first on PATH")
    missing = [part for part in parts if not Path(part).is_dir()]
    if missing:
        raise LabError(f"--image {text!r}: {', '.join(missing)} is not a folder")
    return name, ImageConfig(path_prepend=parts)
