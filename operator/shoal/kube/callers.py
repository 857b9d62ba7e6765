"""Callers of a service who prove themselves by a Kubernetes token for the service's audience.

TokenReview says whose the token is, SubjectAccessReview whether that has the right; `core/callers.py` decides. Verdicts
are kept for a minute at most, never beyond the token's own expiry, and none is used while the API server is away.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from shoal.api.rights import Right
from shoal.core.callers import AccessQuestion, CallerReview, decide, question, read_claims, seconds_left, unfit
from shoal.kube.access import ACCESSREVIEWS, FRESH_SECONDS, AccessVerdict, MayNotAsk, TokenReviews, access_spec
from shoal.kube.client import KubeClient


class Callers(TokenReviews[AccessQuestion]):
    """`may` returns whether the owner of a token has a right."""

    role = "shoal-reviews"

    def __init__(
        self,
        client: KubeClient,
        audience: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall` gives seconds since 1970, as tokens count."""
        super().__init__(client, clock)
        self.audience = audience
        self._wall = wall

    def understands(self, given: str) -> bool:
        """Whether this is a token of Kubernetes at all, and not a key of Shoal or of a tenant."""
        return read_claims(given) is not None

    def meant(self, given: str) -> bool:
        """Whether it says that it is for this audience."""
        claims = read_claims(given)
        return claims is not None and self.audience in claims.audiences

    async def may(
        self, token: str, right: Right, *, namespace: str | None = None, tenant: str | None = None
    ) -> AccessVerdict:
        """401 for a token that proves nothing, 403 without the right, 503 while the API server cannot say."""
        if (why := unfit(token, self.audience, self._wall())) is not None:
            return AccessVerdict(401, why)
        try:
            asked = question(right, namespace=namespace, tenant=tenant)
        except ValueError as error:
            return AccessVerdict(400, str(error))
        return await self.check(token, asked)

    async def _review(self, token: str, about: AccessQuestion) -> AccessVerdict:
        user = await self._user(token, self.audience)
        if user is None:
            found = decide(about, CallerReview(None, False))
            return AccessVerdict(found.status, found.refused or "")
        name = str(user["username"])
        said = await self._status(ACCESSREVIEWS, access_spec(user) | {"resourceAttributes": about.attributes})
        found = decide(about, CallerReview(name, said.get("allowed") is True))
        return AccessVerdict(found.status, found.refused or "", user=name)

    def _away(self, error: Exception) -> AccessVerdict:
        found = super()._away(error)
        return (
            replace(found, message=f"{found.message} where rbac.roles.enabled is true")
            if isinstance(error, MayNotAsk)
            else found
        )

    def _lasts(self, token: str, about: AccessQuestion) -> tuple[float, float]:
        seconds = min(FRESH_SECONDS, seconds_left(token, self._wall()))
        return seconds, seconds
