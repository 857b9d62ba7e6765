"""What a Model's source URI means: one parser for manifests (mounts), staging (fetching) and the engine (its path)."""

import posixpath
import re
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from shoal.api import names

Scheme = Literal["hf", "https", "s3", "gs", "az", "oci", "pvc", "file"]
BucketScheme = Literal["s3", "gs", "az"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


@dataclass(frozen=True, slots=True)
class SourceUri:
    """A source, taken apart. Which fields are set depends on the scheme."""

    scheme: Scheme
    uri: str
    repo: str = ""
    """hf: owner/repo."""
    revision: str | None = None
    """hf: branch, tag or commit; None: the default branch."""
    bucket: str = ""
    """s3, gs: name of the bucket. az: name of the container."""
    image: str = ""
    """oci: the image, as a container runtime names it."""
    claim: str = ""
    """pvc: name of the PersistentVolumeClaim in the Model's namespace."""
    path: str = ""
    """pvc: the folder inside the volume, "" for its root. s3, gs, az: what the objects' keys begin with, "" for the
    whole bucket. file: an absolute path."""

    @property
    def in_place(self) -> bool:
        """Whether the engine reads the weights from a mounted volume, and nothing is fetched."""
        return self.scheme in ("pvc", "oci")


def shown(uri: str) -> str:
    """The source as it may stand in a log, a message or an event: a signed URL carries its key after the "?"."""
    return re.split(r"[?#]", uri, maxsplit=1)[0] if uri.startswith("https://") else uri


def parse_source(uri: str) -> SourceUri:
    """Takes a source URI apart. Raises ValueError with a message for the person who wrote it."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES or not rest:
        raise ValueError(
            f"{uri!r} is not a source: write hf://owner/repo, s3://bucket/prefix (or gs://, az://), "
            "https://host/archive.tar, oci://registry/image:tag or pvc://claim/path"
        )
    if scheme == "hf":
        repo, at, revision = rest.partition("@")
        owner, slash, name = repo.partition("/")
        if not (owner and slash and name) or "/" in name or (at and not revision):
            raise ValueError(f"{uri!r} does not name a repository: write hf://owner/repo or hf://owner/repo@revision")
        return SourceUri("hf", uri, repo=repo, revision=revision or None)
    if scheme == "https":
        try:
            parts = urlsplit(uri)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{shown(uri)!r} is not a URL: {error}") from None
        if not parts.hostname or parts.username is not None or port == 0:
            raise ValueError(
                "an https:// source names a host and carries no user or password: use `secretRef` for a token"
            )
        return SourceUri("https", uri)
    if scheme in get_args(BucketScheme):
        bucket, _, path = rest.partition("/")
        if not bucket or "@" in bucket or any(part in (".", "..") for part in path.split("/")):
            raise ValueError(f"{uri!r} does not name a bucket and a prefix: write {scheme}://bucket/prefix")
        return SourceUri(scheme, uri, bucket=bucket, path="/".join(part for part in path.split("/") if part))
    if scheme == "oci":
        host, slash, name = rest.partition("/")
        if not (host and slash and name) or "@" in host or re.search(r"\s", rest):
            raise ValueError(f"{uri!r} does not name an image: write oci://registry/image:tag")
        return SourceUri("oci", uri, image=rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        if not claim or ".." in path.split("/"):
            raise ValueError(f"{uri!r} does not name a folder of a volume: write pvc://claim or pvc://claim/path")
        return SourceUri(
            "pvc", uri, claim=claim, path="" if not path.strip("/") else posixpath.normpath(path.strip("/"))
        )
    if not rest.startswith("/"):
        raise ValueError(f"{uri!r} has no absolute path: write file:///path, with three slashes")
    return SourceUri("file", uri, path=posixpath.normpath(rest))


def engine_model_path(uri: str) -> str:
    """The engine's --model-path: where the stage container leaves the weights, or the mounted volume they lie on.

    The weights of an oci:// image lie in its root.

    Raises ValueError as `parse_source` does.
    """
    source = parse_source(uri)
    if source.in_place:
        return posixpath.join(names.SOURCE_DIR, source.path) if source.path else names.SOURCE_DIR
    return names.MODEL_PATH
