"""ConfigMaps and Secrets that pods of this node refer to: read when a pod starts, watched while one runs."""

import asyncio
from collections.abc import Callable
from typing import Any

from shoal_dev.lab.kubeapi import Api, KubeAPIError, LabReflector

Json = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""


class MissingObject(Exception):
    """The object is not there, or not readable. The message is the kubelet's."""


class NodeObjects:
    """One watch per object, however many pods use it; none for immutable ones."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._followed: dict[Key, _Followed] = {}

    async def get(self, plural: str, namespace: str, name: str) -> Json:
        """Raises MissingObject, and what `Api.request` raises when the API server is away."""
        try:
            return await self._api.request("GET", f"/api/v1/namespaces/{namespace}/{plural}/{name}")
        except KubeAPIError as error:
            if error.status in (403, 404):  # 403: the node authorizer has not seen the pod yet, or never will
                message = str(error).partition(": ")[2]
                raise MissingObject(message or f'{plural[:-1]} "{name}" not found') from error
            raise

    def follow(self, plural: str, namespace: str, name: str, on_change: Callable[[], None]) -> Callable[[], None]:
        """Calls `on_change` when the object changes; returns what ends that."""
        key = (plural, namespace, name)
        followed = self._followed.get(key)
        if followed is None:
            followed = self._followed[key] = _Followed(self._api, key)
        followed.listeners.append(on_change)

        def end() -> None:
            if on_change in followed.listeners:
                followed.listeners.remove(on_change)
            if not followed.listeners and self._followed.get(key) is followed:
                del self._followed[key]
                followed.task.cancel()

        return end


class _Followed:
    def __init__(self, api: Api, key: Key) -> None:
        plural, namespace, name = key
        self.listeners: list[Callable[[], None]] = []
        self._version: str | None = None
        path = f"/api/v1/namespaces/{namespace}/{plural}?fieldSelector=metadata.name%3D{name}"
        self.task = asyncio.create_task(LabReflector(api, path, self._changed).run())

    def _changed(self, _kind: str, item: Json) -> None:
        version = str(item["metadata"].get("resourceVersion"))
        first = self._version is None
        if version == self._version:
            return
        self._version = version
        if first:
            # it may have changed between the pod's read and this first list: listeners compare contents
            asyncio.get_running_loop().call_soon(self._publish)
        else:
            self._publish()

    def _publish(self) -> None:
        for listener in list(self.listeners):
            listener()
