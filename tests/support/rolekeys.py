"""The mounted keys of a gateway or a ledger, as the operator's Secret of its role has them."""

from pathlib import Path

from shoal.api import keys


def give(folder: Path, install_key: bytes, role: keys.Role = "gateway", file: str = "current") -> None:
    """Puts the keys of `role` there."""
    (folder / file).write_text(keys.bundle(install_key, role).model_dump_json())
