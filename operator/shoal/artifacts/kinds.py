"""From an address to its Source."""

from shoal.artifacts.credentials import Credentials
from shoal.artifacts.source import Settings, Source


def open_source(
    uri: str, credentials: Credentials, settings: Settings, *, revision: str | None = None, mounted: str | None = None
) -> Source:
    """The Source of an address.

    `revision` pins a hub's branch to the commit that it was resolved to. `mounted` is where the volume of pvc:// and
    oci:// is mounted. Raises ArtifactError(SourceInvalid) for an address that cannot be read, and ArtifactError(Gated)
    for a Secret without the keys that the kind needs.
    """
    raise NotImplementedError
