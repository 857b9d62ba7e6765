"""Keeps a copy of one kind: list, watch, and list again on request. The copy is kept while the API server is away.

`on_event` is called with "upsert" for every new or changed object and with "delete" for every deleted one, also when
the watch missed the deletion (an API server restarted, a watch expired): the next list lacks the object.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import structlog

from shoal.api.meta import JsonObject
from shoal.kube import resync
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, Gone, KubeError, NotFound
from shoal.kube.resources import Resource
from shoal.kube.resync import object_key

log = structlog.get_logger()

ReflectorEvent = Literal["upsert", "delete"]
CRD_BACKOFF: Final = 2.0
"""Seconds between looks for a kind that is not installed yet: a person may be installing it right now."""


class Reflector:
    """One kind, optionally in one namespace or with a selector; else in all that the client's scope has.

    `project` makes of each raw object what is kept and handed to `on_event`; None from it means "not of interest" and
    reads as absent. `on_event` must not block; what it raises is logged and does not stop the stream.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        project: Callable[[JsonObject], Any] | None = None,
        on_event: Callable[[ReflectorEvent, Any], None] | None = None,
        metadata_only: bool = False,
    ) -> None:
        """`metadata_only`: the API server leaves out `spec` and `status`."""
        self._client = client
        self._resource = resource
        self._spaces: tuple[str | None, ...] = client.spaces(resource, namespace)
        self._selector = label_selector
        self._metadata_only = metadata_only
        self._project = project
        self._on_event = on_event
        self._objects: dict[str, Any] = {}
        self._versions: dict[str, str] = {}
        self._log = log.bind(resource=resource.plural)
        self.synced = asyncio.Event()
        """Set when the first list is complete; stays set."""
        self.missing = False
        """The API server does not know the kind: its CRD is not installed."""
        self._up: set[str | None] = set()
        self._listed: set[str | None] = set()
        self.last_event = time.monotonic()
        """Monotonic time of the last list, event or bookmark."""

    @property
    def objects(self) -> Mapping[str, Any]:
        """The copy, by `namespace/name` (or `name`). A live view: take what you need before you await."""
        return MappingProxyType(self._objects)

    @property
    def connected(self) -> bool:
        """Every namespace is listed and watched."""
        return len(self._up) == len(self._spaces)

    async def run(self) -> None:
        """Runs until cancelled. Never raises for what an API server does."""
        async with asyncio.TaskGroup() as tasks:
            for space in self._spaces:
                tasks.create_task(self._follow(space))

    async def _follow(self, space: str | None) -> None:
        """One namespace, or all of them."""
        backoff = resync.Backoff()
        version: str | None = None
        while True:
            try:
                if version is None:
                    version = await self._list(space)
                begun = time.monotonic()
                async for event in self._client.watch(
                    self._resource,
                    version,
                    namespace=space,
                    label_selector=self._selector,
                    metadata_only=self._metadata_only,
                ):
                    self._received(space)
                    backoff.reset()
                    if event.type == "DELETED":
                        self._remove(object_key(event.object), event.object)
                    elif event.type != "BOOKMARK":
                        self._upsert(event.object)
                    version = str(event.object["metadata"]["resourceVersion"])
                self._received(space)
                if time.monotonic() - begun < resync.FIRST_BACKOFF:  # something in between ends them at once
                    await asyncio.sleep(resync.FIRST_BACKOFF)
                continue  # the server renews its streams by ending them: go on where it ended
            except Gone:
                self._log.info("watch expired, listing again")
                version = None
                await asyncio.sleep(0.1)
                continue
            except NotFound as error:
                version = None
                if not self.missing:
                    self._log.warning(
                        "the API server does not know this kind; waiting for its CustomResourceDefinition",
                        error=error.message,
                    )
                self.missing = True
                self._up.discard(space)
                backoff.reset(CRD_BACKOFF)
            except KubeError as error:
                # Anything but a lost connection may mean that the version is no good any more: list again.
                if error.status is not None:
                    version = None
                if space in self._up:
                    self._log.warning("lost the API server; keeping the last state", error=error.message)
                elif isinstance(error, Forbidden) and space is not None and space not in self._listed:
                    self._log.warning("a namespace of the scope may not be read", namespace=space, error=error.message)
                self._up.discard(space)
            await asyncio.sleep(backoff.delay())

    def _received(self, space: str | None) -> None:
        if self.missing or space not in self._up:
            self._log.info("watching", **({"namespace": space} if space else {}))
        self.missing = False
        self._up.add(space)
        self.last_event = time.monotonic()

    async def _list(self, space: str | None) -> str:
        def receive(items: Sequence[JsonObject]) -> None:
            for obj in items:
                self._upsert(obj)
            self._received(space)

        listed = await resync.list_all(
            self._client,
            self._resource,
            receive,
            namespace=space,
            label_selector=self._selector,
            metadata_only=self._metadata_only,
        )
        of_here = "" if space is None else f"{space}/"
        for key in [k for k in self._versions if k not in listed.keys and k.startswith(of_here)]:
            self._remove(key, None)
        self._listed.add(space)
        if len(self._listed) == len(self._spaces):
            self.synced.set()
        return listed.version

    def _upsert(self, obj: JsonObject) -> None:
        key = object_key(obj)
        version = str(obj["metadata"].get("resourceVersion", ""))
        if self._versions.get(key) == version and version:
            return
        self._versions[key] = version
        value: Any = obj
        if self._project is not None:
            try:
                value = self._project(obj)
            except Exception as error:
                # One object that cannot be read must not blind us to all others; it reads as absent.
                self._log.warning("object cannot be read", key=key, error=str(error))
                value = None
        if value is None:
            if key in self._objects:
                self._emit("delete", self._objects.pop(key))
            return
        self._objects[key] = value
        self._emit("upsert", value)

    def _remove(self, key: str, raw: JsonObject | None) -> None:
        self._versions.pop(key, None)
        if key in self._objects:
            value = self._objects.pop(key)
            self._emit("delete", raw if self._project is None and raw is not None else value)

    def _emit(self, kind: ReflectorEvent, value: Any) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(kind, value)
        except Exception:
            self._log.exception("listener failed")
