"""Which namespaces get a share in the node cache, and which volumes and claims go."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VolumeSeen:
    """A namespace's PersistentVolume as the API server has it."""

    phase: str
    """Available, Bound, Released, Failed."""
    claim_uid: str | None = None
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    """A namespace's claim as the API server has it."""

    uid: str
    phase: str
    """Pending, Bound, Lost."""
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class CacheVolumes:
    """What is to be done, by namespace."""

    keep: tuple[str, ...]
    """Volume and claim are applied."""
    release: tuple[str, ...]
    """The volume still names a claim that is gone: it would never bind again."""
    remove_claim: tuple[str, ...]
    """The claim lost its volume and never finds it again (it is applied anew), or nothing uses it any more."""
    remove_volume: tuple[str, ...]


def decide(
    wanted: Collection[str],
    busy: Collection[str],
    volumes: Mapping[str, VolumeSeen],
    claims: Mapping[str, ClaimSeen],
) -> CacheVolumes:
    """`wanted` are the namespaces with a Model that is fetched; `busy` those with pods that still use their share."""
    keep = sorted(set(wanted))
    release = [
        namespace
        for namespace in keep
        if (volume := volumes.get(namespace)) is not None
        and not volume.deleting
        and volume.claim_uid is not None
        and (
            volume.phase == "Released"
            or ((claim := claims.get(namespace)) is not None and claim.uid != volume.claim_uid)
        )
    ]
    unused = sorted({*volumes, *claims} - set(wanted) - set(busy))
    lost = [
        namespace
        for namespace in keep
        if namespace not in busy and namespace in claims and claims[namespace].phase == "Lost"
    ]
    return CacheVolumes(
        keep=tuple(keep),
        release=tuple(release),
        remove_claim=tuple(n for n in [*unused, *lost] if n in claims and not claims[n].deleting),
        # The volume after its claim: a volume that goes first leaves a claim that is Lost.
        remove_volume=tuple(n for n in unused if n in volumes and n not in claims and not volumes[n].deleting),
    )
