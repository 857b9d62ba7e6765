"""Log files in a bucket: s3://, gs:// and az://, through obstore. A finished file is uploaded as a whole."""

import contextlib
import errno
import io
import os
import re
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from shoal.api.sources import SourceUri, parse_source
from shoal.artifacts.bucketkeys import store_settings
from shoal.artifacts.credentials import StoreCredentials
from shoal.requestlog.store import RETENTION, LogFile

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, S3Store

    Opened = AzureStore | GCSStore | S3Store

R = TypeVar("R")

_CONNECT: Final = timedelta(seconds=5)
_SILENCE: Final = timedelta(seconds=30)
_WHOLE: Final = timedelta(seconds=120)
SCHEMES: Final = ("s3", "gs", "az")


class BucketDown(OSError):
    """The bucket failed. Its own message is left out: it may contain a signed URL."""


def parse_url(url: str) -> SourceUri:
    """Parses the URL of a bucket. Raises ValueError with a message for the author of the URL."""
    source = parse_source(url)
    if source.scheme not in SCHEMES:
        raise ValueError(f"{url!r} is no bucket: write s3://bucket/prefix, gs://bucket/prefix or az://container/prefix")
    return source


class BucketStore:
    """A `LogStore` in a bucket. Its methods block, and may be called from any thread."""

    def __init__(self, url: str, secret_dir: Path | None) -> None:
        """Raises ValueError if the URL is not a bucket's."""
        self._source = parse_url(url)
        self._secret_dir = secret_dir
        self._opened: tuple[StoreCredentials, Opened] | None = None

    def tenants(self) -> list[str]:
        return self._below("", "tenant=")

    def dates(self, tenant: str) -> list[str]:
        return sorted(self._below(f"tenant={tenant}", "date="), reverse=True)

    def files(self, tenant: str, date: str) -> list[LogFile]:
        import obstore

        def fetch(store: "Opened") -> list[LogFile]:
            found: list[LogFile] = []
            pages: Any = obstore.list(store, f"tenant={tenant}/date={date}", chunk_size=1000)  # pyright: ignore[reportUnknownMemberType]
            for page in pages:
                for meta in page:
                    file = LogFile(tenant, date, str(meta["path"]).rpartition("/")[2], int(meta["size"]))
                    if file.began:
                        found.append(file)
            return found

        return sorted(self._do(fetch), key=lambda file: (file.began, file.name), reverse=True)

    @contextlib.contextmanager
    def read(self, file: LogFile) -> Generator[IO[bytes]]:
        yield io.BytesIO(self._get(file.key))

    def put(self, file: LogFile, path: Path) -> None:
        """Uploads a finished file."""
        import obstore

        data = path.read_bytes()
        self._do(lambda store: obstore.put(store, file.key, data))

    def replace(self, file: LogFile, name: str, write: Callable[[IO[bytes]], None]) -> None:
        import obstore

        content = io.BytesIO()
        write(content)
        other = LogFile(file.tenant, file.date, name, 0)
        self._do(lambda store: obstore.put(store, other.key, content.getvalue()))
        if name != file.name:
            self.remove(file)

    def remove(self, file: LogFile) -> None:
        self._delete(file.key)

    def retention(self, tenant: str) -> int | None:
        try:
            return int(self._get(f"tenant={tenant}/{RETENTION}").decode("ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def keep_retention(self, tenant: str, days: int) -> None:
        import obstore

        data = str(days).encode()
        self._do(lambda store: obstore.put(store, f"tenant={tenant}/{RETENTION}", data))

    def forget(self, tenant: str) -> None:
        if not self.dates(tenant):
            self._delete(f"tenant={tenant}/{RETENTION}")

    def _get(self, key: str) -> bytes:
        import obstore

        return self._do(lambda store: bytes(obstore.get(store, key).bytes()))

    def _delete(self, key: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._do(lambda store: obstore.delete(store, key))

    def _below(self, prefix: str, word: str) -> list[str]:
        import obstore

        def fetch(store: "Opened") -> list[str]:
            listed: Any = obstore.list_with_delimiter(store, prefix or None)  # pyright: ignore[reportUnknownMemberType]
            return [str(path).rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"]]

        return sorted(name.removeprefix(word) for name in self._do(fetch) if name.startswith(word))

    def _do(self, work: "Callable[[Opened], R]") -> R:
        """Runs `work` on the opened bucket. Raises FileNotFoundError, or BucketDown."""
        try:
            return work(self._store())
        except FileNotFoundError:
            raise
        except Exception as error:
            raise BucketDown(errno.EIO, f"the bucket of the request log {_why(error)}") from None

    def _store(self) -> "Opened":
        from obstore.store import AzureStore, GCSStore, S3Store

        credentials = StoreCredentials() if self._secret_dir is None else StoreCredentials.read(self._secret_dir)
        if self._opened is not None and self._opened[0] == credentials:
            return self._opened[1]
        settings = store_settings(self._source.scheme, credentials)
        options: ClientConfig = {"connect_timeout": _CONNECT, "read_timeout": _SILENCE, "timeout": _WHOLE}
        if settings.get("endpoint", "").startswith("http://"):
            options["allow_http"] = True
        if bundle := os.environ.get("SSL_CERT_FILE"):
            options["root_certificate"] = Path(bundle).read_bytes()
        kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self._source.scheme]
        opened = kind(
            self._source.bucket,
            prefix=self._source.path or None,
            config=settings,
            client_options=options,
            retry_config={"max_retries": 2, "retry_timeout": _SILENCE},
        )
        self._opened = (credentials, opened)
        return opened


def _why(error: Exception) -> str:
    text = str(error)
    found = re.search(r"status code: (\d{3})|status: (\d{3})|\b(40[13]) Forbidden", text)
    status = next(filter(None, found.groups()), "") if found else ""
    if status in ("401", "403") or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return "refuses the credentials: check the Secret, and that it may list, read, write and delete"
    if status:
        return f"answered {status}"
    return "cannot be reached" if type(error).__name__ == "GenericError" else f"failed ({type(error).__name__})"
