"""The install key: made once by the leader, read again so that a rotation rolls the pods."""

import asyncio
import base64
import binascii
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from shoal.api import keys, names
from shoal.api.meta import JsonObject
from shoal.kube.client import Client
from shoal.kube.errors import AlreadyExists, KubeError, NotFound
from shoal.kube.resources import SECRETS
from shoal.manifests.model import install_key_secret

log = structlog.get_logger()

READ_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0
"""While there is none yet: gateways are not ready without it."""
KEY_BYTES: Final = 32


class InstallKeyError(ValueError):
    """The Secret is there and cannot be used."""


@dataclass(frozen=True, slots=True, repr=False)
class InstallKeys:
    """Never logged: hence no repr."""

    current: bytes
    previous: bytes | None

    @property
    def fingerprint(self) -> str:
        return keys.fingerprint(self.current)

    @property
    def old_fingerprint(self) -> str | None:
        return keys.fingerprint(self.previous) if self.previous else None


class InstallKeySource:
    """Holds the install keys for the controllers."""

    def __init__(self, client: Client, namespace: str):
        self._client, self._namespace = client, namespace
        self.keys: InstallKeys | None = None
        self.known = asyncio.Event()
        self.changed: list[Callable[[], None]] = []

    async def ensure(self, *, make: bool = True) -> InstallKeys:
        """Reads the Secret, or makes it if there is none and this process is the one to `make` it. Raises
        InstallKeyError, KubeError."""
        try:
            found = await self._client.get(SECRETS, names.INSTALL_KEY_SECRET, self._namespace)
        except NotFound:
            if not make:
                raise
            try:
                found = await self._client.create(
                    SECRETS, install_key_secret(self._namespace, secrets.token_bytes(KEY_BYTES))
                )
                log.info("made the install key", namespace=self._namespace, secret=names.INSTALL_KEY_SECRET)
            except AlreadyExists:
                found = await self._client.get(SECRETS, names.INSTALL_KEY_SECRET, self._namespace)
        read = _parse(found)
        if read != self.keys:
            first = self.keys is None
            self.keys = read
            self.known.set()
            if not first:
                log.info("install key changed", fingerprint=read.fingerprint)
                for listener in self.changed:
                    listener()
        return read

    async def run(self, *, make: bool = True) -> None:
        """Makes the key at once if there is none, and reads it again from time to time, until cancelled. Who does not
        lead only reads."""
        while True:
            try:
                await self.ensure(make=make)
            except NotFound:
                log.debug("no install key yet", secret=names.INSTALL_KEY_SECRET)
            except (KubeError, InstallKeyError) as error:
                log.warning("install key not read; keeping the last one if there was one", error=str(error))
            await asyncio.sleep(READ_SECONDS if self.keys else RETRY_SECONDS)


def _parse(secret: JsonObject) -> InstallKeys:
    """The keys are the bytes as they stand, as a gateway reads them from the mounted files."""
    data: dict[str, str] = secret.get("data") or {}
    try:
        current = base64.b64decode(data["current"])
        previous = base64.b64decode(data.get("previous", ""))
    except (KeyError, binascii.Error) as error:
        raise InstallKeyError(f"Secret {names.INSTALL_KEY_SECRET} must have `current`") from error
    if len(current) < KEY_BYTES or 0 < len(previous) < KEY_BYTES:
        raise InstallKeyError(f"the keys of Secret {names.INSTALL_KEY_SECRET} must be at least {KEY_BYTES} bytes long")
    return InstallKeys(current, previous or None)
