"""External targets of routes as this gateway reaches them: addresses, connections, keys, and which of them rest.

A name is resolved here, every address of it is checked, and the connection goes to an address that was checked: a name
that means something else a moment later changes nothing. Redirects are not followed, no proxy is used, and a server's
certificate must be one for the name.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

import structlog

from shoal.api.config import ExternalHost
from shoal.core.routing.external import (
    DOUBTFUL,
    MOST_CREDENTIALS,
    Credential,
    TargetHealth,
    connectable,
    read_credential,
    rule_of,
)
from shoal.core.routing.resolve import ServedExternal, ServedModel
from shoal.core.routing.routes import DeclaredRoute
from shoal.gateway.connections import Pool
from shoal.gateway.mediafetch import MediaResolver, Resolve
from shoal.gateway.upstream import AbortHandle, ConnectFailed, RequestBody, UpstreamAddress, UpstreamAnswer

log = structlog.get_logger()

_NAME_SECONDS: Final = 30.0
"""How long a checked address of a name is used."""
_IDLE_SECONDS: Final = 4.0
"""How long an idle connection is kept: shorter than usual servers keep theirs (5 s and more), because a request that
meets the end of its connection may have been read, and is not sent again."""
_MOST_ADDRESSES: Final = 8
_TRIED: Final = 3
"""Addresses of a host that one request tries."""
_MOST_FILE: Final = 16 * 1024


class ExternalUnusable(Exception):
    """An external target cannot take the request. `outcome` is the label of the metric, `text` is for the client: it
    names no host. `failure`: it counts as one of the target."""

    def __init__(
        self, outcome: str, text: str, *, retry_after: float | None = None, failure: bool = True, sent: bool = False
    ) -> None:
        super().__init__(text)
        self.outcome, self.text, self.retry_after, self.failure = outcome, text, retry_after, failure
        self.sent = sent
        """It may have computed something."""


@dataclass(slots=True)
class _State:
    health: TargetHealth
    declined: dict[str, TargetHealth] = field(default_factory=dict[str, TargetHealth])
    """By tenant whose last requests it has declined."""
    running: int = 0
    failure: str | None = None
    """Outcome of the last request; None: it was answered, or there was none."""
    ended: float | None = None
    """When the last request came to something (the loop's time)."""

    def note(self, now: float, failure: str | None) -> None:
        self.failure, self.ended = failure, now


class ExternalView(NamedTuple):
    """What this gateway knows of an external target. Fields are those of `routestats.ExternalStats`."""

    target: str
    state: Literal["Unused", "NotAsked", "Answers", "Fails"]
    reason: str | None
    seconds_ago: float | None
    rests: bool
    running: int


@dataclass(frozen=True, slots=True)
class _Names:
    addresses: tuple[str, ...]
    until: float


class _Trust:
    """Which certificates an external server may have."""

    def __init__(self, bundle: str | None) -> None:
        self._context = ssl.create_default_context(cadata=bundle)

    def client(self) -> ssl.SSLContext:
        return self._context


class CredentialFiles:
    """The keys of external targets, from the mounted Secret that the operator writes. None: none is mounted."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._seen: object = None
        self._found: dict[str, Credential] = {}

    def get(self, id: str) -> Credential | None:
        return self._found.get(id)

    def refresh(self) -> None:
        """Reads the files again when they have changed."""
        if self._directory is None:
            return
        try:
            files = [path for path in sorted(self._directory.iterdir()) if not path.name.startswith(".")]
            seen = [(path.name, (stat := path.stat()).st_mtime_ns, stat.st_ino) for path in files]
            if seen == self._seen:
                return
            found: dict[str, Credential] = {}
            for path in files[:MOST_CREDENTIALS]:
                credential = read_credential(path.read_bytes()[:_MOST_FILE])
                if credential is None:
                    log.warning("a key of an external target is not understood", file=path.name)
                else:
                    found[path.name] = credential
        except OSError as error:
            if self._seen is not None or self._found:
                log.warning("cannot read the keys of external targets; keeping those before", error=error.strerror)
            return
        self._seen, self._found = seen, found
        log.info("keys of external targets", count=len(found))


class Externals:
    """`resolve` and `connectable` are replaced by tests: a name's addresses, and which of them may be called."""

    def __init__(
        self,
        allowed: Sequence[ExternalHost] = (),
        keys: CredentialFiles | None = None,
        *,
        resolve: Resolve | None = None,
        connectable: Callable[[str, Iterable[str]], bool] = connectable,
    ) -> None:
        self._allowed = tuple(allowed)
        self.keys = keys or CredentialFiles(None)
        self._own_resolver = MediaResolver()
        self._resolve = resolve or self._own_resolver
        self._connectable = connectable
        self._states: dict[tuple[str, ServedExternal], _State] = {}
        self._names: dict[str, _Names] = {}
        self._pools: dict[tuple[str | None, float], Pool] = {}
        self._known: list[tuple[str, ServedExternal]] = []
        """Every target of a route."""
        self._loop = asyncio.get_running_loop()

    def observe(self) -> list[ExternalView]:
        """What is known of every external target of a route."""
        now, found = self._loop.time(), list[ExternalView]()
        for key, external in self._known:
            missing = "its host is not allowed" if self._rule(external) is None else self._token_problem(external)
            state = self._states.get((key, external))
            ended = None if state is None or state.ended is None else max(0.0, now - state.ended)
            if missing:
                view = ExternalView(key, "Unused", missing, None, False, 0)
            elif state is None or ended is None:
                view = ExternalView(key, "NotAsked", None, None, False, 0 if state is None else state.running)
            else:
                known = "Answers" if state.failure is None else "Fails"
                view = ExternalView(key, known, state.failure, ended, state.health.rests(now), state.running)
            found.append(view)
        return found

    def permitted(self, model: ServedModel) -> bool:
        """Whether the installation allows the target's host, and its key is here; also if it is no external target."""
        external = model.external
        return external is None or (self._rule(external) is not None and not self._token_problem(external))

    def usable(self, model: ServedModel, tenant: str) -> bool:
        """Whether a request of the tenant would be sent there now."""
        external = model.external
        if external is None or not self.permitted(model):
            return False
        state = self._states.get((model.key, external))
        own = None if state is None else state.declined.get(tenant)
        return not self.rests(model) and (own is None or not own.rests(self._loop.time()))

    def rests(self, model: ServedModel) -> bool:
        """Whether a request of any tenant would be refused now: the target rests, or has as many as it may get."""
        external = model.external
        state = None if external is None else self._states.get((model.key, external))
        if external is None or state is None:
            return False
        return state.health.rests(self._loop.time()) or state.running >= external.most

    @asynccontextmanager
    async def place(self, key: str, external: ServedExternal, tenant: str) -> AsyncGenerator[None]:
        """Counts a tenant's request to a target, and notes how it went: the body raises ExternalUnusable if it failed.

        Raises:
            ExternalUnusable: nothing may be sent there now.
        """
        if self._rule(external) is None:
            raise ExternalUnusable("not_allowed", "its external target is not allowed here", failure=False)
        if problem := self._token_problem(external):
            raise ExternalUnusable("no_credentials", problem, failure=False)
        state = self._states.setdefault((key, external), _State(TargetHealth()))
        if state.running >= external.most:
            text = "its external target has as many requests as it may get"
            raise ExternalUnusable("full", text, retry_after=2.0, failure=False)
        now, own = self._loop.time(), state.declined.get(tenant)
        # Who tries it for the tenant is chosen only where the request is then sent.
        if rest := state.health.seconds_left(now):
            text = "its external target failed repeatedly, or asked for a pause"
            raise ExternalUnusable("resting", text, retry_after=rest, failure=False)
        if own is not None and (rest := own.take(now)):
            text = "its external target declined your last requests, or did not answer them in time"
            raise ExternalUnusable("resting_for_tenant", text, retry_after=rest, failure=False)
        state.health.take(now)
        state.running += 1
        try:
            yield
        except ExternalUnusable as unusable:
            if unusable.failure:
                self.failed(key, external, tenant, unusable.outcome, unusable.retry_after)
            raise
        finally:
            state.running -= 1

    def answered(self, key: str, external: ServedExternal, tenant: str) -> None:
        """The target has answered a request of the tenant."""
        if (state := self._states.get((key, external))) is None:
            return
        state.declined.pop(tenant, None)
        state.note(self._loop.time(), None)
        if state.health.answered():
            log.info("an external target answers again", target=key)

    def failed(
        self,
        key: str,
        external: ServedExternal,
        tenant: str,
        outcome: str,
        retry_after: float | None = None,
        *,
        doubtful: bool = False,
    ) -> None:
        """A request of the tenant failed at the target, or its answer did after it had begun. `doubtful`: the request
        or its client may be the reason, as for the outcomes of `DOUBTFUL`."""
        if (state := self._states.get((key, external))) is None:
            return
        now = self._loop.time()
        state.note(now, outcome)
        if doubtful or outcome in DOUBTFUL:
            if state.declined.setdefault(tenant, TargetHealth()).failed(now):
                log.warning("an external target fails for a tenant", target=key, tenant=tenant, reason=outcome)
        elif state.health.failed(now, retry_after):
            log.warning("an external target fails repeatedly", target=key, reason=outcome)

    def token(self, external: ServedExternal) -> str | None:
        """The key to send; None: none is sent."""
        found = None if external.credential is None else self.keys.get(external.credential)
        return None if found is None or found.host != external.host else found.token

    async def start(
        self, external: ServedExternal, head: bytes, body: RequestBody, abort: AbortHandle
    ) -> UpstreamAnswer:
        """Sends a request once and returns when the head of its answer has arrived. Another address is tried only where
        there was no connection: a provider that computed an answer and closed without a byte of it may be paid twice.

        Raises:
            ExternalUnusable: the host has no address that may be called.
            UpstreamError: as of `Upstream.start`.
        """
        addresses = await self._addresses(external)
        pool = await self._pool(external)
        name = external.host if external.tls else None
        for number, address in enumerate(addresses[:_TRIED], 1):
            target = UpstreamAddress(address, external.port, name)
            try:
                return await pool.start(target, head, body, abort)
            except ConnectFailed:
                if number == min(len(addresses), _TRIED):
                    self._names.pop(external.host, None)
                    raise
        raise ConnectFailed("no address")

    def follow(self, routes: Iterable[DeclaredRoute]) -> None:
        """Keeps what belongs to the external targets of these routes."""
        known = {
            (key, model.external)
            for route in routes
            for key, model in route.externals.items()
            if model.external is not None
        }
        self._known = sorted(known, key=lambda one: one[0])
        self._states = {at: state for at, state in self._states.items() if at in known or state.running}
        bundles = {external.ca_bundle for _, external in known}
        for at in [at for at in self._pools if at[0] not in bundles]:
            self._pools.pop(at).close()

    def sweep(self) -> None:
        """Closes idle connections, and reads the keys; call it about once a second."""
        self.keys.refresh()
        for pool in self._pools.values():
            pool.sweep()

    def close(self) -> None:
        self._own_resolver.close()
        for pool in self._pools.values():
            pool.close()

    def _rule(self, external: ServedExternal) -> ExternalHost | None:
        return rule_of(external.tls, external.host, external.port, self._allowed)

    def _token_problem(self, external: ServedExternal) -> str:
        if external.credential is None or self.token(external) is not None:
            return ""
        return "the key of its external target has not arrived at this gateway"

    async def _addresses(self, external: ServedExternal) -> tuple[str, ...]:
        """Checked addresses of the host."""
        rule = self._rule(external)
        known = self._names.get(external.host)
        if known is None or known.until < self._loop.time():
            try:
                async with asyncio.timeout(external.connect_seconds):
                    found = await self._resolve(external.host)
            except TimeoutError:
                raise ConnectFailed("the name was not resolved in time") from None
            except OSError:
                raise ConnectFailed("the name has no address") from None
            addresses = tuple(dict.fromkeys(each.host for each in found))[:_MOST_ADDRESSES]
            known = _Names(addresses, self._loop.time() + _NAME_SECONDS)
            self._names[external.host] = known
        networks = () if rule is None else rule.networks
        if rule is None or not all(self._connectable(address, networks) for address in known.addresses):
            # One forbidden address among them is a name that lies.
            log.warning("an external target has an address that is not allowed", host=external.host)
            text = "the address of its external target is not allowed"
            raise ExternalUnusable("address_not_allowed", text)
        if not known.addresses:
            raise ConnectFailed("the name has no address")
        return known.addresses

    async def _pool(self, external: ServedExternal) -> Pool:
        at = (external.ca_bundle, external.connect_seconds)
        if at not in self._pools:
            try:
                trust = await asyncio.to_thread(_Trust, external.ca_bundle)
            except (ssl.SSLError, ValueError):
                raise ExternalUnusable("bad_ca_bundle", "the caBundle of its external target is not readable") from None
            if at not in self._pools:
                self._pools[at] = Pool(
                    keep_alive=_IDLE_SECONDS,
                    connect_timeout=external.connect_seconds,
                    credentials=trust,
                    outside=True,
                )
        return self._pools[at]
