"""An empty database of each kind that a ledger may have."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DATABASES: Final = ("sqlite",)


@contextlib.contextmanager
def database(kind: str, path: Path) -> Iterator[str]:
    """The URL of an empty one; `path` is a folder for its files."""
    if kind == "sqlite":
        yield f"sqlite:///{path}/ledger.sqlite"
