"""The lab's default StorageClass: a folder on a node's disk for each claim, as kind and k3s do it.

The scheduler picks the node (WaitForFirstConsumer) and names it in an annotation of the claim; then a PersistentVolume
bound to that node is made for exactly this claim. When the claim is deleted, volume and folder go too.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import Api, KubeAPIError, LabReflector, Object
from shoal_dev.lab.node import disk, rootfs

_log = structlog.get_logger()
STORAGE_CLASS: Final = "standard"
PROVISIONER: Final = "lab.shoal.dev/folder"
FOLDER: Final = "/var/lib/lab-volumes"
"""On the nodes."""
_SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
_PROVISIONED_BY: Final = "pv.kubernetes.io/provisioned-by"


def storage_class() -> dict[str, Any]:
    """The object that bootstrap applies."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete",
    }


def wants_volume(claim: Object) -> str | None:
    """The node for which a volume is to be made; None when the claim is bound, being deleted, or not ours."""
    annotations: Object = claim["metadata"].get("annotations") or {}
    spec = claim["spec"]
    if spec.get("volumeName") or claim["metadata"].get("deletionTimestamp"):
        return None
    if spec.get("storageClassName") != STORAGE_CLASS:
        return None
    return annotations.get(_SELECTED_NODE) or None


def volume_for(claim: Object, node: str) -> dict[str, Any]:
    """The PersistentVolume. Its name holds the claim's uid, so that trying twice makes one."""
    metadata, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{metadata['uid']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {_PROVISIONED_BY: PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "volumeMode": "Filesystem",
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "local": {"path": f"{FOLDER}/{metadata['namespace']}_{metadata['name']}_{metadata['uid'][:8]}"},
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
                    ]
                }
            },
        },
    }


class Provisioner:
    """Makes and removes volumes. One worker: a lab has few claims. `nodes` holds each node's `data_dir`."""

    def __init__(self, api: Api, nodes: Path) -> None:
        self._api = api
        self._nodes = nodes
        self._queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        self._claims = LabReflector(
            api, "/api/v1/persistentvolumeclaims", lambda _, o: self._queue.put_nowait(("claim", o))
        )
        self._volumes = LabReflector(
            api, "/api/v1/persistentvolumes", lambda _, o: self._queue.put_nowait(("volume", o))
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claims.run())
            tasks.create_task(self._volumes.run())
            while True:
                kind, item = await self._queue.get()
                try:
                    await (self._make(item) if kind == "claim" else self._remove(item))
                except (KubeAPIError, aiohttp.ClientError, OSError, TimeoutError) as error:
                    _log.warning("volume_not_handled", name=item["metadata"]["name"], error=str(error))
                    tasks.create_task(self._again(kind, item))

    async def _again(self, kind: str, item: Object) -> None:
        await asyncio.sleep(1)
        known = (self._claims if kind == "claim" else self._volumes).objects
        key = f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"
        if key in known:
            self._queue.put_nowait((kind, known[key]))

    async def _make(self, claim: Object) -> None:
        node = wants_volume(claim)
        if node is None or f"/pvc-{claim['metadata']['uid']}" in self._volumes.objects:
            return
        volume = volume_for(claim, node)
        folder = _folder_of(volume, self._nodes)
        # Open to all, as such provisioners do it: fsGroup is not applied to volumes of this kind everywhere.
        await asyncio.to_thread(_make_open_folder, folder)
        try:
            await self._api.request("POST", "/api/v1/persistentvolumes", volume)
        except KubeAPIError as error:
            if error.status != 409:
                raise
        _log.info("volume_made", name=volume["metadata"]["name"], node=node)

    async def _remove(self, volume: Object) -> None:
        annotations: Object = volume["metadata"].get("annotations") or {}
        ours = annotations.get(_PROVISIONED_BY) == PROVISIONER
        if not ours or volume.get("status", {}).get("phase") != "Released":
            return
        folder = _folder_of(volume, self._nodes)
        if folder.parent.name == Path(FOLDER).name:  # nothing else, whatever somebody wrote into the object
            await asyncio.to_thread(shutil.rmtree, folder, True)
        try:
            await self._api.request("DELETE", f"/api/v1/persistentvolumes/{volume['metadata']['name']}")
        except KubeAPIError as error:
            if error.status != 404:
                raise


def _folder_of(volume: Object, nodes: Path) -> Path:
    """On this machine. Never outside the node's disk."""
    terms = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    node = Path(terms[0]["matchExpressions"][0]["values"][0]).name
    return Path(rootfs.inside(str(disk.root_of(nodes / node)), volume["spec"]["local"]["path"]))


def _make_open_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
