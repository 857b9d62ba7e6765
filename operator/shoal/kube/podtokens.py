"""From which pod a caller comes: by the token that the kubelet makes for a pod and one audience, bound to that pod.

TokenReview says whose it is. A token that was proven stays proven until its own expiry: it cannot become another pod's,
and an hour of an API server that does not answer must not stop what it proves. The price: the token of a pod that is
deleted counts until then.
"""

import time
from collections.abc import Callable
from typing import Final, cast

from shoal.api.meta import JsonObject
from shoal.core.callers import read_claims, too_long
from shoal.kube.access import FRESH_SECONDS, AccessVerdict, MayNotAsk, TokenReviews
from shoal.kube.client import KubeClient

POD_NAME: Final = "authentication.kubernetes.io/pod-name"
"""In `status.user.extra` of a token that is bound to a pod."""


class PodTokens(TokenReviews[str]):
    """Knows the pods of one ServiceAccount by tokens for one audience. `pod_of` gives a verdict that names the pod."""

    role = "shoal-ledger-senders"

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        account: str,
        audience: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall` gives seconds since 1970, as tokens count."""
        super().__init__(client, clock)
        self._username = f"system:serviceaccount:{namespace}:{account}"
        self._audience = audience
        self._wall = wall

    async def pod_of(self, token: str) -> AccessVerdict:
        """403 for every token that proves nothing, 503 while the API server cannot say."""
        return await self.check(token, self._audience)

    async def _review(self, token: str, about: str) -> AccessVerdict:
        user = await self._user(token, about)
        if user is None:
            return AccessVerdict(403, f"the API server does not know the pod's token, or not for audience {about}")
        if user["username"] != self._username:
            return AccessVerdict(403, f"the pod's token is of {user['username']}, and must be of {self._username}")
        extra = cast("JsonObject", user.get("extra") or {})
        pods = cast("list[str]", extra.get(POD_NAME) or [])
        if len(pods) != 1 or not pods[0]:
            return AccessVerdict(403, "the token is bound to no pod: it must be one that the kubelet projects")
        claims = read_claims(token)
        if claims is None or too_long(claims) is not None:
            return AccessVerdict(403, "the pod's token is valid for more than an hour, and must be projected for one")
        return AccessVerdict(200, pod=pods[0])

    def _no_token(self) -> AccessVerdict:
        return AccessVerdict(403, f"a token of the pod for audience {self._audience} is needed")

    def _away(self, error: Exception) -> AccessVerdict:
        why = error.lacks(self.role) if isinstance(error, MayNotAsk) else type(error).__name__
        return AccessVerdict(503, f"the API server cannot say whose the pod's token is ({why})")

    def _lasts(self, token: str, about: str) -> tuple[float, float]:
        seconds = _seconds_left(token, self._wall())
        return seconds, seconds


def _seconds_left(token: str, now: float) -> float:
    """Seconds until the token expires. Its own expiry is trusted, since the API server has just verified it. Never less
    than FRESH_SECONDS and never more than the token's whole life, whatever this machine's clock says."""
    claims = read_claims(token)
    if claims is None or claims.made is None or claims.expires is None:
        return FRESH_SECONDS
    return max(FRESH_SECONDS, min(claims.expires - now, claims.expires - claims.made))
