"""s3://, gs:// and az://: the objects below a prefix of a bucket, through obstore."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.credentials import Credentials
from shoal.artifacts.errors import ArtifactError, Interrupted
from shoal.artifacts.manifest import File, Manifest, sort
from shoal.artifacts.ranges import RangedSource, patiently
from shoal.artifacts.source import Settings
from shoal.artifacts.wanted import wanted_files

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import AzureStore, ClientConfig, GCSStore, S3Store

    Store = AzureStore | GCSStore | S3Store

_PIECE = 1 << 20
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")

# The Secret's keys, and what obstore calls them. Nothing else of the Secret is handed on: among obstore's settings are
# names of files and addresses of token services, and a node's own credentials are not for a tenant to use.
_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {
        "AWS_ACCESS_KEY_ID": "access_key_id",
        "AWS_SECRET_ACCESS_KEY": "secret_access_key",
        "AWS_SESSION_TOKEN": "session_token",
        "AWS_REGION": "region",
        "AWS_ENDPOINT_URL": "endpoint",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "virtual_hosted_style_request",
    },
    "gs": {"GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key"},
    "az": {
        "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
        "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
        "AZURE_STORAGE_SAS_TOKEN": "sas_key",
        "AZURE_CLIENT_ID": "client_id",
        "AZURE_CLIENT_SECRET": "client_secret",
        "AZURE_TENANT_ID": "tenant_id",
        "AZURE_ENDPOINT": "endpoint",
    },
}
_PROOF: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "s3": (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),),
    "gs": (("GOOGLE_SERVICE_ACCOUNT_KEY",),),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
    ),
}
"""Sets of keys of which one proves who asks."""


class BucketSource(RangedSource):
    """The objects below a prefix; or one archive, if the address ends like one."""

    def __init__(self, source: SourceUri, credentials: Credentials, settings: Settings) -> None:
        """Raises ArtifactError(Gated) when the Secret lacks what the kind of bucket needs."""
        super().__init__(settings)
        self._source, self._credentials = source, credentials
        self._archive = source.path.endswith(_ARCHIVES)
        self._prefix, _, self._only = source.path.rpartition("/") if self._archive else (source.path, "", "")
        self._config = _config(source, credentials)
        self._store: Store | None = None

    async def manifest(self) -> Manifest:
        files = await patiently(self.settings, self._list)
        return Manifest(
            source=self._source.uri,
            origin=f"{self._source.scheme}://{self._source.bucket}/{self._prefix} {_host(self._config)}",
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
                while True:
                    async with asyncio.timeout(self.settings.stall_seconds):
                        page = await anext(pages, None)
                    if page is None:
                        break
                    objects += page
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
        if self._config.get("endpoint", "").startswith("http://"):
            options["allow_http"] = True
        if bundle := os.environ.get("SSL_CERT_FILE"):
            options["root_certificate"] = Path(bundle).read_bytes()
        store: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self._source.scheme]
        try:
            return store(
                self._source.bucket,
                prefix=self._prefix or None,
                config=self._config,
                client_options=options,
                retry_config={"max_retries": 0},  # what broke goes on where it broke, here
            )
        except Exception as error:  # its words may quote the key
            raise ArtifactError(
                reasons.GATED,
                f"the Secret of source.secretRef cannot be used for {self._source.scheme}:// "
                f"({type(error).__name__}): check the values of {', '.join(self._named())}",
            ) from None

    def _named(self) -> list[str]:
        return [key for key in _KEYS[self._source.scheme] if key in self._credentials.values]

    def _explain(self, error: Exception) -> ArtifactError:
        """What an error of obstore means. Its own words stay out: they may hold a signed address."""
        from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

        if isinstance(error, ArtifactError):
            return error
        text, uri = str(error), self._source.uri
        found = re.search(r"status code: (\d{3})", text)
        status = int(found[1]) if found else None
        if isinstance(error, PreconditionError) or status in (412, 416):
            return ArtifactError(
                reasons.SOURCE_CHANGED,
                f"{uri} changed while it was being fetched: publish another version under another prefix, and name "
                "that in source.uri",
            )
        if isinstance(error, FileNotFoundError) or status == 404:
            what = "the bucket does not exist" if "NoSuchBucket" in text else "there is nothing under that name"
            return ArtifactError(reasons.SOURCE_NOT_FOUND, f"{uri}: {what}; check source.uri")
        if status in (301, 307) or "AuthorizationHeaderMalformed" in text:
            return ArtifactError(
                reasons.GATED, f"{uri} is in another region: put its region into key AWS_REGION of the Secret"
            )
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403)
        if denied or "invalid_grant" in text:
            return ArtifactError(reasons.GATED, self._denied())
        if "InvalidCertificate" in text:
            return ArtifactError(
                reasons.SOURCE_UNREACHABLE,
                f"the certificate of {uri} is not trusted: add its CA to the chart's caBundle",
            )
        return Interrupted(f"{uri} cannot be reached ({_network(error, text, status)}): {_ADVICE}")

    def _denied(self) -> str:
        uri, scheme = self._source.uri, self._source.scheme
        if "skip_signature" not in self._config:
            return (
                f"{uri} refuses the credentials of source.secretRef: check its keys {', '.join(self._named())}, and "
                "that they may list the bucket and read its objects"
            )
        return (
            f"{uri} is not public: put {proving_keys(scheme)} into a Secret and name it in source.secretRef "
            "(a node's own identity is never used)"
        )


_ADVICE = "check source.uri, the Secret's endpoint and region, and the chart's proxy settings"


def _config(source: SourceUri, credentials: Credentials) -> dict[str, str]:
    """The settings of the store. Raises ArtifactError(Gated)."""
    scheme = source.scheme
    config = {ours: credentials.values[key] for key, ours in _KEYS[scheme].items() if key in credentials.values}
    proven = any(all(key in credentials.values for key in keys) for keys in _PROOF[scheme])
    begun = any(key in credentials.values for keys in _PROOF[scheme] for key in keys)
    # A Secret may also name no more than where a public bucket is.
    if credentials.given and not proven and (begun or not config):
        raise ArtifactError(
            reasons.GATED,
            f"the Secret of source.secretRef has no {proving_keys(scheme)} (it has: "
            f"{', '.join(sorted(credentials.values)) or 'nothing'})",
        )
    if scheme == "az" and "account_name" not in config:
        raise ArtifactError(
            reasons.GATED,
            f"{source.uri} needs the name of the storage account: put it into key AZURE_STORAGE_ACCOUNT_NAME of a "
            "Secret and name the Secret in source.secretRef",
        )
    if scheme == "s3":
        config.setdefault("region", "us-east-1")
    if not proven:
        config["skip_signature"] = "true"
    return config


def store_settings(scheme: str, credentials: Credentials) -> dict[str, str]:
    """What a Secret says of a bucket, in obstore's words; for buckets of Shoal's own, whose pods may use their own
    identity where the Secret has none."""
    config = {ours: credentials.values[key] for key, ours in _KEYS[scheme].items() if key in credentials.values}
    if scheme == "s3" and config:
        config.setdefault("region", "us-east-1")
    return config


def _host(config: Mapping[str, str]) -> str:
    """Which server answers, as far as the Secret says it: a bucket's name alone means another one at another host."""
    named = [config.get("endpoint"), config.get("account_name")]
    if key := config.get("service_account_key"):
        try:
            named.append(json.loads(key).get("gcs_base_url"))
        except (ValueError, AttributeError):
            named.append(hashlib.sha256(key.encode()).hexdigest())  # whatever it means, it is nobody else's
    return " ".join(filter(None, named))


def proving_keys(scheme: str) -> str:
    """Keys of a Secret that open a bucket of this kind, for people."""
    return ", or ".join(" and ".join(keys) for keys in _PROOF[scheme])


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
