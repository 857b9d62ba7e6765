"""Opens the source of a URI."""

from pathlib import Path

from shoal.api import names, reasons
from shoal.api.sources import parse_source
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError
from shoal.artifacts.ranges import RangedSource
from shoal.artifacts.source import Settings


def open_source(
    uri: str,
    credentials: StoreCredentials,
    settings: Settings,
    *,
    revision: str | None = None,
    mounted: Path = Path(names.SOURCE_DIR),
) -> RangedSource:
    """The source of a URI.

    `revision` pins a branch on the hub to its resolved commit. `mounted` is the mount point of the volume of pvc:// and
    oci://. Raises ArtifactError(SourceInvalid) for an invalid URI, and ArtifactError(Gated) for a Secret without the
    keys that the scheme requires.
    """
    try:
        source = parse_source(uri)
    except ValueError as error:
        raise ArtifactError(reasons.SOURCE_INVALID, str(error)) from None
    match source.scheme:
        case "hf" | "https":
            if credentials.given and not credentials.token:
                raise ArtifactError(
                    reasons.GATED,
                    "the Secret of source.secretRef has no key `token`: put the access token under that key",
                )
            if source.scheme == "hf":
                from shoal.artifacts.hub import HubSource

                return HubSource(source, credentials, settings, revision)
            from shoal.artifacts.web import ArchiveSource

            return ArchiveSource(source, credentials, settings)
        case "s3" | "gs" | "az":
            from shoal.artifacts.bucket import BucketSource

            return BucketSource(source, credentials, settings)
        case "file" | "pvc" | "oci":
            from shoal.artifacts.folder import FolderSource

            if source.scheme == "file":
                return FolderSource(source, Path(source.path), Path("/"), settings)
            return FolderSource(source, mounted / source.path, mounted, settings)


def secret_advice(uri: str) -> str:
    """Advice when the Secret in `source.secretRef` does not exist. Raises ValueError as `parse_source` does."""
    scheme = parse_source(uri).scheme
    match scheme:
        case "hf" | "https":
            return "create it with the key `token`"
        case "s3" | "gs" | "az":
            from shoal.artifacts.bucketkeys import authenticating_keys

            account = "AZURE_STORAGE_ACCOUNT_NAME and " if scheme == "az" else ""
            return f"create it with the keys {account}{authenticating_keys(scheme)}"
        case "file" | "pvc" | "oci":
            return f"{scheme}:// uses none: leave secretRef out"
