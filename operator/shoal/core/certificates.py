"""When certificates and their authority are renewed: pure decisions, each with its reason.

An authority changes in steps, so that no peer ever meets a certificate whose authority it does not trust yet:

    prepare   the next authority is made, or taken over, and every process trusts it beside the current one
    promote   after OVERLAP it signs; the one before stays trusted
    forget    once no certificate of it can be valid any more, it is trusted no longer
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from shoal.core.facts import Pod

OVERLAP: Final = timedelta(hours=24)
"""Between trusting a new authority and signing with it: long enough for every Secret to be written anew, mounted and
read, also where the operator was away for some of it."""
RENEW_AFTER: Final = 1 / 3
"""Share of a certificate's life after which it is renewed: for the other two thirds the operator may be away."""
SPREAD: Final = 0.1
"""Share of a certificate's life over which the renewals of many are spread."""
AUTHORITY_RENEW_AFTER: Final = 2 / 3


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of an issued certificate without its key."""

    not_before: datetime
    not_after: datetime
    uri: str
    dns: str
    authority: str
    """Fingerprint of the authority that signed it."""
    trust: tuple[str, ...]
    """Fingerprints of the authorities in the bundle beside it, sorted."""
    strict: bool = False
    """It comes with the word that nobody is to be answered without mutual TLS."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a certificate should say, and who is to sign and to be trusted."""

    uri: str
    dns: str
    authority: str
    trust: tuple[str, ...]
    spread: float = 0.0
    """Between 0 and 1, of this certificate's own: thousands must not fall due at once."""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """Why a certificate is issued now."""

    reason: Literal["Missing", "Expired", "Names", "Authority", "Trust", "Strict", "Due"]


def due_at(leaf: Leaf, spread: float = 0.0) -> datetime:
    """When its renewal is due."""
    life = leaf.not_after - leaf.not_before
    return leaf.not_before + life * (RENEW_AFTER + SPREAD * spread)


def renewal(leaf: Leaf | None, wanted: Wanted, now: datetime) -> Renewal | None:
    """Whether a certificate is to be issued now; None: the one that there is will do."""
    if leaf is None:
        return Renewal("Missing")
    if now >= leaf.not_after:
        return Renewal("Expired")
    if (leaf.uri, leaf.dns) != (wanted.uri, wanted.dns):
        return Renewal("Names")
    if leaf.authority != wanted.authority:
        return Renewal("Authority")
    if leaf.trust != wanted.trust:
        return Renewal("Trust")
    if leaf.strict != wanted.strict:
        return Renewal("Strict")
    return Renewal("Due") if now >= due_at(leaf, wanted.spread) else None


@dataclass(frozen=True, slots=True)
class AuthorityFacts:
    """What is known of an authority without its key."""

    fingerprint: str
    not_before: datetime
    not_after: datetime
    since: datetime
    """When it got the place that it has: next, in force, or former."""


@dataclass(frozen=True, slots=True)
class Authorities:
    current: AuthorityFacts | None = None
    next: AuthorityFacts | None = None
    former: Sequence[AuthorityFacts] = ()


@dataclass(frozen=True, slots=True)
class RotationStep:
    """What happens to the authorities, and why."""

    kind: Literal["Make", "Prepare", "Promote", "Forget"]
    reason: str


def step(found: Authorities, now: datetime, *, leaf_life: timedelta, given: str | None = None) -> RotationStep | None:
    """The next step; None: nothing is due.

    `given` is the fingerprint of an authority that another tool keeps, such as cert-manager. It is taken over where an
    authority would be made, and only its change begins a rotation.
    """
    current, following = found.current, found.next
    if current is None:
        return RotationStep("Make", "there is no authority")
    if now >= current.not_after:
        if following is not None and now < following.not_after:
            return RotationStep("Promote", "the authority in force has expired")
        return RotationStep("Make", "the authority has expired, and there is no next one")
    if following is not None:
        if given is not None and following.fingerprint != given:
            return RotationStep("Prepare", "another authority is given than the one that was to come")
        if now - following.since >= OVERLAP:
            return RotationStep(
                "Promote", f"the next authority is trusted by everybody since {following.since:%Y-%m-%d %H:%M}"
            )
    elif given is not None:
        if given != current.fingerprint:
            return RotationStep("Prepare", "another authority is given")
    elif now >= current.not_before + (current.not_after - current.not_before) * AUTHORITY_RENEW_AFTER:
        return RotationStep("Prepare", f"the authority in force expires on {current.not_after:%Y-%m-%d}")
    for former in found.former:
        if now >= former.not_after or now - former.since >= leaf_life:
            return RotationStep("Forget", "no certificate of a former authority is valid any more")
    return None


def silent(processes: Iterable[Pod]) -> tuple[str, ...]:
    """Shoal's own pods that do not speak mutual TLS: versions from before, or with it switched off. While there is one,
    engine pods are made as before, since it could not reach others, and plain HTTP is answered. A pod that is being
    deleted counts: its requests go on."""
    return tuple(sorted(pod.key for pod in processes if not pod.finished and not pod.mtls))
