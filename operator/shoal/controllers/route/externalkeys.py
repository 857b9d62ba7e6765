"""The API keys of external targets, from Secrets beside the routes to the one Secret that gateways mount.

Gateways cannot read Secrets. The leader reads those that routes name, checks that each was made for such a target and
for its host (core/routing/external.py), and copies them to a Secret in Shoal's namespace. They are read again every
half minute, because Secrets are not watched. Nothing of them is logged.
"""

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import structlog

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.api.modelroute import ExternalCredentials, ExternalTarget, ModelRoute
from shoal.controllers.world import World
from shoal.core.claimants import age
from shoal.core.routing.external import (
    MOST_CREDENTIALS,
    Credential,
    ExternalProblem,
    credential_id,
    credential_of,
    host_problem,
    place_of,
    read_credential,
)
from shoal.core.status.routestatus import former_problem
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.projections import Custom
from shoal.kube.resources import SECRETS
from shoal.manifests.secrets import own_secret

log = structlog.get_logger()

READ_SECONDS: Final = 30.0
MOST_READ: Final = 4 * MOST_CREDENTIALS
"""Secrets of one reading: one after the other, so that others' keys are not read late."""
_SETTLE_SECONDS: Final = 0.5
"""After a change of a route: several that come together are one reading."""


class _Declared(NamedTuple):
    """What the verdict on a target's Secret depends on. A target that is edited has none until it is read again."""

    name: str
    url: str
    credentials: ExternalCredentials | None


class ExternalKeys:
    """`changed` is called with the key of a route whose external targets have other problems than before."""

    def __init__(self, world: World, changed: Callable[[str], None]) -> None:
        self._world, self._changed = world, changed
        self._problems: dict[str, dict[str, ExternalProblem]] = {}
        self._known: dict[str, frozenset[_Declared]] = {}
        """For which targets of each route Secrets were read."""
        self._found: Mapping[str, Credential] | None = None
        """The keys that gateways have, by id; None: not read in this term."""
        self._published: JsonObject | None = None
        self._wake = asyncio.Event()

    def begin_term(self) -> None:
        """Forgets what an earlier term read: another leader may have delivered other keys meanwhile."""
        self._problems, self._known, self._found, self._published = {}, {}, None, None

    def on_route(self, _key: str, before: Custom[ModelRoute] | None, after: Custom[ModelRoute] | None) -> None:
        if _targets(before) != _targets(after):
            self._wake.set()

    async def problem(self, route: ModelRoute, target: ExternalTarget) -> ExternalProblem | None:
        """Why gateways do not use a target; None: they do. `Pending`: its Secret was not read yet, gateways were given
        no key for it, and no former leader found a fault. Raises KubeError where the API server does not answer what
        gateways were given."""
        found = host_problem(target, self._world.config.external.allowed_hosts)
        if found is not None or target.credentials is None:
            return found
        if _declared(target) in self._known.get(route.key, ()):
            return self._problems.get(route.key, {}).get(target.name)
        if await self._is_delivered(route, target, target.credentials):
            return None
        # A new leader takes nothing for mended before it has looked: the same warning would follow.
        if route.key not in self._known and (former := former_problem(route, target.name)) is not None:
            return former
        return ExternalProblem(reasons.PENDING, f"external target {target.name}: its Secret is not read yet")

    async def run(self) -> None:
        """Reads and delivers keys until cancelled. Only the leader runs it, after `begin_term`."""
        while True:
            self._wake.clear()
            try:
                await self.refresh()
            except (KubeError, OSError, TimeoutError) as error:
                log.warning("keys of external targets not delivered; trying again", error=str(error))
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self._wake.wait()
                await asyncio.sleep(_SETTLE_SECONDS)
            except TimeoutError:
                continue

    async def refresh(self) -> None:
        """Reads every Secret that a route names, and writes the gateways' Secret if it is another one. Raises
        KubeError."""
        problems: dict[str, dict[str, ExternalProblem]] = {}
        found: dict[str, Credential] = {}
        read: dict[tuple[str, str], tuple[str | None, Mapping[str, bytes] | None]] = {}
        known: dict[str, frozenset[_Declared]] = {}
        routes: list[ModelRoute] = []
        for key in self._world.routes.known_keys():
            custom = self._world.routes.get(key)
            if custom is None or custom.object is None:
                continue
            routes.append(custom.object)
            targets = custom.object.spec.external_targets
            known[key] = frozenset(_declared(target) for target in targets if target.credentials is not None)
        for route, target in _in_turn(routes):
            got = await self._read(route, target, read)
            if isinstance(got, ExternalProblem):
                problems.setdefault(route.key, {})[target.name] = got
            elif got is not None:
                id, credential = got
                if id not in found and len(found) >= MOST_CREDENTIALS:
                    text = f"external target {target.name}: gateways get at most {MOST_CREDENTIALS} keys"
                    problems.setdefault(route.key, {})[target.name] = ExternalProblem(reasons.SECRET_REFUSED, text)
                else:
                    found[id] = credential
        await self._publish(found)
        self._found = found
        before, self._problems = self._problems, problems
        former, self._known = self._known, known
        for key, targets in known.items():
            # The status says of a target that was not among the former ones that its Secret is not read yet.
            if not targets <= former.get(key, frozenset()) or before.get(key) != problems.get(key):
                self._changed(key)

    async def _read(
        self,
        route: ModelRoute,
        target: ExternalTarget,
        read: dict[tuple[str, str], tuple[str | None, Mapping[str, bytes] | None]],
    ) -> tuple[str, Credential] | ExternalProblem | None:
        """The key of one target, or why there is none; None: it needs none, or its host is not allowed."""
        asked, namespace = target.credentials, route.metadata.namespace or ""
        if asked is None or host_problem(target, self._world.config.external.allowed_hosts) is not None:
            return None
        id = credential_id(namespace, asked.name, asked.key)
        at = namespace, asked.name
        if at not in read and len(read) >= MOST_READ:
            text = f"external target {target.name}: the operator reads at most {MOST_READ} Secrets of external targets"
            return ExternalProblem(reasons.SECRET_REFUSED, text)
        if at not in read:
            try:
                read[at] = _content(await self._world.client.get(SECRETS, asked.name, namespace))
            except NotFound:
                read[at] = (None, None)
            except KubeError as error:
                # A target does not lose its key because the API server does not answer.
                if (last := (await self._delivered()).get(id)) is not None:
                    return id, last
                if error.unanswered:
                    raise
                text = f"external target {target.name}: Secret {namespace}/{asked.name} cannot be read: {error.message}"
                return ExternalProblem(reasons.SECRET_REFUSED, text)
        got = credential_of(*read[at], namespace, target)
        return got if isinstance(got, ExternalProblem) else (id, got)

    async def _is_delivered(self, route: ModelRoute, target: ExternalTarget, asked: ExternalCredentials) -> bool:
        """Whether gateways were given a key for the target's host. A target does not count as unused because a new
        leader has not read its Secret yet."""
        try:
            delivered = await self._delivered()
        except KubeError as error:
            if error.unanswered:
                raise
            log.warning("cannot read which keys of external targets gateways have", error=error.message)
            return False
        found = delivered.get(credential_id(route.metadata.namespace or "", asked.name, asked.key))
        _, host, _, _ = place_of(target.url)
        return found is not None and found.host == host

    async def _delivered(self) -> Mapping[str, Credential]:
        """What gateways have, perhaps from a leader before this one. Raises KubeError."""
        if self._found is not None:
            return self._found
        try:
            _, data = _content(await self._world.client.get(SECRETS, names.EXTERNAL_KEYS_SECRET, self._world.namespace))
        except NotFound:
            data = dict[str, bytes]()
        if self._found is None:  # a reading that ended meanwhile knows better
            self._found = {id: found for id, raw in data.items() if (found := read_credential(raw)) is not None}
        return self._found

    async def _publish(self, found: Mapping[str, Credential]) -> None:
        wanted = own_secret(
            self._world.namespace,
            names.EXTERNAL_KEYS_SECRET,
            {id: credential.file() for id, credential in sorted(found.items())},
        )
        if wanted == self._published and (not found or await self._is_there()):
            return
        if self._published is None and not found and not await self._is_there():
            self._published = wanted  # there is nothing to take back
            return
        await self._world.client.apply(SECRETS, wanted, manager=names.MANAGER_MODELROUTE)
        self._published = wanted

    async def _is_there(self) -> bool:
        try:
            await self._world.client.get_metadata(SECRETS, names.EXTERNAL_KEYS_SECRET, self._world.namespace)
        except NotFound:
            return False
        return True


def _in_turn(routes: Iterable[ModelRoute]) -> list[tuple[ModelRoute, ExternalTarget]]:
    """External targets: the first key of each namespace, then each one's second, and so on, those of older routes
    first. So a namespace with many keys takes none from the others."""
    turns: dict[str, dict[tuple[str, str], int]] = {}
    found: list[tuple[int, ModelRoute, ExternalTarget]] = []
    for route in sorted(routes, key=age):
        keys = turns.setdefault(route.metadata.namespace or "", {})
        for target in route.spec.external_targets:
            if (asked := target.credentials) is not None:
                turn = keys.setdefault((asked.name, asked.key), len(keys))
                found.append((turn, route, target))
    found.sort(key=lambda each: each[0])
    return [(route, target) for _, route, target in found]


def _declared(target: ExternalTarget) -> _Declared:
    return _Declared(target.name, target.url, target.credentials)


def _targets(custom: Custom[ModelRoute] | None) -> object:
    return custom.object.spec.external_targets if custom is not None and custom.object is not None else ()


def _content(secret: JsonObject) -> tuple[str | None, Mapping[str, bytes]]:
    """Type and data of a Secret."""
    data: dict[str, Any] = secret.get("data") or {}
    found: dict[str, bytes] = {}
    for name, value in data.items():
        try:
            found[name] = base64.b64decode(value)
        except (binascii.Error, TypeError, ValueError):
            continue
    return secret.get("type"), found
