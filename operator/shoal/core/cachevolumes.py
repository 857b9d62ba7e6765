"""Which namespaces get a share in the node cache, and which volumes and claims go."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """A volume and its claim, by the claim's namespace and name."""

    namespace: str
    claim: str


@dataclass(frozen=True, slots=True)
class VolumeSeen:
    """A share's PersistentVolume as the API server has it."""

    phase: str
    """Available, Bound, Released, Failed."""
    claim_uid: str | None = None
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    """A share's claim as the API server has it."""

    uid: str
    phase: str
    """Pending, Bound, Lost."""
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class CacheVolumes:
    """What is to be done."""

    keep: tuple[Share, ...]
    """Volume and claim are applied, unless they are there."""
    release: tuple[Share, ...]
    """The volume still names a claim that is gone: it would never bind again."""
    remove_claim: tuple[Share, ...]
    """Nothing uses the claim, or it lost its volume and never finds it again (then it is applied anew)."""
    remove_volume: tuple[Share, ...]


def decide(
    wanted: Collection[Share],
    busy: Collection[Share],
    volumes: Mapping[Share, VolumeSeen],
    claims: Mapping[Share, ClaimSeen],
) -> CacheVolumes:
    """`wanted` are the shares of the namespaces that have a cached Model; `busy` those that pods still mount."""
    keep = sorted(set(wanted))
    unused = sorted({*volumes, *claims} - set(wanted) - set(busy))
    lost = [s for s in keep if s not in busy and s in claims and claims[s].phase == "Lost"]
    return CacheVolumes(
        keep=tuple(keep),
        release=tuple(s for s in keep if s in volumes and _is_of_old(volumes[s], claims.get(s))),
        remove_claim=tuple(s for s in [*unused, *lost] if s in claims and not claims[s].deleting),
        # After its claim: a volume that goes first leaves a claim that is Lost.
        remove_volume=tuple(s for s in unused if s in volumes and s not in claims and not volumes[s].deleting),
    )


def _is_of_old(volume: VolumeSeen, claim: ClaimSeen | None) -> bool:
    if volume.deleting or volume.claim_uid is None:
        return False
    return volume.phase == "Released" or (claim is not None and claim.uid != volume.claim_uid)
