"""Who may ask a service what, as a function of what the API server says of the caller's token (`api/rights.py`).

Nothing is trusted that a token says of itself. It is read only to refuse early, with the reason, what the API server
would refuse anyway: so a token for the API server itself, or a tenant's API key, is never sent on.
"""

import base64
import binascii
import shlex
from dataclasses import dataclass
from typing import Final, cast

import orjson

from shoal.api.meta import GROUP, JsonObject
from shoal.api.rights import Right, roles_with

LONGEST_TOKEN: Final = 16_384
LONGEST_NAME: Final = 253
"""Of a namespace or a tenant; no name in Kubernetes is longer."""
CLOCKS_DIFFER_SECONDS: Final = 60.0
"""A token is refused as expired by its own word only when it has been for so long."""
LONGEST_LIFE_SECONDS: Final = 3600.0
"""Of an accepted token, from when it was made until it expires. Commands ask for ten minutes, docs/roles.md for an
hour. API servers make longer than asked only tokens of pods for their own audience."""
_LIFE_SLACK_SECONDS: Final = 60.0
_ACCOUNT: Final = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class Claims:
    """What a JWT says of itself, before anybody verified it."""

    audiences: tuple[str, ...]
    made: float | None
    """Seconds since 1970, as is `expires`."""
    expires: float | None


def read_claims(token: str) -> Claims | None:
    """None: it is no JWT."""
    parts = token.split(".")
    if len(token) > LONGEST_TOKEN or len(parts) != 3 or not all(parts):
        return None
    try:
        said: object = orjson.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error):
        return None
    if not isinstance(said, dict):
        return None
    claims = cast("dict[str, object]", said)
    audience = claims.get("aud")
    listed = cast("list[object]", audience) if isinstance(audience, list) else [audience]
    return Claims(
        tuple(each for each in listed if isinstance(each, str)), _number(claims.get("iat")), _number(claims.get("exp"))
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def unfit(token: str, audience: str, now: float) -> str | None:
    """Why a token cannot be for this audience; None: the API server must be asked. `now`: seconds since 1970."""
    if not token:
        return f"a token of a ServiceAccount for audience {audience} is needed"
    if len(token) > LONGEST_TOKEN:
        return f"the token is longer than {LONGEST_TOKEN} characters"
    claims = read_claims(token)
    if claims is None:
        return f"this is no token of a ServiceAccount: one for audience {audience} is needed"
    if audience not in claims.audiences:
        of = ", ".join(each[:100] for each in claims.audiences[:3]) or "none"
        return f"the token is for another audience ({of}), and must be for {audience}"
    if claims.expires is not None and claims.expires + CLOCKS_DIFFER_SECONDS < now:
        return "the token has expired: get another one"
    return too_long(claims)


def too_long(claims: Claims) -> str | None:
    """Why a token is not accepted for the time that it is valid: who was allowed to get it may no longer be. None: it
    is short enough."""
    get = "get one with kubectl create token --duration 10m, or by a projection with expirationSeconds of at most 3600"
    if claims.made is None or claims.expires is None:
        return f"the token does not say when it was made and when it expires (iat, exp): {get}"
    seconds = claims.expires - claims.made
    if seconds <= LONGEST_LIFE_SECONDS + _LIFE_SLACK_SECONDS:
        return None
    return (
        f"the token is valid for {seconds:,.0f} s, and one for at most {LONGEST_LIFE_SECONDS:,.0f} s is accepted: {get}"
    )


def seconds_left(token: str, now: float) -> float:
    """Seconds for which a token that the API server has just verified stays valid, by its own word; never negative."""
    claims = read_claims(token)
    if claims is None or claims.expires is None:
        return 0.0
    return max(0.0, claims.expires - now)


@dataclass(frozen=True, slots=True)
class AccessQuestion:
    """Whether a caller has a right: on everything, or on one namespace or tenant."""

    right: Right
    namespace: str = ""
    tenant: str = ""

    @property
    def attributes(self) -> JsonObject:
        """`resourceAttributes` of a SubjectAccessReview. There, no namespace means every namespace, and no name every
        name."""
        narrowed = {"namespace": self.namespace, "name": self.tenant}
        return {"group": GROUP, "resource": self.right.resource, "verb": self.right.verb} | {
            name: value for name, value in narrowed.items() if value
        }

    def __str__(self) -> str:
        where = f" in namespace {self.namespace}" if self.namespace else ""
        whose = f" of tenant {self.tenant}" if self.tenant else ""
        everywhere = " in all namespaces" if self.right.narrowed == "namespace" and not where else ""
        return f"{self.right.verb} {self.right.resource}.{GROUP}{whose}{where}{everywhere}"


def question(right: Right, *, namespace: str | None = None, tenant: str | None = None) -> AccessQuestion:
    """The question that a call asks: about everything, unless the call names what narrows the right. Raises ValueError
    for a name that nothing in Kubernetes has."""
    for given in (namespace, tenant):
        if given is not None and len(given) > LONGEST_NAME:
            raise ValueError(f"{given[:20]}... is longer than {LONGEST_NAME} characters: no such name exists")
    match right.narrowed:
        case "namespace":
            return AccessQuestion(right, namespace=namespace or "")
        case "tenant":
            return AccessQuestion(right, tenant=tenant or "")
        case "":
            return AccessQuestion(right)


@dataclass(frozen=True, slots=True)
class CallerReview:
    """What the API server said. `user` None: it does not know the token, or not for this audience."""

    user: str | None
    allowed: bool


@dataclass(frozen=True, slots=True)
class CallerVerdict:
    """`refused` None: the caller gets what it asked for, and no more than the question covers."""

    status: int
    refused: str | None = None


def decide(asked: AccessQuestion, review: CallerReview) -> CallerVerdict:
    """Who may ask what."""
    if review.user is None:
        return CallerVerdict(401, "the API server does not know this token, or it has expired: get another one")
    if review.allowed:
        return CallerVerdict(200)
    return CallerVerdict(403, f"{review.user} may not {asked}. {remedy(asked, review.user)}")


def remedy(asked: AccessQuestion, user: str) -> str:
    """What an administrator runs, or what else the caller can do."""
    roles = [f"{role}-account" for role in roles_with(asked.right)]
    grants = (
        f"The ClusterRole{'s' if len(roles) > 1 else ''} {', '.join(roles)} grant{'' if len(roles) > 1 else 's'} it"
    )
    role = next(iter(roles), "")
    kind, where = "clusterrolebinding", ""
    if asked.namespace:
        kind, where = "rolebinding", f" -n {shlex.quote(asked.namespace)}"
    command = f"kubectl{where} create {kind} {role} --clusterrole={role} {_subject(user)}"
    less = ". Or ask for one namespace only (-n)" if asked.right.narrowed == "namespace" and not where else ""
    return f"{grants}. An administrator runs: {command}{less}"


def _subject(user: str) -> str:
    if user.startswith(_ACCOUNT):
        return f"--serviceaccount={user.removeprefix(_ACCOUNT)}"
    return f"--user={shlex.quote(user)}"
