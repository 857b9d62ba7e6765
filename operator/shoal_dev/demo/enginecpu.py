"""The real SGLang on the CPU, for `--engine sglang`: installed once, run by the lab as the image `sglang`."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import click

from shoal_dev.lab import images
from shoal_dev.lab.node.config import ImageConfig

VERSION: Final = "0.5.23"
VALUES: Final[dict[str, Any]] = {"engines": {"versions": {VERSION: {"image": "sglang:cpu", "command": ["sglang-cpu"]}}}}
"""Chart values: the table's row for this version runs the CPU launcher, which takes SGLang's own arguments."""


def environment() -> Path:
    """The virtual environment into which images/engine-cpu/install.sh puts SGLang."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SHOAL_ENGINE_VENV") or cache / "shoal" / "engine-cpu" / "venv")


def install(root: Path) -> None:
    """Installs SGLang and what it needs; seconds when it is there. Raises ClickException."""
    if subprocess.run([str(root / "images" / "engine-cpu" / "install.sh"), str(environment())], check=False).returncode:
        raise click.ClickException("SGLang for the CPU could not be installed; see the lines above")


def image() -> ImageConfig:
    """How the lab runs the image `sglang`."""
    return images.defaults(environment())[images.SGLANG]
