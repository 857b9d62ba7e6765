"""SHA-256 of every file of a release, in the form that `sha256sum --check` reads."""

import hashlib
from pathlib import Path
from typing import Final

FILE: Final = "checksums.txt"
_PUBLISHED: Final = (".whl", ".tar.gz", ".tgz", ".cdx.json", ".yaml")


def published(dist: Path) -> list[Path]:
    """Files of `dist` that a release publishes."""
    return sorted(path for path in dist.iterdir() if path.name.endswith(_PUBLISHED))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build(dist: Path) -> Path:
    path = dist / FILE
    path.write_text("".join(f"{sha256(one)}  {one.name}\n" for one in published(dist)), encoding="utf-8")
    return path
