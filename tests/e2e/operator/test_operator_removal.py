"""The commands under "Removing" in docs/install.md, run as they stand there, with the real helm: nothing is left."""

import asyncio
import contextlib
import gc
import json
import os
import re
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import yaml

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.meta import API_VERSION, JsonObject
from shoal.core.health import Unit
from shoal.core.health.requests import CordonRequest, write
from shoal.kube.client import KubeClient
from shoal.kube.resources import GPUCLASSES, NAMESPACES, NODES, PERSISTENTVOLUMES, SECRETS
from shoal_dev.lab import binaries
from tests.e2e.operator.conftest import without_kopf
from tests.e2e.operator.test_operator_rbac import may, service_account_kubeconfig
from tests.support.charts import CHART, CRDS
from tests.support.controlplane import Fleet, StatusKubelet, add_node, control_plane
from tests.support.lora_fleet import adapter, adapter_with, pool, ready_for_adapters
from tests.support.operators import NAMESPACE, eventually, gpu_class, model, model_with, running_operator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PAGE: Final = Path(__file__).parents[3] / "docs" / "install.md"
VALUES: Final[JsonObject] = {"gateway": {"external": {"allowedHosts": [{"host": "api.example.com"}]}}}
RELEASE: Final = f"helm uninstall shoal --namespace {NAMESPACE}"
_NOT_KEPT: Final = ("events", "componentstatuses")
"""Events go by themselves after an hour."""


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """A cluster of its own: what other tests leave would hide what a removal leaves."""
    namespace = "chat"
    with control_plane(tmp_path / "plane") as plane:
        async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
            for name in (namespace, NAMESPACE):
                body: JsonObject = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
                await client.apply(NAMESPACES, body, manager="person")
            await add_node(client, "cpu-0", {}, 0)
            await add_node(client, "l4-0", {"nvidia.com/gpu.product": "L4"}, 2)
            await add_node(client, "l4-1", {"nvidia.com/gpu.product": "L4"}, 2)
            kubelet = StatusKubelet(client)
            task = asyncio.create_task(kubelet.run())
            try:
                yield Fleet(plane, client, kubelet, namespace)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    await without_kopf()
    gc.collect()


class Found(NamedTuple):
    kind: str
    namespace: str
    name: str


def commands(number: int) -> list[str]:
    """Of a block of commands under "Removing"."""
    section = PAGE.read_text().partition("\n## Removing\n")[2].partition("\n## ")[0]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[number]
    return block.replace("\\\n", " ").strip().splitlines()


def shell(fleet: Fleet, command: str, stdin: str | None = None) -> None:
    tools = binaries.find()
    assert tools is not None
    path = f"{tools.search_path()}:{os.environ['PATH']}"
    env = os.environ | {"KUBECONFIG": fleet.kubeconfig, "PATH": path, "HELM_CACHE_HOME": str(fleet.plane.directory)}
    done = subprocess.run(
        ["bash", "-ec", command], input=stdin, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def read(fleet: Fleet) -> dict[Found, JsonObject]:
    """Every object of the cluster."""
    kinds = fleet.plane.run_kubectl("api-resources", "--verbs=list", "-o", "name").split()
    wanted = ",".join(kind for kind in kinds if not kind.startswith(_NOT_KEPT))
    # A warning may follow the answer.
    listed, _ = json.JSONDecoder().raw_decode(fleet.plane.run_kubectl("get", wanted, "-A", "-o", "json"))
    return {
        Found(
            f"{o['kind']}.{o['apiVersion'].rpartition('/')[0]}",
            o["metadata"].get("namespace", ""),
            o["metadata"]["name"],
        ): o["metadata"]
        for o in listed["items"]
    }


def marks(metadata: JsonObject) -> set[str]:
    """What somebody else's object has of Shoal's."""
    keys = {*metadata.get("labels", {}), *metadata.get("annotations", {}), *metadata.get("finalizers", [])}
    return {key for key in keys if "shoal.dev" in key}


def left(fleet: Fleet, before: dict[Found, JsonObject]) -> list[Found]:
    """What was not there before, and what was there and has marks now."""
    return sorted(found for found, metadata in read(fleet).items() if found not in before or marks(metadata))


async def install(fleet: Fleet) -> OperatorConfig:
    await asyncio.to_thread(shell, fleet, f"helm install shoal-crds {CRDS}")
    command = f"helm install shoal {CHART} --namespace {NAMESPACE} -f -"
    await asyncio.to_thread(shell, fleet, command, json.dumps(VALUES))
    config = fleet.plane.run_kubectl("get", "configmap", "shoal-operator", "-n", NAMESPACE, "-o", "json")
    return OperatorConfig.model_validate(yaml.safe_load(json.loads(config)["data"]["config.yaml"]))


async def use(fleet: Fleet) -> None:
    """One object of each kind, and what the operator makes for it."""
    client, ns = fleet.client, fleet.namespace
    ready_for_adapters(fleet)
    await fleet.apply(gpu_class("l4", "L4", cost="0.43", memory="24Gi"))
    await fleet.apply(model("chat", ns, source={"uri": "hf://owner/repo"}))
    await fleet.apply(
        {
            "apiVersion": API_VERSION,
            "kind": "Tenant",
            "metadata": {"name": "acme"},
            "spec": {"keys": [{"name": "a", "sha256": "0" * 64}], "models": [{"namespace": ns, "name": "chat"}]},
        }
    )
    target = {
        "name": "outside",
        "url": "https://api.example.com/v1",
        "model": "gpt-x",
        "credentials": {"name": "provider"},
    }
    await fleet.apply(
        {
            "apiVersion": API_VERSION,
            "kind": "ModelRoute",
            "metadata": {"name": "front", "namespace": ns},
            "spec": {"externalTargets": [target], "rules": [{"targets": [{"external": {"name": "outside"}}]}]},
        }
    )
    await fleet.apply(pool(ns, model="chat"))
    await fleet.apply(adapter(ns, "poet"))
    await model_with(client, ns, "chat", "Ready", "True")
    await adapter_with(client, ns, "poet", "Ready", "True")
    taken = write([CordonRequest(Unit("l4-0"), datetime.now(UTC))])
    body: JsonObject = {"metadata": {"annotations": {names.ANNOTATION_CORDON: taken}}}
    await client.merge_patch(GPUCLASSES, "l4", None, body, manager="person")
    await eventually(
        lambda: client.get(NODES, "l4-0"), lambda node: f"{names.QUARANTINE_PREFIX}l4" in node["metadata"]["labels"]
    )
    wanted = {"shoal-root-key", "shoal-key-gateway", "shoal-ca", "shoal-gateway-tls", names.EXTERNAL_KEYS_SECRET}

    async def secrets() -> set[str]:
        return {each["metadata"]["name"] for each in await fleet.all(SECRETS, namespace=NAMESPACE)}

    await eventually(secrets, lambda found: wanted <= found, what="the Secrets of an installation")
    await eventually(lambda: fleet.all(PERSISTENTVOLUMES), bool, what="the node cache's volume")


async def prepared(fleet: Fleet) -> dict[Found, JsonObject]:
    """The cluster as it was before Shoal; a person's Secret is part of it."""
    secret: JsonObject = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "provider", "namespace": fleet.namespace},
        "type": "shoal.dev/external-target",
        "stringData": {"host": "api.example.com", "token": "sk-x"},
    }
    await fleet.client.apply(SECRETS, secret, manager="person")
    return await asyncio.to_thread(read, fleet)


@contextlib.asynccontextmanager
async def installed(fleet: Fleet, folder: Path) -> AsyncGenerator[None]:
    config = await install(fleet)
    lease = f"leases.coordination.k8s.io/{names.LEASE_NAME}"
    for what in (("list", "models.shoal.dev", "-A"), ("update", lease, f"-n={NAMESPACE}")):
        await eventually(lambda w=what: may(fleet, *w), bool, what=f"may {' '.join(what)}")
    kubeconfig = service_account_kubeconfig(fleet, folder / "kubeconfig")
    async with (
        await KubeClient.from_environment(kubeconfig=kubeconfig) as own,
        running_operator(own, kubeconfig, config=config),
    ):
        yield


async def test_the_commands_of_the_page_leave_nothing(fleet: Fleet, tmp_path: Path) -> None:
    before = await prepared(fleet)
    steps = commands(0)
    gone = steps.index(RELEASE)
    async with installed(fleet, tmp_path):
        await use(fleet)
        for step in steps[:gone]:
            await asyncio.to_thread(shell, fleet, step)
    await asyncio.to_thread(shell, fleet, steps[gone])
    # What helm does not know is found, or the end of this test would say nothing.
    of_the_operator = {
        Found("Lease.coordination.k8s.io", NAMESPACE, names.LEASE_NAME),
        Found("Secret.", NAMESPACE, names.AUTHORITY_SECRET),
        Found("ConfigMap.", NAMESPACE, names.AUTHORITY_CONFIG_MAP),
    }
    assert of_the_operator <= set(await asyncio.to_thread(left, fleet, before))
    for step in steps[gone + 1 :]:
        await asyncio.to_thread(shell, fleet, step)
    await eventually(lambda: asyncio.to_thread(left, fleet, before), lambda found: not found, what="nothing is left")


async def test_nor_do_those_for_a_release_that_was_removed_first(fleet: Fleet, tmp_path: Path) -> None:
    before = await prepared(fleet)
    async with installed(fleet, tmp_path):
        await use(fleet)
    await asyncio.to_thread(shell, fleet, RELEASE)
    # Without an operator nobody deletes the node cache's volumes, so nobody waits for that.
    steps = [step for step in commands(0) if step != RELEASE and not step.startswith("kubectl wait --for=delete pv ")]
    for step in (*commands(1), *steps):
        await asyncio.to_thread(shell, fleet, step.replace("quarantine.shoal.dev/CLASS-", "quarantine.shoal.dev/l4-"))
    await eventually(lambda: asyncio.to_thread(left, fleet, before), lambda found: not found, what="nothing is left")
