"""The command `shoal support bundle`, and what it collects."""

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click
import yaml

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.client import run_command
from shoal.cli.options import NAMESPACE, kubeconfig_options
from shoal.cli.output import emit, output_option
from shoal.cli.support.clean import clean, clean_tenant, clean_text
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.resources import (
    CONFIGMAPS,
    DEPLOYMENTS,
    DEVICECLASSES,
    EVENTS,
    GPUCLASSES,
    HPAS,
    JOBS,
    LEASES,
    LORA_ADAPTERS,
    LORA_POOLS,
    MODEL_ROUTES,
    MODELS,
    NODES,
    PDBS,
    PERSISTENTVOLUMECLAIMS,
    PODS,
    RESOURCECLAIMS,
    RESOURCESLICES,
    SCALEDOBJECTS,
    TENANTS,
    WORKLOADS,
    Resource,
)

MOST_OBJECTS: Final = 5_000
"""Of one kind."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Of the whole bundle, uncompressed."""
_ENGINES: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
_OWN: Final = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
_STATEFULSETS: Final = Resource("apps", "v1", "statefulsets", "StatefulSet")
_DAEMONSETS: Final = Resource("apps", "v1", "daemonsets", "DaemonSet")
_CRDS: Final = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
_CLUSTER_EVENTS: Final = "default"
"""Namespace of the events of objects without a namespace."""
_COLUMNS: Final = ("file", "files", "bytes", "missing")
_README: Final = """A support bundle of Shoal, made by `shoal support bundle`.

In it: Shoal's objects (Models, LoRAPools, LoRAAdapters, ModelRoutes, GPUClasses, Tenants) and the Deployments, Jobs,
pods and disruption budgets made for them, with their autoscalers, Workloads of Kueue and events; nodes and their
events; in Shoal's namespace its workloads, events, the operator's configuration and logs. NAME.previous.log is the log
of a container before its last restart.

Not in it: Secrets, values of environment variables, hashes of tenants' keys, request logs, usage records, prompts and
answers; of Tenants `externalID`, patterns of redaction rules, and values of labels and annotations that are neither
Shoal's nor Helm's. Credentials in texts that are known by their form or their name were replaced by (removed).

Names of Models, tenants, their keys, namespaces and nodes, Tenants' plans, limits, budgets and grants are in it, and
labels and annotations of all other objects: look through the files before you publish it.

missing.txt says what could not be read, and why.
"""


@dataclass(slots=True)
class Collected:
    """Files of a bundle, by path."""

    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    missing: list[str] = field(default_factory=list[str])
    size: int = 0

    def add(self, path: str, text: str) -> None:
        """Adds a file, unless the bundle would become too large."""
        content = text.encode(errors="replace")
        if self.size + len(content) > MOST_BYTES:
            self.missing.append(f"{path}: the bundle is full ({MOST_BYTES // 2**20} MiB)")
            return
        self.size += len(content)
        self.files[path] = content

    def lacks(self, what: str, error: Exception) -> None:
        self.missing.append(f"{what}: {clean_text(str(error) or type(error).__name__)}")


@click.group()
def support() -> None:
    """Collect what a bug report needs."""


@support.command()
@click.option("-n", "--namespace", help="Only Models, pools and adapters of this namespace. Default: all.")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, dir_okay=False), help="Default: ./shoal-support-TIME.tar.gz."
)
@click.option("--lines", type=click.IntRange(1, 100_000), default=2_000, show_default=True, help="Of each log.")
@click.option("--engine-logs", is_flag=True, help="Logs of engine pods too. An engine may log parts of requests.")
@click.option(
    "--operator-namespace",
    envvar="SHOAL_NAMESPACE",
    default=NAMESPACE,
    show_default=True,
    help="Namespace of Shoal.",
)
@output_option(help="How what was written is told. The bundle itself is always an archive of YAML and logs.")
@kubeconfig_options
def bundle(
    namespace: str | None,
    file: Path | None,
    lines: int,
    engine_logs: bool,
    operator_namespace: str,
    output: str,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Write objects, events and logs of an installation into one file, without secrets.

    Everything that can be read is collected; the file missing.txt names the rest. Look through the bundle before you
    publish it: it has names of Models, tenants and nodes, and tenants' limits and budgets.
    """
    target = file or Path(f"shoal-support-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar.gz")
    if target.exists():
        raise click.ClickException(f"{target} exists already: name another file with --file")

    async def work() -> Collected:
        async with await KubeClient.from_environment(kubeconfig=kubeconfig, context=context) as client:
            return await collect(client, operator_namespace, only=namespace, lines=lines, engine_logs=engine_logs)

    found = run_command(work())
    try:
        write(target, found)
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror or error}") from None
    size = target.stat().st_size
    row = {"file": str(target), "files": len(found.files), "bytes": size, "missing": found.missing}
    if not emit(output, row, [row | {"missing": "; ".join(found.missing)}], _COLUMNS):
        click.echo(f"{target}: {len(found.files)} files, {size / 2**20:.1f} MiB")
    if found.missing:
        click.echo(f"{len(found.missing)} parts could not be read; missing.txt in the bundle says why", err=True)
    click.echo("Look through it before you publish it: its README.txt says what is in it.", err=True)


async def collect(
    client: KubeClient, namespace: str, *, only: str | None = None, lines: int = 2_000, engine_logs: bool = False
) -> Collected:
    """Reads the cluster. `namespace` is Shoal's own; `only` restricts Models and what belongs to them."""
    found = Collected()
    found.add("README.txt", _README)
    about = {"shoal": version("shoal"), "time": datetime.now(UTC).isoformat(timespec="seconds"), "namespace": namespace}
    found.add("about.yaml", yaml.safe_dump(about, sort_keys=False))
    parts: tuple[tuple[str, Resource, str | None, str | None], ...] = (
        ("cluster", GPUCLASSES, None, None),
        ("cluster", TENANTS, None, None),
        ("cluster", NODES, None, None),
        ("cluster", RESOURCESLICES, None, None),
        ("cluster", DEVICECLASSES, None, None),
        ("models", MODELS, only, None),
        ("models", LORA_POOLS, only, None),
        ("models", LORA_ADAPTERS, only, None),
        ("models", MODEL_ROUTES, only, None),
        ("models", DEPLOYMENTS, only, _OWN),
        ("models", JOBS, only, _OWN),
        ("models", PODS, only, _ENGINES),
        ("models", RESOURCECLAIMS, only, _OWN),
        ("models", PDBS, only, _OWN),
        ("installation", DEPLOYMENTS, namespace, None),
        ("installation", _STATEFULSETS, namespace, None),
        ("installation", _DAEMONSETS, namespace, None),
        ("installation", PODS, namespace, None),
        ("installation", PERSISTENTVOLUMECLAIMS, namespace, None),
        ("installation", HPAS, namespace, None),
        ("installation", PDBS, namespace, None),
        ("installation", LEASES, namespace, None),
        ("installation", EVENTS, namespace, None),
    )
    read: dict[tuple[str, Resource], list[JsonObject]] = {}
    for folder, kind, where, selector in parts:
        listed = read[folder, kind] = await _listed(client, found, kind, where, selector, told=folder)
        found.add(f"{folder}/{kind.plural}.yaml", _dump(listed, clean_tenant if kind is TENANTS else clean))
    engines = read["models", PODS]
    await _autoscalers(client, found, only, read["models", DEPLOYMENTS])
    await _optional(client, found, namespace, only, engines)
    ours = (MODELS, LORA_POOLS, LORA_ADAPTERS, MODEL_ROUTES, PODS)
    spaces = {str(each["metadata"]["namespace"]) for kind in ours for each in read["models", kind]}
    await _events(client, found, only, spaces)
    await _one(client, found, CONFIGMAPS, "shoal-operator", namespace)
    await _definitions(client, found)
    for pod in [*read["installation", PODS], *(engines if engine_logs else [])]:
        await _logs(client, found, pod, lines)
    if found.missing:
        found.add("missing.txt", "\n".join(found.missing) + "\n")
    return found


async def _listed(
    client: KubeClient,
    found: Collected,
    kind: Resource,
    namespace: str | None,
    selector: str | None = None,
    keep: Callable[[JsonObject], bool] = lambda _: True,
    *,
    told: str,
) -> list[JsonObject]:
    """Objects that `keep` wants. `told`: the folder that they are for."""
    click.echo(f"reading {kind.plural} ({told})", err=True)
    listed: list[JsonObject] = []
    try:
        async for each in client.list(kind, namespace=namespace, label_selector=selector):
            if not keep(each):
                continue
            if len(listed) == MOST_OBJECTS:
                found.missing.append(f"{kind.plural}: only the first {MOST_OBJECTS}")
                break
            listed.append(each)
    except (KubeError, OSError, TimeoutError) as error:
        found.lacks(kind.plural if namespace is None else f"{kind.plural} in namespace {namespace}", error)
    return listed


async def _autoscalers(client: KubeClient, found: Collected, only: str | None, deployments: list[JsonObject]) -> None:
    """HorizontalPodAutoscalers of Models' Deployments. KEDA makes them, and sometimes a person does by mistake."""
    ours = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in deployments}

    def scales(hpa: JsonObject) -> bool:
        metadata: JsonObject = hpa["metadata"]
        labels: JsonObject = metadata.get("labels") or {}
        spec: JsonObject = hpa.get("spec") or {}
        target: JsonObject = spec.get("scaleTargetRef") or {}
        return labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY or (
            target.get("kind") == DEPLOYMENTS.kind and (metadata.get("namespace"), target.get("name")) in ours
        )

    listed = await _listed(client, found, HPAS, only, keep=scales, told="models")
    found.add(f"models/{HPAS.plural}.yaml", _dump(listed))


async def _optional(
    client: KubeClient, found: Collected, namespace: str, only: str | None, engines: list[JsonObject]
) -> None:
    """Objects of KEDA and Kueue, where the cluster has these kinds."""
    if await _served(client, SCALEDOBJECTS):
        for folder, where, selector in (("models", only, _OWN), ("installation", namespace, None)):
            listed = await _listed(client, found, SCALEDOBJECTS, where, selector, told=folder)
            found.add(f"{folder}/{SCALEDOBJECTS.plural}.yaml", _dump(listed))
    if await _served(client, WORKLOADS):
        uids = {each["metadata"].get("uid") for each in engines}

        def of_an_engine(workload: JsonObject) -> bool:
            # Kueue gives a pod's Workload none of the pod's labels.
            owners: list[JsonObject] = workload["metadata"].get("ownerReferences") or []
            return any(owner.get("uid") in uids for owner in owners)

        listed = await _listed(client, found, WORKLOADS, only, keep=of_an_engine, told="models")
        found.add(f"models/{WORKLOADS.plural}.yaml", _dump(listed))


async def _served(client: KubeClient, kind: Resource) -> bool:
    """Whether the cluster has a kind. Asked first: a list of an unknown kind is forbidden to most people."""
    try:
        return kind.plural in await client.discover(kind.group, kind.version)
    except (KubeError, OSError, TimeoutError):
        return True  # the list will say why it cannot be read


async def _events(client: KubeClient, found: Collected, only: str | None, spaces: set[str]) -> None:
    """Events of objects without a namespace, such as nodes and GPUClasses, and of the namespaces that have Models,
    routes, pools, adapters or engine pods."""
    listed = await _listed(client, found, EVENTS, _CLUSTER_EVENTS, keep=_of_the_cluster, told="cluster")
    found.add("cluster/events.yaml", _dump(listed))
    for space in sorted({only} if only is not None else spaces):
        listed = await _listed(client, found, EVENTS, space, told="models")
        found.add(f"models/events/{space}.yaml", _dump(listed))


def _of_the_cluster(event: JsonObject) -> bool:
    about: JsonObject = event.get("regarding") or {}
    return not about.get("namespace")


async def _one(client: KubeClient, found: Collected, kind: Resource, name: str, namespace: str) -> None:
    try:
        found.add(f"installation/{kind.plural}.yaml", _dump([await client.get(kind, name, namespace)]))
    except (KubeError, OSError, TimeoutError) as error:
        found.lacks(f"{kind.kind} {namespace}/{name}", error)


async def _definitions(client: KubeClient, found: Collected) -> None:
    """Which CustomResourceDefinitions of Shoal the cluster has, and in which state; their schemas are in the chart."""
    listed: list[JsonObject] = []
    for kind in (MODELS, LORA_POOLS, LORA_ADAPTERS, MODEL_ROUTES, GPUCLASSES, TENANTS):
        try:
            each = await client.get(_CRDS, f"{kind.plural}.{kind.group}")
        except NotFound:
            found.missing.append(f"the cluster has no CustomResourceDefinition {kind.plural}.{kind.group}")
        except (KubeError, OSError, TimeoutError) as error:
            found.lacks(f"CustomResourceDefinition {kind.plural}.{kind.group}", error)
        else:
            listed.append({"metadata": each["metadata"], "status": each.get("status")})
    found.add("cluster/customresourcedefinitions.yaml", _dump(listed))


async def _logs(client: KubeClient, found: Collected, pod: JsonObject, lines: int) -> None:
    metadata: JsonObject = pod["metadata"]
    spec: JsonObject = pod.get("spec") or {}
    name, namespace = str(metadata["name"]), str(metadata["namespace"])
    status: JsonObject = pod.get("status") or {}
    containers: list[JsonObject] = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    states: list[JsonObject] = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    restarted = {str(each.get("name")) for each in states if each.get("restartCount")}
    for container in containers:
        which = str(container.get("name"))
        for previous in (True, False) if which in restarted else (False,):
            kind = "previous log" if previous else "log"
            try:
                text = await client.log(name, namespace, container=which, lines=lines, previous=previous)
            except (KubeError, OSError, TimeoutError) as error:
                found.lacks(f"{kind} of {which} in pod {namespace}/{name}", error)
            else:
                ending = "previous.log" if previous else "log"
                found.add(f"logs/{namespace}/{name}/{which}.{ending}", clean_text(text))


def _dump(listed: list[JsonObject], cleaned: Callable[[JsonObject], Any] = clean) -> str:
    data: Mapping[str, Any] = {"apiVersion": "v1", "kind": "List", "items": [cleaned(each) for each in listed]}
    # Through JSON: YAML would write aliases for parts that are equal.
    return yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, allow_unicode=True)


def write(target: Path, found: Collected) -> None:
    """Writes the bundle, readable by its owner only. Raises OSError."""
    root = target.name.removesuffix(".gz").removesuffix(".tar")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path, content in found.files.items():
            entry = tarfile.TarInfo(f"{root}/{path}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(content))
