"""An operator that was upgraded before the CustomResourceDefinitions, on a real API server."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.model import ModelStatus, VariantStatus
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.kube import definitions
from shoal.kube.client import KubeClient
from shoal.kube.events import Recorder
from shoal.kube.resources import MODELS
from tests.support.apiserver import ApiServer, start
from tests.support.operators import CONFIG
from tests.support.waiting import until

pytestmark = pytest.mark.apiserver

CRD = yaml.safe_load((Path(__file__).resolve().parents[2] / "crds" / "models.shoal.dev.yaml").read_text())
MODEL = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "m", "namespace": "default"},
    "spec": {"source": {"uri": "hf://owner/repo"}},
}
VARIANT = VariantStatus.model_validate(
    {"class": "l4", "desired": 1, "ready": 1, "step": "Ready", "coldStartSeconds": 7}
)
STATUS = ModelStatus(observed_generation=1, variants=(VARIANT,), capabilities=("chat",))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    yield from start(tmp_path)


@pytest.fixture
async def world(server: ApiServer) -> AsyncIterator[World]:
    async with await KubeClient.from_environment(kubeconfig=str(server.kubeconfig)) as client:
        yield World(client, CONFIG, "shoal-system", Recorder(client, "test"))


def install(server: ApiServer, crd: dict[str, Any]) -> None:
    assert server.apply(crd).returncode == 0
    server.kubectl("wait", "--for=condition=Established", "crd/models.shoal.dev", "--timeout=50s")
    until(lambda: "models" in server.run("api-resources", "--api-group=shoal.dev", "-o", "name").stdout, 60)


def older() -> dict[str, Any]:
    """Without two fields of the status, one of them inside a list."""
    crd = yaml.safe_load(yaml.safe_dump(CRD))
    status = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    del status["capabilities"], status["variants"]["items"]["properties"]["coldStartSeconds"]
    return crd


async def write(world: World, server: ApiServer, status: ModelStatus = STATUS) -> tuple[bool, JsonObject]:
    """Whether it wrote, and what is stored then."""
    world.models.upsert(server.json("get", "model", "m"), since=world.models.mark())
    custom = world.models.get("default/m")
    assert custom is not None
    wrote = await write_status(world, MODELS, world.models, custom, status, manager=names.MANAGER_MODEL)
    return wrote, server.json("get", "model", "m")["status"]


async def test_what_an_older_definition_lacks_is_left_out_until_it_is_upgraded(
    server: ApiServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(server, older())
    assert server.apply(MODEL).returncode == 0
    wrote, stored = await write(world, server)
    assert wrote
    (variant,) = stored["variants"]
    assert (stored["observedGeneration"], variant["class"], variant["ready"]) == (1, "l4", 1)
    assert "capabilities" not in stored
    assert "coldStartSeconds" not in variant
    assert await write(world, server) == (False, stored), "nothing has changed"
    changed = STATUS.model_copy(update={"variants": (VARIANT.model_copy(update={"desired": 2}),)})
    assert (await write(world, server, changed))[1]["variants"][0]["desired"] == 2

    monkeypatch.setattr(definitions, "RECHECK_SECONDS", 0.0)
    install(server, CRD)
    until_upgraded = 0
    while "capabilities" not in (await write(world, server))[1]:
        until_upgraded += 1
        assert until_upgraded < 100
    _, stored = await write(world, server)
    assert (stored["capabilities"], stored["variants"][0]["coldStartSeconds"]) == (["chat"], 7)
