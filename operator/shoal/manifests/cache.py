"""A namespace's folder of the node cache: one `local` PersistentVolume, and the claim that pods of the namespace mount.

The volume is the namespace's folder on the node of each pod. `mountOptions: [ro]` is the protection: a kubelet enforces
neither ReadOnlyMany nor the `readOnly` of a pod, which a pod may leave out, and makes a writable `local` volume
writable for the pod's fsGroup.

Path and nodes of a volume are immutable, so they are part of the names: with another `hostPath` or `nodeSelector`, pods
roll to a new volume and claim, and the old ones are deleted when no pod uses them any more.
"""

import hashlib
import json
from typing import Final

from shoal.api import names
from shoal.api.config import Cache
from shoal.api.meta import JsonObject
from shoal.core import quantity
from shoal.core.cachevolumes import Share

NAMESPACES: Final = "namespaces"
"""Folder below the cache's folder that contains one folder per namespace."""
_LINUX: Final = {"kubernetes.io/os": "linux"}
_UNITS: Final = ("Ti", "Gi", "Mi", "T", "G", "M")


def share(namespace: str, config: Cache) -> Share:
    """The namespace's volume and claim with this configuration."""
    text = json.dumps([config.host_path, sorted(config.node_selector.items())])
    return Share(namespace, f"{names.CACHE_CLAIM}-{hashlib.sha256(text.encode()).hexdigest()[:6]}")


def volume_name(share: Share) -> str:
    """Name of the PersistentVolume, which is cluster-scoped."""
    return f"{names.CACHE_CLAIM}-{share.namespace}-{share.claim.removeprefix(f'{names.CACHE_CLAIM}-')}"


def labels() -> dict[str, str]:
    """Labels of volume and claim, by which the cache's pods and the operator find them."""
    return {
        names.LABEL_NAME: "shoal-cache",
        names.LABEL_COMPONENT: names.COMPONENT_CACHE,
        names.LABEL_PART_OF: "shoal",
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }


def volume(namespace: str, config: Cache) -> JsonObject:
    """The PersistentVolume, reserved for the namespace's claim."""
    own = share(namespace, config)
    expressions = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in sorted((config.node_selector or _LINUX).items())
    ]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name(own), "labels": labels()},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "capacity": {"storage": _canonical(config.size)},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": namespace,
                "name": own.claim,
            },
            "local": {"path": f"{config.host_path.rstrip('/')}/{NAMESPACES}/{namespace}"},
            "mountOptions": ["ro"],
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}},
            "persistentVolumeReclaimPolicy": "Retain",
            "volumeMode": "Filesystem",
        },
    }


def claim(namespace: str, config: Cache) -> JsonObject:
    """The PersistentVolumeClaim, bound to exactly that volume."""
    own = share(namespace, config)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": own.claim, "namespace": namespace, "labels": labels()},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            # The minimum: it cannot follow the cache's size later, and it counts towards the namespace's quota.
            "resources": {"requests": {"storage": "1Mi"}},
            # Empty, not absent: no provisioner may create another volume for it.
            "storageClassName": "",
            "volumeMode": "Filesystem",
            "volumeName": volume_name(own),
        },
    }


RELEASE: Final[JsonObject] = {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}}
"""Merge patch that makes a volume with the reference of a deleted claim available to its namespace's claim again."""


def pod_volume(config: Cache) -> JsonObject:
    """The volume of an engine pod."""
    # `readOnly` as well: reviewers look for it, though only the volume's mount option is effective.
    return {"name": "cache", "persistentVolumeClaim": {"claimName": share("", config).claim, "readOnly": True}}


POD_MOUNT: Final[JsonObject] = {"name": "cache", "mountPath": names.CACHE_DIR, "readOnly": True}
"""Mount of the containers agent, stage and engine."""
STAGE_ENV: Final[JsonObject] = {"name": "SHOAL_STAGE_CACHE", "value": names.CACHE_DIR}
AGENT_ENV: Final[JsonObject] = {"name": "SHOAL_AGENT_CACHE", "value": names.CACHE_DIR}


def _canonical(size: str) -> str:
    """The size as the API server writes it; otherwise the stored object would always differ from the applied one."""
    number = quantity.parse(size)
    for unit in _UNITS if size.endswith("i") else _UNITS[3:]:
        whole = number / quantity.parse(f"1{unit}")
        if whole >= 1 and whole == whole.to_integral_value():
            return f"{whole:f}{unit}"
    return str(int(number))
