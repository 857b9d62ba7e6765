"""Credentials of a source: the mounted Secret in the Model's namespace, or its ServiceAccount's identity."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """Keys and values of the Secret. Its repr contains no values; never log one."""

    values: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    given: bool = False
    """Whether the Model names a Secret: an empty Secret is an error, no Secret is not."""
    identity: str = ""
    """Identity that the keys belong to, for messages, if they are those of the pod's ServiceAccount."""

    @classmethod
    def read(cls, folder: Path) -> "StoreCredentials":
        """Reads a mounted Secret; a missing folder means no Secret. Raises OSError."""
        if not folder.is_dir():
            return cls()
        return cls(dict(_entries(folder)), given=True)

    @property
    def token(self) -> str | None:
        """Bearer token for hf:// and https://."""
        return self.values.get("token")


def _entries(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()):
        # A mounted Secret has links into "..data", a folder of the kubelet.
        if path.name.startswith("..") or not path.is_file():
            continue
        with path.open("rb") as file:
            value = file.read(_LIMIT).decode(errors="replace").strip()
        if value:
            yield path.name, value
