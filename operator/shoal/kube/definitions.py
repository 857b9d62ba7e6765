"""The fields of a status that the installed CustomResourceDefinitions have.

Server-side apply refuses a whole object for one field that its definition does not have. Without this, an operator of
a chart that was upgraded before the chart shoal-crds could write no status at all. It leaves out what the definition
lacks instead, and says so in the log; `shoal doctor` says it too.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import structlog

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError
from shoal.kube.resources import Resource

log = structlog.get_logger()

RECHECK_SECONDS: Final = 60.0
"""After so long the whole status is sent again: the definition may have been upgraded."""


class InstalledStatus:
    """Of each kind whose definition is older than this operator, the schema of its status."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._older: dict[Resource, tuple[JsonObject, float]] = {}
        """With the time when it was read."""
        self._told: set[Resource] = set()

    def known(self, resource: Resource, status: JsonObject) -> JsonObject:
        """The status, without fields that the installed definition is known not to have."""
        found = self._older.get(resource)
        if found is None or self._clock() - found[1] >= RECHECK_SECONDS:
            return status
        return declared(status, found[0])

    async def refused(self, resource: Resource, status: JsonObject, error: KubeError) -> JsonObject:
        """Reads the definition after `error`, and returns what of the status it has. Raises `error` where it cannot be
        read, or is not older."""
        schemas = await self._schemas(resource, error)
        names = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        for schema in schemas:
            if names in schema.get("x-kubernetes-group-version-kind", ()):
                own: JsonObject = schema.get("properties", {}).get("status", {})
                left = declared(status, own)
                if left == status:
                    break
                self._older[resource] = own, self._clock()
                if resource not in self._told:
                    self._told.add(resource)
                    log.warning(
                        "fields of the status are left out: the CustomResourceDefinition is older than this operator; "
                        "upgrade the chart shoal-crds",
                        kind=resource.kind,
                        error=error.message,
                    )
                return left
        raise error

    async def _schemas(self, resource: Resource, error: KubeError) -> list[JsonObject]:
        try:
            return await self._client.schemas(resource.group, resource.version)
        except KubeError:
            raise error from None


def declared(value: Any, schema: Mapping[str, Any]) -> Any:
    """What of a value a structural schema has."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [declared(each, schema.get("items", {})) for each in items]
    if not isinstance(value, dict):
        return value
    fields = cast("JsonObject", value)
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return fields
    properties: Mapping[str, Any] = schema.get("properties", {})
    others: object = schema.get("additionalProperties")
    found: JsonObject = {}
    for name, each in fields.items():
        if name in properties:
            found[name] = declared(each, properties[name])
        elif isinstance(others, Mapping):
            found[name] = declared(each, cast("Mapping[str, Any]", others))
        elif others is True:
            found[name] = each
    return found
