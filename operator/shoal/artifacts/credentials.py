"""The credentials of a source: the mounted Secret of the Model's own namespace, or its ServiceAccount's identity."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """Key and value as in the Secret. Its repr shows no value; never log one."""

    values: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    given: bool = False
    """Whether the Model names a Secret: an empty one is a mistake to tell of, none at all is not."""
    identity: str = ""
    """Whose the keys are, for people, where the Secret has none and the pod's ServiceAccount has an identity."""

    @classmethod
    def read(cls, folder: Path) -> "StoreCredentials":
        """Reads a mounted Secret; a folder that is not there is no Secret. Raises OSError."""
        if not folder.is_dir():
            return cls()
        return cls(dict(_entries(folder)), given=True)

    @property
    def token(self) -> str | None:
        """The bearer token of hf:// and https://."""
        return self.values.get("token")


def _entries(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()):
        # A mounted Secret has links into "..data", a folder of the kubelet's.
        if path.name.startswith("..") or not path.is_file():
            continue
        with path.open("rb") as file:
            value = file.read(_LIMIT).decode(errors="replace").strip()
        if value:
            yield path.name, value
