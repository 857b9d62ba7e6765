"""Who may read a process's pages: the caller's Kubernetes token, judged by the API server.

TokenReview says whose the token is, SubjectAccessReview whether that may `get` the path, as a non-resource URL: what
kube-rbac-proxy and controller-runtime do. A Prometheus sends the token of its ServiceAccount, `kubectl shoal why` one
that it asked for. Verdicts are kept for a minute, so a right that was taken away lasts that long. A reader of metrics
stays in for ten minutes while the API server does not answer, because that is when its metrics are looked at; nobody
else does. Everything is bounded: callers without rights cost the API
server at most RATE calls a second, whatever they send, and push out nobody who was let in.

What a token proves beyond that is asked by the same `TokenReviews`: from which pod it comes (`podtokens.py`), or a
right on what a service tells (`kube/callers.py`).
"""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar, cast

import structlog

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core.callers import LONGEST_TOKEN, read_claims, too_long
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, Forbidden, KubeError
from shoal.kube.resources import Resource

FRESH_SECONDS: Final = 60.0
STALE_SECONDS: Final = 600.0
"""Of METRICS alone."""
METRICS: Final = "/metrics"
DENIED_SECONDS: Final = 10.0
REVIEW_SECONDS: Final = 5.0
"""For both questions together: a scrape waits no longer."""
MOST_KEPT: Final = 256
"""Callers who were let in, and as many who were not."""
MOST_ASKING: Final = 16
RATE: Final = 5.0
"""Questions on unknown callers, per second."""
BURST: Final = 20.0

TOKENREVIEWS: Final = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESSREVIEWS: Final = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)

log = structlog.get_logger()

A = TypeVar("A", bound=Hashable)
"""What is asked about a caller."""
Key = tuple[bytes, Hashable]


@dataclass(frozen=True, slots=True)
class AccessVerdict:
    """200: let in. Otherwise the status and the sentence of the refusal."""

    status: int
    message: str = ""
    pod: str = ""
    """From which pod the token comes, where that was asked."""
    user: str = ""
    """Whose the token is, where that was asked."""
    unanswered: bool = False
    """The API server did not answer."""

    @property
    def allowed(self) -> bool:
        return self.status == 200

    @property
    def headers(self) -> dict[str, str]:
        """Of the refusal."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "2"} if self.status == 503 else {}


ALLOWED: Final = AccessVerdict(200)
NO_TOKEN: Final = AccessVerdict(401, "a Kubernetes token is needed, as a bearer token")
BAD_TOKEN: Final = AccessVerdict(401, "the API server does not know this token")
BUSY: Final = AccessVerdict(503, "too many callers with unknown tokens: try again in a moment")
AWAY: Final = AccessVerdict(503, "the API server, which knows who may read this, does not answer", unanswered=True)

BROKEN: Final = AccessVerdict(503, "the API server, which knows who may read this, answers with an error")


def token_of(headers: Mapping[str, str]) -> str:
    """The bearer token, by lower-case names of headers. Through the API server's proxy it comes as x-shoal-key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get(names.HEADER_KEY, "").strip()


class _Kept(NamedTuple):
    """Of a caller who was let in: until when nobody is asked again, and until when it stays in while the API server
    does not answer. By the clock of `TokenReviews`."""

    verdict: AccessVerdict
    fresh: float
    stale: float


class MayNotAsk(KubeError):
    """403 to a review: the right to it is missing. `what` is its resource with its group."""

    def __init__(self, what: str, error: Forbidden) -> None:
        super().__init__(error.message, status=error.status, reason=error.reason)
        self.what = what

    def lacks(self, role: str) -> str:
        """What is missing, for the caller. `role`: the ClusterRole that has the right."""
        return (
            f"its ServiceAccount may not create {self.what}, it needs the ClusterRole {role}, which the chart makes "
            "and binds"
        )


class TokenReviews(ABC, Generic[A]):
    """Verifies callers' tokens at the API server and caches the verdicts; the number of both is bounded. A token is
    cached by its hash. `role`: the chart's ClusterRole by which this process may do so."""

    role: ClassVar[str]

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._allowed: OrderedDict[Key, _Kept] = OrderedDict()
        self._denied: OrderedDict[Key, tuple[float, AccessVerdict]] = OrderedDict()
        self._asking: dict[Key, asyncio.Task[AccessVerdict]] = {}
        self._tokens, self._filled = BURST, clock()
        self._forbidden = False
        """The API server said last that this process may not ask."""

    async def check(self, token: str, about: A) -> AccessVerdict:
        """Whether the owner of this token is allowed `about`."""
        if not token or len(token) > LONGEST_TOKEN:
            return self._no_token()
        key = hashlib.sha256(token.encode(errors="replace")).digest(), about
        now = self._clock()
        kept = self._allowed.get(key)
        if kept is not None and now < kept.fresh:
            return kept.verdict
        if kept is None and (refused := self._denied.get(key)) is not None and now < refused[0]:
            return refused[1]
        asking = self._asking.get(key)
        if asking is None:
            # Who was let in before is asked about in any case, so that strangers cannot crowd it out.
            if kept is None and (len(self._asking) >= MOST_ASKING or not self._take_token(now)):
                return BUSY
            asking = self._asking[key] = asyncio.create_task(self._ask_server(key, token, about))
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        verdict = await asyncio.shield(asking)
        if verdict.unanswered and kept is not None and now < kept.stale:
            return kept.verdict
        return verdict

    @abstractmethod
    async def _review(self, token: str, about: A) -> AccessVerdict:
        """What the API server says now. Raises KubeError."""

    def _no_token(self) -> AccessVerdict:
        return NO_TOKEN

    def _away(self, error: Exception) -> AccessVerdict:
        """The API server could not be asked: a verdict with status 503."""
        if isinstance(error, MayNotAsk):
            return AccessVerdict(503, f"this service may not ask the API server who calls: {error.lacks(self.role)}")
        return AWAY if isinstance(error, TimeoutError | APIServerUnavailable) else BROKEN

    def _lasts(self, token: str, about: A) -> tuple[float, float]:
        """For how many seconds a token that was let in is fresh, and stays in while the API server is away."""
        del token, about
        return FRESH_SECONDS, FRESH_SECONDS

    def _take_token(self, now: float) -> bool:
        self._tokens = min(BURST, self._tokens + (now - self._filled) * RATE)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _ask_server(self, key: Key, token: str, about: A) -> AccessVerdict:
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                verdict = await self._review(token, about)
        except (KubeError, TimeoutError) as error:
            if isinstance(error, MayNotAsk) and not self._forbidden:
                self._forbidden = True
                log.error("access.may_not_ask", missing=f"create {error.what}", role=self.role, problem=error.message)
            return self._away(error)
        self._forbidden = False
        now = self._clock()
        self._allowed.pop(key, None)
        self._denied.pop(key, None)
        if verdict.allowed:
            fresh, stale = self._lasts(token, about)
            self._allowed[key] = _Kept(verdict, now + fresh, now + stale)
        else:
            self._denied[key] = now + DENIED_SECONDS, verdict
        for kept in (self._allowed, self._denied):
            while len(kept) > MOST_KEPT:
                kept.popitem(last=False)
        return verdict

    async def _user(self, token: str, audience: str | None = None) -> JsonObject | None:
        """Whose the token is (`status.user`); None where the API server does not know it, or not for this audience.
        Raises KubeError."""
        spec: JsonObject = {"token": token} if audience is None else {"token": token, "audiences": [audience]}
        status = await self._status(TOKENREVIEWS, spec)
        user = cast("JsonObject", status.get("user") or {})
        if not status.get("authenticated") or not user.get("username"):
            return None
        # An authenticator that knows nothing of audiences names none: such a token is for the API server itself.
        if audience is not None and audience not in (status.get("audiences") or []):
            return None
        return user

    async def _status(self, resource: Resource, spec: JsonObject) -> JsonObject:
        review: JsonObject = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {},
            "spec": spec,
        }
        try:
            answer = await self._client.create(resource, review)
        except Forbidden as error:
            raise MayNotAsk(f"{resource.plural}.{resource.group}", error) from None
        return cast("JsonObject", answer.get("status") or {})


def access_spec(user: JsonObject) -> JsonObject:
    """The part of a SubjectAccessReview's spec that says who, from `status.user` of a TokenReview."""
    return {
        "user": user["username"],
        "groups": user.get("groups") or [],
        "uid": user.get("uid") or "",
        "extra": user.get("extra") or {},
    }


class Access(TokenReviews[str]):
    """Access of callers to one process: `check` returns whether the owner of a token may `get` a path.

    People get tokens of the ServiceAccount DECISIONS_ACCOUNT: those have to be short, because the right to get one may
    be taken away. A program's token may be long: its rights are those of its own account."""

    role = "shoal-access"

    async def _review(self, token: str, about: str) -> AccessVerdict:
        if (user := await self._user(token)) is None:
            return BAD_TOKEN
        if _shared(str(user["username"])):
            claims = read_claims(token)
            if (why := BAD_TOKEN.message if claims is None else too_long(claims)) is not None:
                return AccessVerdict(401, why)
        spec = access_spec(user) | {"nonResourceAttributes": {"path": about, "verb": "get"}}
        if (await self._status(ACCESSREVIEWS, spec)).get("allowed") is True:
            return ALLOWED
        return AccessVerdict(403, f"{user['username']} may not get {about}: see the ClusterRole shoal-metrics-reader")

    def _lasts(self, token: str, about: str) -> tuple[float, float]:
        return FRESH_SECONDS, STALE_SECONDS if about == METRICS else FRESH_SECONDS


def _shared(username: str) -> bool:
    """Whether people get tokens of this user."""
    return username.startswith("system:serviceaccount:") and username.endswith(f":{names.DECISIONS_ACCOUNT}")
