"""A namespace's share in the node cache: one `local` PersistentVolume, and the claim that pods of the namespace mount.

The volume is the namespace's folder on whichever node the pod runs. `mountOptions: [ro]` is what protects it: a kubelet
enforces neither ReadOnlyMany nor the `readOnly` that a pod may leave out, and gives a writable `local` volume to the
pod's fsGroup.
"""

from typing import Final

from shoal.api import names
from shoal.api.config import Cache
from shoal.api.meta import JsonObject

NAMESPACES: Final = "namespaces"
"""Below the cache's folder: one folder per namespace."""
_LINUX: Final = {"kubernetes.io/os": "linux"}


def volume_name(namespace: str) -> str:
    """Of the namespace's PersistentVolume."""
    return f"{names.CACHE_CLAIM}-{namespace}"


def labels() -> dict[str, str]:
    """Of volume and claim: the cache's daemons and the operator find them by it."""
    return {
        names.LABEL_NAME: "shoal-cache",
        names.LABEL_COMPONENT: names.COMPONENT_CACHE,
        names.LABEL_PART_OF: "shoal",
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }


def volume(namespace: str, config: Cache) -> JsonObject:
    """The PersistentVolume, reserved for the namespace's claim."""
    expressions = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in sorted((config.node_selector or _LINUX).items())
    ]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name(namespace), "labels": labels()},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "capacity": {"storage": config.size},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": namespace,
                "name": names.CACHE_CLAIM,
            },
            "local": {"path": f"{config.host_path.rstrip('/')}/{NAMESPACES}/{namespace}"},
            "mountOptions": ["ro"],
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}},
            "persistentVolumeReclaimPolicy": "Retain",
            "volumeMode": "Filesystem",
        },
    }


def claim(namespace: str, config: Cache) -> JsonObject:
    """The PersistentVolumeClaim, for exactly that volume."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": names.CACHE_CLAIM, "namespace": namespace, "labels": labels()},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": {"storage": config.size}},
            # Empty, not absent: no provisioner may make another volume for it.
            "storageClassName": "",
            "volumeMode": "Filesystem",
            "volumeName": volume_name(namespace),
        },
    }


RELEASE: Final[JsonObject] = {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}}
"""Merge patch by which a Released volume waits for its namespace's claim again."""
POD_VOLUME: Final[JsonObject] = {"name": "cache", "persistentVolumeClaim": {"claimName": names.CACHE_CLAIM}}
"""Of an engine pod."""
POD_MOUNT: Final[JsonObject] = {"name": "cache", "mountPath": names.CACHE_DIR, "readOnly": True}
"""In the containers agent, stage and engine."""
STAGE_ENV: Final[JsonObject] = {"name": "SHOAL_STAGE_CACHE", "value": names.CACHE_DIR}
AGENT_ENV: Final[JsonObject] = {"name": "SHOAL_AGENT_CACHE", "value": names.CACHE_DIR}
