"""The volumes and claims of the node cache's shares, as the operator sees them."""

from dataclasses import dataclass

from shoal.api.meta import JsonObject
from shoal.core.cachevolumes import ClaimSeen, Share, VolumeSeen


@dataclass(frozen=True, slots=True)
class CacheVolume:
    """The PersistentVolume of a namespace's share in the node cache."""

    name: str
    uid: str
    share: Share
    seen: VolumeSeen


@dataclass(frozen=True, slots=True)
class CacheClaim:
    """The claim of such a volume."""

    share: Share
    seen: ClaimSeen


def volume(raw: JsonObject) -> CacheVolume:
    metadata: JsonObject = raw["metadata"]
    claimed: JsonObject = raw["spec"].get("claimRef") or {}
    status: JsonObject = raw.get("status") or {}
    return CacheVolume(
        name=metadata["name"],
        uid=metadata["uid"],
        share=Share(claimed.get("namespace", ""), claimed.get("name", "")),
        seen=VolumeSeen(status.get("phase", ""), claimed.get("uid"), "deletionTimestamp" in metadata),
    )


def claim(raw: JsonObject) -> CacheClaim:
    metadata: JsonObject = raw["metadata"]
    status: JsonObject = raw.get("status") or {}
    return CacheClaim(
        share=Share(metadata["namespace"], metadata["name"]),
        seen=ClaimSeen(metadata["uid"], status.get("phase", ""), "deletionTimestamp" in metadata),
    )
