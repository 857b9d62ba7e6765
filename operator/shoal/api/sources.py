"""Parses source URIs, for manifests (mounts), staging (fetching) and the engine (its path)."""

import posixpath
import re
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from shoal.api import names

Scheme = Literal["hf", "https", "s3", "gs", "az", "oci", "pvc", "file"]
BucketScheme = Literal["s3", "gs", "az"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

_UNREADABLE = re.compile(r"[\x00-\x1f\x7f\\]")
_BUCKET = re.compile(r"[a-zA-Z0-9$][a-zA-Z0-9._-]{0,221}")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_REPO = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"\w[\w./+-]{0,254}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9a-f:.]+", re.ASCII)
_CODED = re.compile(r"%(2e|2f|5c|25|[01][0-9a-f]|7f)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SourceUri:
    """A parsed source URI. The scheme determines which fields are set."""

    scheme: Scheme
    uri: str
    repo: str = ""
    """hf: owner/repo."""
    revision: str | None = None
    """hf: branch, tag or commit; None: the default branch."""
    bucket: str = ""
    """s3, gs: name of the bucket. az: name of the container."""
    image: str = ""
    """oci: image reference."""
    claim: str = ""
    """pvc: name of the PersistentVolumeClaim in the Model's namespace."""
    path: str = ""
    """pvc: folder inside the volume, "" for its root. s3, gs, az: key prefix of the objects, "" for the whole bucket.
    file: absolute path."""

    @property
    def in_place(self) -> bool:
        """Whether the engine reads the weights from a mounted volume, so that nothing is fetched."""
        return self.scheme in ("pvc", "oci")


def shown(uri: str) -> str:
    """The source URI for logs, messages and events. The query string is removed: in a signed URL it contains the
    key."""
    return re.split(r"[?#]", uri, maxsplit=1)[0] if uri.startswith("https://") else uri


def parse_source(uri: str) -> SourceUri:
    """Parses a source URI. Raises ValueError with a message for the author of the URI.

    A URI has exactly one meaning: forms that libraries, servers and credential prefixes could interpret differently are
    refused.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES or not rest:
        raise ValueError(
            f"{uri!r} is not a source: write hf://owner/repo, s3://bucket/prefix (or gs://, az://), "
            "https://host/archive.tar, oci://registry/image:tag or pvc://claim/path"
        )
    if (found := _UNREADABLE.search(rest)) is not None:
        raise ValueError(f"{shown(uri)!r} has the character {found[0]!r}, which no source has")
    match scheme:
        case "hf":
            return _hub(uri, rest)
        case "https":
            return _web(uri)
        case "s3" | "gs" | "az":
            bucket, _, path = rest.partition("/")
            if not _BUCKET.fullmatch(bucket) or ".." in bucket or _has_dot_segments(path) or "%" in path:
                raise ValueError(f"{uri!r} does not name a bucket and a prefix: write {scheme}://bucket/prefix")
            return SourceUri(scheme, uri, bucket=bucket, path="/".join(part for part in path.split("/") if part))
        case "oci":
            host, slash, name = rest.partition("/")
            if not (host and slash and name) or "@" in host or re.search(r"[\s%]", rest) or _has_dot_segments(name):
                raise ValueError(f"{uri!r} does not name an image: write oci://registry/image:tag")
            return SourceUri("oci", uri, image=rest)
        case "pvc":
            claim, _, path = rest.partition("/")
            if not _CLAIM.fullmatch(claim) or ".." in path.split("/"):
                raise ValueError(f"{uri!r} does not name a folder of a volume: write pvc://claim or pvc://claim/path")
            folder = posixpath.normpath(path.strip("/")) if path.strip("/") else ""
            return SourceUri("pvc", uri, claim=claim, path="" if folder == "." else folder)
        case _:
            if not rest.startswith("/") or ".." in rest.split("/"):
                raise ValueError(f"{uri!r} has no absolute path: write file:///path, with three slashes")
            return SourceUri("file", uri, path=posixpath.normpath(f"/{rest.lstrip('/')}"))


def _hub(uri: str, rest: str) -> SourceUri:
    repo, at, revision = rest.partition("@")
    valid = _REPO.fullmatch(repo) and not any(part.startswith(".") for part in repo.split("/"))
    if not valid or ".." in repo or (at and (not _REVISION.fullmatch(revision) or ".." in revision)):
        raise ValueError(f"{uri!r} does not name a repository: write hf://owner/repo or hf://owner/repo@revision")
    return SourceUri("hf", uri, repo=repo, revision=revision or None)


def _web(uri: str) -> SourceUri:
    try:
        parts = urlsplit(uri)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ValueError(f"{shown(uri)!r} is not a URL: {error}") from None
    if not host or "@" in parts.netloc or port == 0:
        raise ValueError("an https:// source names a host and carries no user or password: use `secretRef` for a token")
    if not _HOST.fullmatch(host) or not _is_decodable(host):
        raise ValueError(f"{shown(uri)!r} has a host that is no name of DNS: write it in ASCII (xn--...)")
    # A server could resolve such a path to another path, and credential prefixes would then match the wrong one.
    if _has_dot_segments(parts.path) or _CODED.search(parts.path):
        raise ValueError(
            f"{shown(uri)!r} has a path that does not stand for itself (., .., or such a character as %2e, %2f): write "
            "the path that is meant"
        )
    return SourceUri("https", uri)


def _is_decodable(host: str) -> bool:
    """Whether libraries that show hosts in Unicode can read this one."""
    try:
        host.encode("ascii").decode("idna")
    except UnicodeError:
        return False
    return True


def _has_dot_segments(path: str) -> bool:
    return any(part in (".", "..") for part in path.split("/"))


def covers(prefix: str, uri: str) -> bool:
    """Whether a URI begins with a prefix that ends at a path separator.

    `s3://adapters` covers `s3://adapters/a`, not `s3://adapters-of-others/a`; `https://host` covers no other host or
    port. A prefix without a host covers nothing.
    """
    scheme, separator, rest = prefix.partition("://")
    if not separator or not rest.partition("/")[0] or not uri.startswith(prefix):
        return False
    after = uri[len(prefix) :]
    ends = {"hf": "/@", "https": "/?"}.get(scheme, "/")
    return not after or prefix.endswith("/") or after[0] in ends


def engine_model_path(uri: str) -> str:
    """The engine's --model-path: where the stage container writes the weights, or the mounted volume. The weights of an
    oci:// image are in its root.

    Raises ValueError as `parse_source` does.
    """
    source = parse_source(uri)
    if source.in_place:
        return posixpath.join(names.SOURCE_DIR, source.path) if source.path else names.SOURCE_DIR
    return names.MODEL_PATH
