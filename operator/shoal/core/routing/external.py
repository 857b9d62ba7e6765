"""External targets of routes: where a gateway may send requests, with which key, and when a target rests.

A person who writes routes is no administrator of the cluster, and a gateway reaches what that person does not: the
metadata server of the cloud, the API server, other tenants' pods. So a host must be on the installation's list, and the
address that is connected to is checked, not the one that a name had earlier. A key is sent only to the host that its
own Secret names.
"""

import hashlib
import ipaddress
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from shoal.api import reasons
from shoal.api.config import ExternalHost
from shoal.api.modelroute import ExternalTarget, ModelRoute
from shoal.core.capabilities import Capability
from shoal.core.fields.kinds import Facts
from shoal.core.fields.remote import contactable
from shoal.core.hold.limits import Limits
from shoal.core.network import METADATA
from shoal.core.routing.resolve import ServedExternal, ServedModel

SECRET_TYPE: Final = "shoal.dev/external-target"  # noqa: S105 - a type
"""A Secret's type cannot be changed, so nobody can make a key for targets of a Secret that was made for something
else."""
MOST_TOKEN: Final = 4096
"""Bytes of an API key."""
MOST_CREDENTIALS: Final = 128
"""Keys that are delivered to gateways: all of them are in one Secret, of at most 1 MiB."""
FAILURES: Final = 3
"""So many failures in a row, and a target rests."""
FIRST_REST_SECONDS: Final = 5.0
LONGEST_REST_SECONDS: Final = 60.0
BEGIN_SHARE: Final = 0.75
"""Of the time of a stream's request: if it has not begun by then, it goes to a fallback, which has the rest."""
LEFT_SECONDS: Final = 10.0
"""A client that leaves a stream earlier says nothing of a target that has not answered yet."""
MOST_HOPS: Final = 2
"""Gateways of Shoal that may send one request on to external targets: one before a gateway that asks a provider. A
third would do so only where routes of several clusters form a circle."""
DOUBTFUL: Final = frozenset({"declined", "resting_for_tenant"})
"""Outcomes of requests that may themselves be the reason, and not the target."""
NOT_SENT: Final = frozenset({"resting", "full"})
"""Outcomes of requests that a target did not get, because of others. Those that it rests for have counted."""
_OF_TARGET: Final = frozenset({401, 405, 407, 429})
_OF_EITHER: Final = frozenset({402, 403, 404, 408, 409, 425})
_UNKNOWN_STATUS: Final = 403
"""Of an error event that says nothing that is known: it may be about either."""
_WORDS: Final[Mapping[int, tuple[str, ...]]] = {
    400: (
        "invalid_request_error", "badrequesterror", "invalid_argument", "invalid_prompt", "context_length_exceeded",
        "content_filter", "content_policy_violation",
    ),
    401: ("authentication_error", "invalid_api_key", "unauthenticated"),
    402: ("billing_error",),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "notfounderror", "not_found", "model_not_found"),
    413: ("request_too_large",),
    429: ("rate_limit_error", "rate_limit_exceeded", "insufficient_quota", "resource_exhausted"),
    500: (
        "server_error", "api_error", "internal_error", "internal_server_error", "internalservererror", "internal",
        "engine_error",
    ),
    503: ("overloaded_error", "overloaded", "service_unavailable", "serviceunavailableerror", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}  # fmt: skip
"""The statuses for which error events of OpenAI's, Anthropic's and Google's APIs and of engines have words."""
_STATUS_OF: Final = {word: status for status, words in _WORDS.items() for word in words}
Cause = Literal["target", "request", "either"]
_KEY_PREFIXES: Final = {"Bearer": "authorization: Bearer ", "ApiKey": "api-key: ", "XApiKey": "x-api-key: "}
_ABLE: Final[Mapping[str, Capability]] = {
    "/v1/chat/completions": "generate",
    "/v1/completions": "generate",
    "/v1/embeddings": "embed",
    "/v1/messages": "generate",
    "/v1/responses": "generate",
}


class ExternalProblem(NamedTuple):
    """Why gateways do not use an external target."""

    reason: str
    """One of `reasons.py`."""
    message: str


def served_external(route: ModelRoute, target: ExternalTarget) -> ServedModel:
    """An external target as the request path knows it."""
    tls, host, port, path = place_of(target.url)
    credentials = target.credentials
    namespace = route.metadata.namespace or ""
    external = ServedExternal(
        host=host,
        port=port,
        tls=tls,
        base=path.rstrip("/"),
        model=target.model,
        endpoints=frozenset(target.endpoints),
        credential=None if credentials is None else credential_id(namespace, credentials.name, credentials.key),
        key_prefix="" if credentials is None else _KEY_PREFIXES[credentials.auth],
        ca_bundle=target.ca_bundle,
        connect_seconds=float(target.timeouts.connect_seconds),
        first_byte_seconds=float(target.timeouts.first_byte_seconds),
        idle_seconds=float(target.timeouts.idle_seconds),
        most=target.max_concurrent_requests,
    )
    return ServedModel(
        key=route.external_key(target.name),
        uid=f"{route.metadata.uid}/{target.name}",
        engine_name=target.model,
        claims=(),
        created=route.metadata.creation_timestamp,
        capabilities=frozenset(_ABLE[endpoint] for endpoint in target.endpoints),
        facts=Facts(media=frozenset({"image", "audio"}), compiles_tools=False),
        limits=Limits(max_requests=0),
        external=external,
    )


def place_of(url: str) -> tuple[bool, str, int, str]:
    """Whether a target's URL is one of TLS, its host, port and path."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    try:
        port = parts.port
    except ValueError:
        port = 0  # above 65535: no installation allows it
    return tls, parts.hostname or "", (443 if tls else 80) if port is None else port, parts.path


# --- where to -------------------------------------------------------------------------------------------------------


def rule_of(tls: bool, host: str, port: int, allowed: Iterable[ExternalHost]) -> ExternalHost | None:
    """The entry of the installation's list that allows a target; None: none does."""
    return next((one for one in allowed if one.host == host and one.port == port and (tls or one.plain_http)), None)


def host_problem(target: ExternalTarget, allowed: Iterable[ExternalHost]) -> ExternalProblem | None:
    """Why the installation does not allow a target; None: it does."""
    tls, host, port, _ = place_of(target.url)
    allowed = tuple(allowed)
    if rule_of(tls, host, port, allowed) is not None:
        return None
    if not tls and rule_of(True, host, port, allowed) is not None:
        text = f"external target {target.name}: plain HTTP to {host} is not allowed; use https"
    else:
        text = (
            f"external target {target.name}: the installation does not allow {host} at port {port}; whoever runs it "
            "can add the host to the chart value gateway.external.allowedHosts"
        )
    return ExternalProblem(reasons.EXTERNAL_NOT_ALLOWED, text)


def connectable(address: str, networks: Iterable[str]) -> bool:
    """Whether a gateway may connect to this address of an allowed host: a public one, or one of the networks that the
    installation names for the host. Never to the gateway itself, and to no link-local address or metadata server."""
    if contactable(address):
        return True
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            return False
        found = found.ipv4_mapped or found
    if (
        found.is_link_local
        or found.is_loopback
        or found.is_multicast
        or found.is_unspecified
        or (found.version == 4 and found.is_reserved)
        or found in METADATA
    ):
        return False
    return any(
        network.version == found.version and found in network
        for network in (ipaddress.ip_network(one, strict=False) for one in networks)
    )


def hops_of(header: bytes | None) -> int:
    """How many gateways of Shoal have sent a request on, by its header `names.HEADER_HOPS`. A client can write there
    what it likes: a larger number ends its own request, and a smaller one is what every client has."""
    if header is None or not header.isdigit():
        return 0
    return min(MOST_HOPS, int(header[:9]))


# --- keys -----------------------------------------------------------------------------------------------------------


class Credential(NamedTuple):
    """A key, and where it may go. Never logged: hence no representation."""

    host: str
    token: str

    def __repr__(self) -> str:
        return f"Credential(host={self.host!r})"

    def file(self) -> str:
        """As it is delivered to gateways."""
        return json.dumps({"host": self.host, "token": self.token})


def credential_id(namespace: str, secret: str, key: str) -> str:
    """Name of a key among those that are delivered. The namespace is the route's own: a route cannot name a Secret of
    another one."""
    return hashlib.sha256(f"{namespace}\0{secret}\0{key}".encode()).hexdigest()[:32]


def read_credential(raw: bytes) -> Credential | None:
    """What `Credential.file` wrote; None: it is something else."""
    try:
        found: Any = json.loads(raw)
        host, token = found["host"], found["token"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(host, str) or not isinstance(token, str) or not _is_token(token):
        return None
    return Credential(host, token)


def credential_of(
    type: str | None, data: Mapping[str, bytes] | None, namespace: str, target: ExternalTarget
) -> Credential | ExternalProblem:
    """The key in a Secret, of `type` and with `data` (None: there is no such Secret), or why a gateway does not get
    it. Messages contain nothing of the Secret's content."""
    asked = target.credentials
    assert asked is not None  # noqa: S101 - the caller
    _, host, _, _ = place_of(target.url)
    where = f"external target {target.name}: Secret {namespace}/{asked.name}"
    if data is None:
        return ExternalProblem(
            reasons.SECRET_NOT_FOUND,
            f"{where} does not exist. Create it: kubectl create secret generic {asked.name} --type={SECRET_TYPE} "
            f"--from-literal=host={host} --from-literal={asked.key}=KEY",
        )
    if type != SECRET_TYPE:
        return _refused(f"{where} is not of type {SECRET_TYPE}, so it was not made to be sent to another host")
    if data.get("host", b"").decode("utf-8", "replace").strip() != host:
        return _refused(f"{where} is not for {host}: its key `host` must name the one host that may get it")
    try:
        token = data.get(asked.key, b"").decode().strip()
    except UnicodeDecodeError:
        token = ""
    if not _is_token(token):
        return _refused(f"{where} has no API key in `{asked.key}`: 1 to {MOST_TOKEN} visible ASCII characters")
    return Credential(host, token)


def _refused(text: str) -> ExternalProblem:
    return ExternalProblem(reasons.SECRET_REFUSED, text)


def _is_token(text: str) -> bool:
    # It becomes part of a header: a line break would begin another one.
    return 0 < len(text) <= MOST_TOKEN and all("!" <= letter <= "~" for letter in text)


# --- when not -------------------------------------------------------------------------------------------------------


def cause_of(status: int) -> Cause:
    """What an error of an external target is about. `target`: its key, its limits, its state. `request`: what the
    client sent. `either`: providers answer so where the key has no rights, no credit or no such model, and also where
    they object to a prompt, or where no model of theirs does what the request asks for."""
    if status in _OF_EITHER:
        return "either"
    return "target" if status >= 500 or status in _OF_TARGET else "request"


def status_of_event(event: Mapping[str, object]) -> int:
    """The status for which an error event in a stream stands, by its code, else by its type. The answer's own status
    was 200 by then. An error that is not known gets one that may be about either."""
    error = event.get("error") or event.get("response")
    if isinstance(error, dict) and isinstance(inner := cast(Mapping[str, object], error).get("error"), dict):
        error = cast(Mapping[str, object], inner)  # of a response that failed
    fields = cast(Mapping[str, object], error) if isinstance(error, dict) else event
    for name in ("code", "status", "type"):
        value = fields.get(name)
        if isinstance(value, str):
            value = (
                int(value) if value.isascii() and value.isdigit() and len(value) == 3 else _STATUS_OF.get(value.lower())
            )
        if isinstance(value, int) and 400 <= value <= 599:
            return value
    return _UNKNOWN_STATUS


def begins_within(first_byte_seconds: float, left: float, whole: float, *, leaves: bool) -> float:
    """Seconds within which the answer of a target has to begin. `left`: seconds of the request's `whole` time that are
    left. `leaves`: it is a stream that can go to a fallback; it does so before the end of its time, where the target
    had most of it. A whole answer may come at the end."""
    return min(first_byte_seconds, left * BEGIN_SHARE) if leaves and left >= whole / 2 else first_byte_seconds


def cause_of_silence(waited: float, left: float, whole: float, *, stream: bool, client_left: bool) -> Cause | None:
    """What it is about that a target had not begun to answer after `waited` seconds, when the client left or the time
    of the request was over; None: it says nothing. `left`: seconds of the request's `whole` time that were left when
    it was sent. A whole answer may be a long one, and a client leaves when it likes."""
    if client_left:
        return "either" if stream and waited >= LEFT_SECONDS else None
    if left < whole / 2:
        return None  # targets before it took most of the time
    return "target" if stream else "either"


class TargetHealth:
    """The last failures of one external target at one gateway. After a few in a row it rests, so that requests go to a
    fallback at once and not after a timeout each; then one request at a time tries it. Answers of which the cause may
    be the request are kept apart, for each tenant: they let the target rest for that tenant only."""

    __slots__ = ("_failures", "_until")

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def take(self, now: float) -> float:
        """Seconds until the target may be tried; 0: this request may try it. `now` in seconds of any clock."""
        rest = self.seconds_left(now)
        if not rest and self._failures >= FAILURES:
            self._until = now + FIRST_REST_SECONDS  # the others wait for what this one finds
        return rest

    def seconds_left(self, now: float) -> float:
        """The same, for a request that does not try it."""
        return max(0.0, self._until - now)

    def rests(self, now: float) -> bool:
        """Whether a request would be refused now."""
        return now < self._until

    def answered(self) -> bool:
        """Returns whether it had failed repeatedly before."""
        before, self._failures, self._until = self._failures, 0, 0.0
        return before >= FAILURES

    def failed(self, now: float, retry_after: float | None = None) -> bool:
        """`retry_after`: seconds that the target asked for; it rests for so long, within bounds. Returns whether it is
        the failure with which the target has failed repeatedly."""
        self._failures += 1
        if retry_after is not None:
            self._until = max(self._until, now + min(max(retry_after, 1.0), LONGEST_REST_SECONDS))
        elif self._failures >= FAILURES:
            rest = FIRST_REST_SECONDS * 2.0 ** min(self._failures - FAILURES, 8)
            self._until = now + min(rest, LONGEST_REST_SECONDS)
        return self._failures == FAILURES


def retry_after_of(value: bytes, now: datetime) -> float | None:
    """Seconds of a header Retry-After, as a number or a date; None: it says nothing."""
    text = value[:64].decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return float(int(text[:9]))
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())
