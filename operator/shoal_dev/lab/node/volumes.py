"""The volumes of one pod: made before its first container, refreshed while it runs, removed after its last."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import KubeAPIError
from shoal_dev.lab.node import affinity, fields, linux, quantity
from shoal_dev.lab.node.disk import DiskError, Report, usage
from shoal_dev.lab.node.env import ConfigError, field_value, resource_value
from shoal_dev.lab.node.objects import MissingObject
from shoal_dev.lab.node.projection import content, publish

if TYPE_CHECKING:
    from shoal_dev.lab.node.context import NodeContext

_log = structlog.get_logger()
Json = dict[str, Any]

TOKEN_SHARE = 0.8
"""A service account token is renewed at this share of its life, as by a kubelet."""
OVERFLOW_SECONDS = 10.0
"""A kubelet's housekeeping interval for evictions."""


class VolumeError(Exception):
    """The volume cannot be set up now. The message is the FailedMount event's."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What volumes need to know of the pod and its node."""

    pod: Json
    address: str
    node: str
    host_address: str
    allocatable: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Volume:
    path: Path
    """On this machine."""
    read_only: bool = False


class PodVolumes:
    """`folder` is on the node's tmpfs, `data` on disk; both are this pod's alone."""

    def __init__(
        self,
        facts: PodFacts,
        node: "NodeContext",
        folder: Path,
        data: Path,
        report: Report,
    ) -> None:
        self._facts = facts
        self._api = node.api
        self._objects = node.objects
        self._disk = node.disk
        self._labels = node.labels
        self._report = report
        self._folder = folder
        self._data = data
        self._namespace: str = facts.pod["metadata"]["namespace"]
        security: Json = fields.mapping(facts.pod["spec"], "securityContext")
        self._group: int | None = security.get("fsGroup")
        self._mounted: dict[str, Volume] = {}
        self._tmpfs: list[Path] = []
        self._limited: dict[str, tuple[Path, str]] = {}
        """emptyDir on disk -> its folder and sizeLimit."""
        self._unfollow: list[Callable[[], None]] = []
        self._followed: set[tuple[str, str]] = set()
        self._stale = asyncio.Event()
        self._renew_at: float | None = None

    # --- setting up -------------------------------------------------------------------------------------------------

    async def set_up(self) -> None:
        """Makes every volume that is not there yet. Raises VolumeError; call again later to go on."""
        for volume in fields.items(self._facts.pod["spec"], "volumes"):
            name = volume["name"]
            if name not in self._mounted:
                try:
                    self._mounted[name] = await self._make(volume)
                except (MissingObject, ConfigError, DiskError, OSError, ValueError, VolumeError) as error:
                    raise VolumeError(f'MountVolume.SetUp failed for volume "{name}" : {error}') from error
                except (KubeAPIError, aiohttp.ClientError, TimeoutError) as error:
                    raise VolumeError(f'MountVolume.SetUp failed for volume "{name}" : {error!r}') from error

    def source(self, mount: Json, env: Mapping[str, str], expand: Callable[[str, Mapping[str, str]], str]) -> Volume:
        """What a container's volumeMount binds. Raises ConfigError."""
        volume = self._mounted[mount["name"]]
        sub: str = mount.get("subPath") or expand(mount.get("subPathExpr") or "", env)
        if not sub:
            return volume
        if ".." in sub.split("/") or sub.startswith("/"):
            raise ConfigError(f"subPath {sub} must stay inside the volume")
        path = volume.path / sub
        if not path.exists():
            path.mkdir(parents=True)
            if self._group is not None:
                os.chown(path, -1, self._group)
                path.chmod(0o2775)
        resolved = path.resolve()
        if not resolved.is_relative_to(volume.path.resolve()):
            raise ConfigError(f"subPath {sub} leads out of the volume")
        return Volume(resolved, volume.read_only)

    async def _make(self, volume: Json) -> Volume:
        kind = next((key for key in volume if key != "name"), "emptyDir")
        source: Json = volume.get(kind) or {}
        folder = self._folder / volume["name"]
        match kind:
            case "emptyDir":
                return Volume(self._empty_dir(volume["name"], source))
            case "configMap" | "secret" | "downwardAPI" | "projected":
                folder.mkdir(parents=True, exist_ok=True)
                await self._write(volume["name"], kind, source)
                # a kubelet mounts all of these read-only since 1.9.6
                return Volume(folder, read_only=True)
            case "hostPath":
                return Volume(*self._disk.host_path(source))
            case "persistentVolumeClaim":
                return await self._claim(source)
            case _:
                raise VolumeError(f"the lab's nodes have no {kind} volumes")

    def _empty_dir(self, name: str, source: Json) -> Path:
        if source.get("medium") == "Memory":
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True)
            size = f",size={quantity.ceiling(str(source['sizeLimit']))}" if source.get("sizeLimit") else ""
            linux.mount("tmpfs", str(folder), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"mode=0777{size}")
            self._tmpfs.append(folder)
        else:
            folder = self._data / name
            folder.mkdir(parents=True, exist_ok=True)
            if source.get("sizeLimit"):
                self._limited[name] = (folder, str(source["sizeLimit"]))
        folder.chmod(0o777)
        if self._group is not None:
            os.chown(folder, -1, self._group)
            folder.chmod(0o2777)
        return folder

    async def _claim(self, source: Json) -> Volume:
        name = source["claimName"]
        claim = await self._objects.get("persistentvolumeclaims", self._namespace, name)
        volume_name = claim["spec"].get("volumeName")
        if not volume_name or claim.get("status", {}).get("phase") != "Bound":
            raise VolumeError(f"PVC {self._namespace}/{name} is not bound")
        volume = await self._api.request("GET", f"/api/v1/persistentvolumes/{volume_name}")
        spec: Json = volume["spec"]
        if not affinity.admits(volume, self._facts.node, await self._labels()):
            raise VolumeError(
                f'MountVolume.NodeAffinity check failed for volume "{volume_name}" : no matching NodeSelectorTerms'
            )
        path: str | None = (spec.get("local") or fields.mapping(spec, "hostPath")).get("path")
        if path is None:
            raise VolumeError(f'PV {volume_name}: the lab\'s nodes have only "local" and "hostPath" volumes')
        read_only = bool(source.get("readOnly")) or "ro" in fields.words(spec, "mountOptions")
        # Read-only, by the claim or by the PV: the kubelet's chgrp does not reach the files.
        group = None if read_only else self._group
        uid = self._facts.pod["metadata"]["uid"]
        folder = await asyncio.to_thread(self._disk.local, volume_name, path, uid, group, self._report)
        return Volume(folder, read_only)

    # --- contents that follow objects -------------------------------------------------------------------------------

    async def _write(self, name: str, kind: str, source: Json) -> None:
        files: dict[str, tuple[bytes, int]] = {}
        mode = int(source.get("defaultMode", 0o644))
        if kind == "projected":
            for part in fields.items(source, "sources"):
                files |= await self._files(*next(iter(part.items())), mode)
        else:
            files = await self._files(kind, source, mode)
        publish(self._folder / name, files, self._group)

    async def _files(self, kind: str, source: Json, mode: int) -> dict[str, tuple[bytes, int]]:
        match kind:
            case "configMap" | "secret":
                name: str = source.get("name") or source.get("secretName") or ""
                return await self._object_files(kind, name, source, mode)
            case "downwardAPI":
                return {
                    item["path"]: (self._downward(item).encode(), int(item.get("mode", mode)))
                    for item in fields.items(source, "items")
                }
            case "serviceAccountToken":
                return {source["path"]: await self._token(source)}
            case _:
                raise VolumeError(f"the lab's nodes do not project {kind}")

    async def _object_files(self, kind: str, name: str, source: Json, mode: int) -> dict[str, tuple[bytes, int]]:
        plural = "configmaps" if kind == "configMap" else "secrets"
        try:
            found = await self._objects.get(plural, self._namespace, name)
        except MissingObject:
            if not source.get("optional"):
                raise
            found = {}
        if not found.get("immutable"):
            self._follow(plural, name)
        data = content(found)
        if "items" not in source:
            return {key: (value, mode) for key, value in data.items()}
        files: dict[str, tuple[bytes, int]] = {}
        for item in source["items"]:
            if item["key"] in data:
                files[item["path"]] = (data[item["key"]], int(item.get("mode", mode)))
            elif not source.get("optional"):
                raise VolumeError(f"references non-existent {kind.lower()} key: {item['key']}")
        return files

    def _follow(self, plural: str, name: str) -> None:
        if (plural, name) not in self._followed:
            self._followed.add((plural, name))
            self._unfollow.append(self._objects.follow(plural, self._namespace, name, self._stale.set))

    def _downward(self, item: Json) -> str:
        facts = self._facts
        if "fieldRef" in item:
            path = item["fieldRef"]["fieldPath"]
            return field_value(facts.pod, path, facts.address, facts.node, facts.host_address)
        reference = item["resourceFieldRef"]
        spec = facts.pod["spec"]
        containers: list[Json] = [*spec["containers"], *fields.items(spec, "initContainers")]
        container = next(c for c in containers if c["name"] == reference["containerName"])
        return resource_value(container, reference, facts.allocatable)

    async def _token(self, source: Json) -> tuple[bytes, int]:
        metadata = self._facts.pod["metadata"]
        account = self._facts.pod["spec"].get("serviceAccountName", "default")
        seconds = int(source.get("expirationSeconds", 3600))
        body: Json = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [source["audience"]] if source.get("audience") else [],
                "expirationSeconds": seconds,
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
            },
        }
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        answer = await self._api.request("POST", path, body)
        expires = datetime.fromisoformat(answer["status"]["expirationTimestamp"]).timestamp()
        due = time.monotonic() + max(10.0, (expires - time.time()) * TOKEN_SHARE)
        self._renew_at = due if self._renew_at is None else min(self._renew_at, due)
        return answer["status"]["token"].encode(), 0o600 if self._group is not None else 0o644

    async def keep_fresh(self) -> None:
        """Rewrites volumes when what they are made of changes. Until cancelled."""
        while True:
            try:
                timeout = None if self._renew_at is None else max(0.1, self._renew_at - time.monotonic())
                async with asyncio.timeout(timeout):
                    await self._stale.wait()
            except TimeoutError:
                self._renew_at = None
            self._stale.clear()
            for volume in fields.items(self._facts.pod["spec"], "volumes"):
                kind = next((key for key in volume if key != "name"), "emptyDir")
                if kind in ("configMap", "secret", "downwardAPI", "projected"):
                    try:
                        await self._write(volume["name"], kind, volume[kind])
                    except (MissingObject, ConfigError, VolumeError) as error:
                        _log.info("volume_keeps_its_content", volume=volume["name"], reason=str(error))
                    except (KubeAPIError, aiohttp.ClientError, TimeoutError, OSError) as error:
                        _log.info("volume_refresh_fails", volume=volume["name"], error=str(error))
                        self._renew_at = time.monotonic() + 10

    async def overflow(self) -> str:
        """Returns, with the reason, when an emptyDir has outgrown its sizeLimit; until cancelled when none does.

        Looked at now and then, as by a kubelet: nothing stops the writer at the limit.
        """
        while True:
            await asyncio.sleep(OVERFLOW_SECONDS)
            for name, (folder, limit) in self._limited.items():
                if await asyncio.to_thread(usage, folder) > quantity.ceiling(limit):
                    return f'Usage of EmptyDir volume "{name}" exceeds the limit "{limit}". '

    def set_address(self, address: str) -> None:
        """The pod's, for the downward API."""
        self._facts = replace(self._facts, address=address)

    def refresh(self) -> None:
        """The pod's labels or annotations changed."""
        self._stale.set()

    async def tear_down(self) -> None:
        for end in self._unfollow:
            end()
        self._unfollow.clear()
        for folder in reversed(self._tmpfs):
            linux.unmount(str(folder))
        self._tmpfs.clear()
        self._disk.release(self._facts.pod["metadata"]["uid"])
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        await asyncio.to_thread(shutil.rmtree, self._data, ignore_errors=True)
