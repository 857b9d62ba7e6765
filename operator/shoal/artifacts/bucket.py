"""s3://, gs:// and az://: the objects below a prefix of a bucket, through obstore."""

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.bucketkeys import KEYS, authenticating_keys, endpoint, host, store_config
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError, Interrupted, Unreached
from shoal.artifacts.manifest import File, Manifest, require_count, sort, wanted_files
from shoal.artifacts.ranges import RangedSource, with_retries
from shoal.artifacts.relay import EgressRelay
from shoal.artifacts.source import Settings

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import AzureStore, ClientConfig, GCSStore, S3Store

    Store = AzureStore | GCSStore | S3Store

_PIECE = 1 << 20
_LONGEST = 10
"""Limit for listing a bucket, as a multiple of the stall timeout: a page of one object per minute would never end."""
_EXPIRED, _BAD_TOKEN = "<Code>ExpiredToken</Code>", "<Code>InvalidToken</Code>"
"""What S3 says with status 400 of session tokens."""
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")


class BucketSource(RangedSource):
    """The objects below a prefix; or one archive, if the URI ends like one."""

    def __init__(self, source: SourceUri, credentials: StoreCredentials, settings: Settings) -> None:
        """Raises ArtifactError(Gated) when the Secret lacks keys that this kind of bucket requires."""
        super().__init__(settings)
        self._source, self._credentials = source, credentials
        self._archive = source.path.endswith(_ARCHIVES)
        self._prefix, _, self._only = source.path.rpartition("/") if self._archive else (source.path, "", "")
        self._config = store_config(source, credentials)
        self._store: Store | None = None
        named = endpoint(source.scheme, credentials)
        self._relay = EgressRelay(named, source.bucket, settings.network, settings.connect_seconds) if named else None

    async def __aenter__(self) -> Self:
        if self._relay is not None:
            await self._relay.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._store = None
        if self._relay is not None:
            await self._relay.__aexit__(*error)

    async def manifest(self) -> Manifest:
        files = await with_retries(self.settings, self._list)
        return Manifest(
            source=self._source.uri,
            origin=f"{self._source.scheme}://{self._source.bucket}/{self._prefix} {host(self._config)}",
            revision=None,
            files=sort(files),
            archive=self._archive,
        )

    async def _list(self) -> list[File]:
        import obstore

        store = await self._opened()
        try:
            if self._archive:
                async with asyncio.timeout(self.settings.stall_seconds):
                    objects = [await obstore.head_async(store, self._only)]
            else:
                objects: list[Any] = []
                pages = obstore.list(store, chunk_size=1000)  # pyright: ignore[reportUnknownMemberType]
                ends = asyncio.get_running_loop().time() + _LONGEST * self.settings.stall_seconds
                while True:
                    stalled = asyncio.get_running_loop().time() + self.settings.stall_seconds
                    async with asyncio.timeout_at(min(ends, stalled)):
                        page = await anext(pages, None)
                    if page is None:
                        break
                    objects += page
                    require_count(len(objects), self._source.uri)
        except Exception as error:
            raise self._explain(error) from None
        found = {
            each["path"]: File(each["path"], each["size"], f"etag:{each['e_tag']}" if each["e_tag"] else "")
            for each in objects
        }
        wanted = list(found) if self._archive else wanted_files(found)
        if not wanted:
            raise ArtifactError(
                reasons.SOURCE_NOT_FOUND if not found else reasons.SOURCE_INVALID,
                f"{self._source.uri} has no files{' that an engine could read' if found else ''}: check source.uri",
            )
        return [found[name] for name in wanted]

    async def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        import obstore

        options: GetOptions = {}
        if (start, end) != (0, file.size):
            options["range"] = (start, end)
        if file.validator:
            options["if_match"] = file.validator.removeprefix("etag:")
        try:
            store = await self._opened()
            async with asyncio.timeout(self.settings.stall_seconds):
                pieces = aiter((await obstore.get_async(store, file.name, options=options)).stream(_PIECE))
            while True:
                async with asyncio.timeout(self.settings.stall_seconds):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield bytes(piece)
        except (ArtifactError, GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._explain(error) from None

    async def _opened(self) -> "Store":
        if self._store is None:
            self._store = await asyncio.to_thread(self._open)
        return self._store

    def _open(self) -> "Store":
        from obstore.store import AzureStore, GCSStore, S3Store

        options: ClientConfig = {
            "connect_timeout": timedelta(seconds=self.settings.connect_seconds),
            "read_timeout": timedelta(seconds=self.settings.stall_seconds),
            "timeout": timedelta(days=1),
        }
        if any(self._config.get(key, "").startswith("http://") for key in ("endpoint", "base_url")):
            options["allow_http"] = True
        if self._relay is not None:
            options["proxy_url"] = self._relay.url
        if bundle := os.environ.get("SSL_CERT_FILE"):
            options["root_certificate"] = Path(bundle).read_bytes()
        store: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self._source.scheme]
        try:
            return store(
                self._source.bucket,
                prefix=self._prefix or None,
                config=self._config,
                client_options=options,
                retry_config={"max_retries": 0},  # `ranges` resumes broken transfers
            )
        except Exception as error:  # its message may contain the key
            raise ArtifactError(
                reasons.GATED,
                f"the Secret of source.secretRef cannot be used for {self._source.scheme}:// "
                f"({type(error).__name__}): check the values of {', '.join(self._named())}",
            ) from None

    def _named(self) -> list[str]:
        return [key for key in KEYS[self._source.scheme] if key in self._credentials.values]

    def _explain(self, error: Exception) -> ArtifactError:
        """Converts an error of obstore. Its message is left out, because it may contain a signed URL."""
        from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

        if isinstance(error, ArtifactError):
            return error
        text, uri = str(error), self._source.uri
        if self._relay is not None and (refusal := self._relay.refusal) is not None:
            self._relay.refusal = None
            if isinstance(refusal, Unreached):
                return Interrupted(f"{uri} cannot be reached ({refusal}): {_ADVICE}")
            return refusal
        found = re.search(r"status code: (\d{3})", text)
        status = int(found[1]) if found else None
        if isinstance(error, PreconditionError) or status in (412, 416):
            return ArtifactError(
                reasons.SOURCE_CHANGED,
                f"{uri} changed while it was being fetched: publish another version under another prefix, and name "
                "that in source.uri",
            )
        if isinstance(error, FileNotFoundError) or status == 404:
            gone = "NoSuchBucket" in text or "ContainerNotFound" in text
            bucket = "container" if self._source.scheme == "az" else "bucket"
            what = f"the {bucket} does not exist" if gone else "there is nothing under that name"
            return ArtifactError(reasons.SOURCE_NOT_FOUND, f"{uri}: {what}; check source.uri")
        if status in (301, 307) or "AuthorizationHeaderMalformed" in text:
            return ArtifactError(
                reasons.GATED, f"{uri} is in another region: put its region into key AWS_REGION of the Secret"
            )
        if "RequestTimeTooSkewed" in text:
            return ArtifactError(
                reasons.GATED,
                f"{uri} refuses requests of another time than its own: let a time service (NTP) set the node's clock",
            )
        expired = _EXPIRED in text
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403)
        if denied or expired or "invalid_grant" in text or _BAD_TOKEN in text:
            return ArtifactError(reasons.GATED, self._denied(expired=expired))
        if "InvalidCertificate" in text:
            return ArtifactError(
                reasons.SOURCE_UNREACHABLE,
                f"the certificate of {uri} is not trusted: add its CA to the chart's caBundle",
            )
        return Interrupted(f"{uri} cannot be reached ({_network(error, text, status)}): {_ADVICE}")

    def _denied(self, *, expired: bool = False) -> str:
        uri, scheme = self._source.uri, self._source.scheme
        if (who := self._credentials.identity) and "skip_signature" not in self._config:
            return (
                f"{uri} refuses {who}: let it list the bucket and read its objects (its keys end by themselves, "
                "mostly after an hour: a fetch that takes longer goes on with new ones at the next try)"
            )
        if expired and "skip_signature" not in self._config:
            return (
                f"{uri} says that the credentials of source.secretRef have expired: put new ones into its keys "
                f"{', '.join(self._named())}, or lasting ones without a session token"
            )
        if "skip_signature" not in self._config:
            return (
                f"{uri} refuses the credentials of source.secretRef: check its keys {', '.join(self._named())}, and "
                "that they may list the bucket and read its objects"
            )
        return (
            f"{uri} is not public: put {authenticating_keys(scheme)} into a Secret and name it in source.secretRef "
            "(a node's own identity is never used), or name a ServiceAccount that may read it in "
            "spec.pod.serviceAccountName"
        )


_ADVICE = "check source.uri, the Secret's endpoint and region, and the chart's proxy settings"


def _network(error: Exception, text: str, status: int | None) -> str:
    if status is not None:
        return f"it answered {status}"
    for sign, meaning in (
        ("dns error", "its host does not resolve"),
        ("Connection refused", "connection refused"),
        ("TimedOut", "no answer in time"),
        ("timed out", "no answer in time"),
    ):
        if sign in text:
            return meaning
    return "no answer in time" if isinstance(error, TimeoutError) else "the connection broke off"
