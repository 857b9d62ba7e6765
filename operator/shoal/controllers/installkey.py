"""The install key: made once by the leader, read again so that a rotation rolls the pods; and what others have of it.

The key is in the Secret `shoal-root-key`, which only operators read. From it the leader keeps one Secret per role
(`api/keys.py`).

Up to 0.1 the key was in `shoal-install-key`, mounted by every process. After an upgrade that one is in use until every
gateway knows the new keys, so that no replica is out of reach of a gateway of before. From then on pods are made with
the new key, and the old Secret is deleted once no pod carries it. A gateway of before that comes back (a rollback)
turns that round.
"""

import asyncio
import base64
import binascii
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from shoal.api import keys, names
from shoal.api.keys import InstallKey
from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import AlreadyExists, KubeError, NotFound
from shoal.kube.resources import SECRETS
from shoal.manifests.model import role_secret, root_key_secret

log = structlog.get_logger()

READ_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0
"""While there is none yet: gateways are not ready without it."""
KEY_BYTES: Final = 32
MOUNT_SECONDS: Final = 180.0
"""A kubelet takes up to one and a half minutes to bring a new Secret into a gateway that runs already. So long after an
upgrade the key of before stays in use."""
UNUSED_CHECKS: Final = 3
"""So often in a row no pod may carry the key of before until it is deleted: one may just be made."""


class InstallKeyError(ValueError):
    """The Secret is there and cannot be used."""


@dataclass(frozen=True, slots=True, repr=False)
class InstallKeys:
    """Never logged: hence no repr."""

    current: InstallKey
    """New pods are made with it."""
    former: tuple[InstallKey, ...] = ()
    """Of pods that are still there."""

    @property
    def fingerprint(self) -> str:
        return self.current.fingerprint

    def of(self, fingerprint: str | None) -> InstallKey:
        """The key that a pod was made with; the current one where that is not known."""
        return next((key for key in self.former if key.fingerprint == fingerprint), self.current)

    def bearers_for(self, role: keys.Role, subject: str) -> tuple[str, ...]:
        """By each key, the current one's first."""
        return tuple(key.bearer_for(role, subject) for key in (self.current, *self.former))


class InstallKeySource:
    """Holds the install keys for the controllers.

    `behind`: whether a gateway lives that knows only the key of before. `in_use`: fingerprints that pods carry."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        *,
        behind: Callable[[], bool] = lambda: False,
        in_use: Callable[[], set[str | None]] = set[str | None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self._client, self._namespace = client, namespace
        self._behind, self._in_use, self._now = behind, in_use, now
        self._published: dict[str, JsonObject] = {}
        self._unused = 0
        self.keys: InstallKeys | None = None
        self.known = asyncio.Event()
        self.changed: list[Callable[[], None]] = []

    async def ensure(self, *, make: bool = True) -> InstallKeys:
        """Reads the Secrets; makes those that are missing if this process is the one to `make` them. Raises
        InstallKeyError, KubeError."""
        root, made = await self._root(make=make)
        old = await self._old()
        if make:
            await self._publish(root)
        fresh = made is not None and (self._now() - made).total_seconds() < MOUNT_SECONDS
        read = _arranged(root, old, behind=fresh or self._behind())
        if read != self.keys:
            first = self.keys is None
            self.keys = read
            self.known.set()
            if not first:
                log.info("install key changed", fingerprint=read.fingerprint)
                for listener in self.changed:
                    listener()
        if make and old and not read.current.old:
            await self._retire(old)
        return read

    async def run(self, *, make: bool = True) -> None:
        """Makes the key at once if there is none, and reads it again from time to time, until cancelled. Who does not
        lead only reads."""
        while True:
            try:
                await self.ensure(make=make)
            except NotFound:
                log.debug("no install key yet", secret=names.ROOT_KEY_SECRET)
            except (KubeError, InstallKeyError) as error:
                log.warning("install key not read; keeping the last one if there was one", error=str(error))
            await asyncio.sleep(READ_SECONDS if self.keys else RETRY_SECONDS)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _root(self, *, make: bool) -> tuple[tuple[bytes, ...], datetime | None]:
        """The install keys, and when their Secret was made."""
        name = names.ROOT_KEY_SECRET
        try:
            found = await self._client.get(SECRETS, name, self._namespace)
        except NotFound:
            if not make:
                raise
            try:
                wanted = root_key_secret(self._namespace, secrets.token_bytes(KEY_BYTES))
                found = await self._client.create(SECRETS, wanted)
                log.info("made the install key", namespace=self._namespace, secret=name)
            except AlreadyExists:
                found = await self._client.get(SECRETS, name, self._namespace)
        made: str | None = found.get("metadata", {}).get("creationTimestamp")
        return _parse(found, name), datetime.fromisoformat(made) if made else None

    async def _old(self) -> tuple[bytes, ...]:
        try:
            found = await self._client.get(SECRETS, names.INSTALL_KEY_SECRET, self._namespace)
        except NotFound:
            return ()
        return _parse(found, names.INSTALL_KEY_SECRET)

    async def _publish(self, root: tuple[bytes, ...]) -> None:
        """One Secret per role; written when it is another than was last written, or is not there any more."""
        current, previous = root[0], root[1] if len(root) > 1 else None
        for role in (*keys.BUNDLES, *keys.PEOPLE):
            wanted = role_secret(self._namespace, role, current, previous)
            name: str = wanted["metadata"]["name"]
            if self._published.get(name) == wanted and await self._is_there(name):
                continue
            await self._client.apply(SECRETS, wanted, manager=names.MANAGER_INSTALL)
            self._published[name] = wanted

    async def _is_there(self, name: str) -> bool:
        try:
            await self._client.get_metadata(SECRETS, name, self._namespace)
        except NotFound:
            return False
        return True

    async def _retire(self, old: tuple[bytes, ...]) -> None:
        """The key of before dies with the last of its pods."""
        in_use = self._in_use()
        self._unused = 0 if any(keys.fingerprint(key) in in_use for key in old) else self._unused + 1
        if self._unused >= UNUSED_CHECKS:
            log.info("no pod has a key of before any more: deleting it", secret=names.INSTALL_KEY_SECRET)
            await self._client.delete(SECRETS, names.INSTALL_KEY_SECRET, self._namespace)


def _arranged(root: tuple[bytes, ...], old: tuple[bytes, ...], *, behind: bool) -> InstallKeys:
    new = tuple(InstallKey(key) for key in root)
    before = tuple(InstallKey(key, old=True) for key in old)
    first, *others = (*before, *new) if before and behind else (*new, *before)
    return InstallKeys(first, tuple(others))


def _parse(secret: JsonObject, name: str) -> tuple[bytes, ...]:
    """The current key, and the previous one if there is one: the bytes as they stand."""
    data: dict[str, str] = secret.get("data") or {}
    try:
        current = base64.b64decode(data["current"])
        previous = base64.b64decode(data.get("previous", ""))
    except (KeyError, binascii.Error) as error:
        raise InstallKeyError(f"Secret {name} must have `current`") from error
    if len(current) < KEY_BYTES or 0 < len(previous) < KEY_BYTES:
        raise InstallKeyError(f"the keys of Secret {name} must be at least {KEY_BYTES} bytes long")
    return (current, previous) if previous else (current,)
