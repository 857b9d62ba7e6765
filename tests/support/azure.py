"""Azure Blob Storage: Azurite, Microsoft's own server for tests, which checks signatures and shared access."""

import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, generate_container_sas

from shoal_dev.lab.gobuild import cache_root
from tests.support.controlplane import free_ports

CONTAINER = "models"
ACCOUNT = "acme"
_PACKAGE = Path(__file__).parent / "node" / "azurite"


@dataclass(frozen=True)
class Azure:
    """An account, its key, and one container of it."""

    endpoint: str
    account_key: str
    client: BlobServiceClient
    bucket: str = CONTAINER

    @property
    def port(self) -> int:
        return int(self.endpoint.split("/")[2].rpartition(":")[2])

    def put(self, prefix: str, files: Mapping[str, bytes], bucket: str = CONTAINER) -> None:
        container = self.client.get_container_client(bucket)
        for name, content in files.items():
            container.upload_blob(f"{prefix}/{name}" if prefix else name, content, overwrite=True)

    def make_bucket(self, name: str, *, public: bool = False) -> None:
        self.client.create_container(name, public_access="container" if public else None)

    def secret(self, key: str | None = None, endpoint: str | None = None) -> dict[str, bytes]:
        """The Secret that `spec.source.secretRef` would name."""
        return {"AZURE_STORAGE_ACCOUNT_KEY": (key or self.account_key).encode(), **self.place(endpoint)}

    def place(self, endpoint: str | None = None) -> dict[str, bytes]:
        """A Secret that says no more than where the container is."""
        where = f"{endpoint}/{ACCOUNT}" if endpoint else self.endpoint
        return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT.encode(), "AZURE_ENDPOINT": where.encode()}

    def shared(self, permission: str) -> dict[str, bytes]:
        """A Secret with a shared access signature: `r` reads, `l` lists."""
        token = generate_container_sas(
            ACCOUNT,
            CONTAINER,
            account_key=self.account_key,
            permission=ContainerSasPermissions.from_string(permission),
            expiry=datetime.now(UTC) + timedelta(hours=1),
        )
        return {"AZURE_STORAGE_SAS_TOKEN": token.encode(), **self.place()}


@contextlib.contextmanager
def azure_server() -> Generator[Azure]:
    program = _azurite()
    (port,) = free_ports(1)
    key = b64encode(secrets.token_bytes(32)).decode()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent",
             "--disableTelemetry", "--skipApiVersionCheck"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"},
        )  # fmt: skip
        try:
            endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
            _await(process, endpoint)
            with BlobServiceClient(endpoint, credential=key) as client:
                client.create_container(CONTAINER)
                yield Azure(endpoint, key, client)
        finally:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urlopen(url, timeout=5):
                return
        except HTTPError:  # it answers
            return
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
        time.sleep(0.05)


def _azurite() -> Path:
    """Azurite as the lock file has it, installed once into a cache. Skips the test where there is no npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Azurite is not to be had here: no npm (Node.js)")
    digest = hashlib.sha256((_PACKAGE / "package-lock.json").read_bytes()).hexdigest()[:16]
    target = cache_root() / f"azurite-{digest}"
    program = target / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix="azurite-") as temporary:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(_PACKAGE / name, temporary)
            result = subprocess.run(
                [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev"],
                cwd=temporary, capture_output=True, text=True, timeout=600, check=False,
            )  # fmt: skip
            if result.returncode != 0:
                pytest.skip(f"Azurite cannot be installed here: {result.stderr[-500:]}")
            Path(temporary).chmod(0o755)
            with contextlib.suppress(OSError):  # another test run was first
                os.rename(temporary, target)
                Path(temporary).mkdir()  # what TemporaryDirectory then removes
    return program
