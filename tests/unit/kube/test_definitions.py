"""What of a status an older CustomResourceDefinition has."""

from typing import Any, cast

import pytest

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.definitions import RECHECK_SECONDS, InstalledStatus, declared
from shoal.kube.errors import Forbidden, KubeError, UnknownField
from shoal.kube.resources import MODELS, TENANTS

SCHEMA: JsonObject = {
    "properties": {
        "a": {"type": "string"},
        "list": {"items": {"properties": {"x": {}}}},
        "map": {"additionalProperties": {"properties": {"x": {}}}},
        "any": {"x-kubernetes-preserve-unknown-fields": True},
    }
}
WHOLE = {
    "a": "1",
    "new": 2,
    "list": [{"x": 1, "y": 2}],
    "map": {"key": {"x": 1, "y": 2}},
    "any": {"z": {"y": 1}},
}
LEFT = {"a": "1", "list": [{"x": 1}], "map": {"key": {"x": 1}}, "any": {"z": {"y": 1}}}
REFUSED = UnknownField(".status.new: field not declared in schema", status=500)


class Server:
    def __init__(self, answer: JsonObject | KubeError) -> None:
        self.answer, self.asked, self.now = answer, 0, 0.0

    async def schemas(self, _group: str, _version: str) -> list[JsonObject]:
        self.asked += 1
        if isinstance(self.answer, KubeError):
            raise self.answer
        kind: list[Any] = [{"group": MODELS.group, "version": MODELS.version, "kind": MODELS.kind}]
        return [{}, {"x-kubernetes-group-version-kind": kind, "properties": {"status": self.answer}}]

    def installed(self) -> InstalledStatus:
        return InstalledStatus(cast(KubeClient, self), lambda: self.now)


def test_what_a_schema_lacks_is_left_out() -> None:
    assert declared(WHOLE, SCHEMA) == LEFT
    assert declared(LEFT, SCHEMA) == LEFT


async def test_a_definition_that_was_found_older_is_known_for_a_while() -> None:
    server = Server(SCHEMA)
    installed = server.installed()
    assert installed.known(MODELS, WHOLE) == WHOLE
    assert await installed.refused(MODELS, WHOLE, REFUSED) == LEFT
    assert (installed.known(MODELS, WHOLE), installed.known(TENANTS, WHOLE)) == (LEFT, WHOLE)
    server.now = RECHECK_SECONDS
    assert installed.known(MODELS, WHOLE) == WHOLE, "it may have been upgraded"


@pytest.mark.parametrize("answer", [Forbidden("no", status=403), {"properties": {name: {} for name in WHOLE} | SCHEMA}])
async def test_a_refusal_that_nothing_explains_stays_one(answer: JsonObject | KubeError) -> None:
    server = Server(answer)
    whole = LEFT if isinstance(answer, KubeError) else {"a": "1"}
    with pytest.raises(UnknownField):
        await server.installed().refused(MODELS, whole, REFUSED)
