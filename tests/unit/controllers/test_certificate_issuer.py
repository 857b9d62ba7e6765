"""Certificates of Models' pods: one Model whose Secret is refused must not keep the others from theirs."""

import asyncio
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.api.config import MTLS, TransportConfig
from shoal.api.meta import JsonObject
from shoal.controllers.transport import CertificateIssuer
from shoal.controllers.world import World
from shoal.core import children
from shoal.kube.errors import KubeError, NotFound, from_status
from shoal.kube.resources import CONFIGMAPS
from shoal.net.authorities import KeptAuthorities
from tests.support.operators import CONFIG, NAMESPACE, model
from tests.support.owners import LabelsSuffice

CONFIGURED = CONFIG.model_copy(update={"transport": TransportConfig(mtls=MTLS(enabled=True))})
MODELS = 8


class Cluster:
    """An API server with Secrets, which refuses those of one namespace."""

    def __init__(self, refusal: KubeError, *, everywhere: bool) -> None:
        """`everywhere`: those of all Models."""
        self.refusal, self.everywhere = refusal, everywhere
        self.refused = 0
        self.no_config_maps = False
        self.config_maps: list[JsonObject] = []
        """As they were written, one after the other."""
        self.secrets: dict[tuple[str, str], JsonObject] = {}

    async def get(self, _resource: Any, name: str, namespace: str) -> JsonObject:
        if (found := self.secrets.get((namespace, name))) is None:
            raise NotFound(name, status=404, reason="NotFound")
        return found

    get_metadata = get

    async def create(self, resource: Any, obj: JsonObject, *, manager: str) -> JsonObject:
        return await self.apply(resource, obj, manager=manager)

    async def apply(self, resource: Any, obj: JsonObject, *, manager: str) -> JsonObject:
        metadata = obj["metadata"] | {"resourceVersion": "1"}
        if resource is CONFIGMAPS:
            if self.no_config_maps:
                raise self.refusal
            self.config_maps.append(obj)
        if metadata["namespace"] == "refusing" or (self.everywhere and metadata["namespace"] != NAMESPACE):
            self.refused += 1
            raise self.refusal
        stored = self.secrets[metadata["namespace"], metadata["name"]] = obj | {"metadata": metadata}
        return stored

    def of_models(self) -> int:
        return sum((f"ns-{n}", children.certificate_secret("chat")) in self.secrets for n in range(MODELS))


def put(world: World, namespace: str) -> None:
    """A Model and one pod of it that speaks mutual TLS."""
    uid = f"uid-{namespace}"
    made = model("chat", namespace)
    world.models.upsert(made | {"metadata": made["metadata"] | {"uid": uid, "resourceVersion": "1"}})
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        names.LABEL_MODEL: "chat",
        names.LABEL_MODEL_UID: uid,
    }
    annotations = {names.ANNOTATION_TRANSPORT: names.TRANSPORT_MTLS}
    metadata = {"name": "p", "namespace": namespace, "uid": f"pod-{namespace}", "resourceVersion": "1"}
    world.pods.upsert({"metadata": metadata | {"labels": labels, "annotations": annotations}, "spec": {}, "status": {}})


def world_of(cluster: Cluster) -> World:
    world = World(cast("Any", cluster), CONFIGURED, NAMESPACE, cast("Any", None), ownership=LabelsSuffice())
    for namespace in ("refusing", *(f"ns-{n}" for n in range(MODELS))):
        put(world, namespace)
    return world


async def run(refusal: KubeError, *, everywhere: bool = False, no_config_maps: bool = False) -> Cluster:
    cluster = Cluster(refusal, everywhere=everywhere)
    cluster.no_config_maps = no_config_maps
    task = asyncio.create_task(CertificateIssuer(world_of(cluster)).run(leads=True))
    await asyncio.sleep(0.5)  # it looks again after 30 s
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return cluster


@pytest.mark.parametrize(
    "refusal",
    [
        from_status(403, {"message": "the namespace is being terminated", "reason": "Forbidden"}),
        from_status(404, {"message": "namespaces not found", "reason": "NotFound"}),
        from_status(422, {"message": "a policy wants a label"}),
    ],
    ids=["forbidden", "no namespace", "invalid"],
)
async def test_a_refused_certificate_keeps_no_other_model_from_its_own(refusal: KubeError) -> None:
    assert (await run(refusal)).of_models() == MODELS


FORBIDDEN = from_status(403, {"message": "forbidden", "reason": "Forbidden"})


async def test_people_find_the_authorities_without_their_keys() -> None:
    cluster = await run(FORBIDDEN)
    (written,) = cluster.config_maps
    assert (written["metadata"]["namespace"], written["metadata"]["name"]) == (NAMESPACE, names.AUTHORITY_CONFIG_MAP)
    secret = KeptAuthorities.texts(cluster.secrets[NAMESPACE, names.AUTHORITY_SECRET])
    assert written["data"] == {"ca.crt": secret["ca.crt"]}
    assert "PRIVATE KEY" not in str(written)
    # It is written again when somebody has changed it, and only then.
    config_map = cluster.secrets[NAMESPACE, names.AUTHORITY_CONFIG_MAP]
    for data, writes in ((config_map["data"], 1), ({"ca.crt": "another's"}, 2)):
        cluster.secrets[NAMESPACE, names.AUTHORITY_CONFIG_MAP] = config_map | {"data": data}
        task = asyncio.create_task(CertificateIssuer(world_of(cluster)).run(leads=True))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(cluster.config_maps) == writes
    assert cluster.config_maps[-1]["data"] == written["data"]


async def test_a_refused_config_map_keeps_no_model_from_its_certificate() -> None:
    assert (await run(FORBIDDEN, no_config_maps=True)).of_models() == MODELS


async def test_an_api_server_that_does_not_answer_is_not_asked_for_each_model() -> None:
    """Each call of one that hangs takes half a minute."""
    cluster = await run(from_status(503, {"message": "not ready"}), everywhere=True)
    assert cluster.refused == 1
