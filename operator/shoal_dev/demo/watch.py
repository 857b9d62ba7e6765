"""The wait for Ready, told as it happens: Models with their conditions, pods with what their containers do."""

import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from shoal.api import names, reasons
from shoal.api.meta import GROUP
from shoal_dev.demo.clusters import DemoCluster

Objects = dict[str, dict[str, Any]]


def condition(obj: dict[str, Any], type: str) -> dict[str, Any]:
    """The condition of this type, or {} while there is none."""
    conditions: list[dict[str, Any]] = obj.get("status", {}).get("conditions", [])
    unset: dict[str, Any] = {}
    return next((c for c in conditions if c["type"] == type), unset)


def message(obj: dict[str, Any]) -> str:
    """What its Ready condition says."""
    told = condition(obj, reasons.READY)
    return f"{told.get('reason', 'no status')}: {told.get('message', 'is the operator running?')}"


def named(cluster: DemoCluster, plural: str, namespace: str) -> Objects:
    """The objects of a kind of Shoal's, by name."""
    return {obj["metadata"]["name"]: obj for obj in cluster.get(f"{plural}.{GROUP}", "-n", namespace)}


def until(
    cluster: DemoCluster, plural: str, namespace: str, done: Callable[[Objects], bool], timeout: float
) -> Objects:
    """The objects by name, once `done` says so. Raises ClickException with what they say instead."""
    deadline = time.monotonic() + timeout
    while not done(found := named(cluster, plural, namespace)):
        if time.monotonic() > deadline:
            why = "\n".join(f"  {name}: {message(obj)}" for name, obj in found.items())
            raise click.ClickException(f"the {plural} of {namespace} are not as expected after {timeout:.0f} s:\n{why}")
        time.sleep(0.2)
    return found


def pod_doing(pod: dict[str, Any]) -> str:
    """What a pod is at, in a few words."""
    status = pod.get("status", {})
    if not pod["spec"].get("nodeName"):
        return condition(pod, "PodScheduled").get("message", "waiting for a node")
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        state = container.get("state", {})
        if waiting := state.get("waiting"):
            if waiting.get("reason") not in ("PodInitializing", "ContainerCreating"):
                return f"{container['name']}: {waiting.get('reason')} {waiting.get('message', '')}"[:90]
        elif container["name"] == names.CONTAINER_STAGE and "running" in state:
            return "fetching weights"
    if condition(pod, "Ready").get("status") == "True":
        return "serving"
    running = [c["name"] for c in status.get("containerStatuses", []) if "running" in c.get("state", {})]
    return "engine is loading" if names.CONTAINER_ENGINE in running else "starting"


def picture(models: list[dict[str, Any]], pods: list[dict[str, Any]]) -> Table:
    """Models and, below each, its pods."""
    table = Table(show_edge=False, box=None, pad_edge=False, title_justify="left")
    for column in ("object", "ready", "class / node", "what"):
        table.add_column(column, overflow="fold")
    for model in models:
        ready = condition(model, reasons.READY)
        classes = [v["class"] for v in model.get("status", {}).get("variants", []) if v.get("desired")]
        table.add_row(
            f"[bold]model/{model['metadata']['name']}[/]",
            "[green]yes[/]" if ready.get("status") == "True" else "no",
            ", ".join(classes),
            f"{ready.get('reason', 'not seen yet')}: {ready.get('message', '')}"[:100],
        )
        for pod in pods:
            if pod["metadata"].get("labels", {}).get(names.LABEL_MODEL) == model["metadata"]["name"]:
                table.add_row(f"  pod/{pod['metadata']['name']}", "", pod["spec"].get("nodeName", ""), pod_doing(pod))
    return table


def wait_until_ready(cluster: DemoCluster, namespace: str, console: Console, timeout: float) -> list[dict[str, Any]]:
    """Waits until every Model of the namespace is Ready, and returns them.

    Raises ClickException with what the conditions say when `timeout` seconds are over or a Model is Stalled for good.
    """
    deadline = time.monotonic() + timeout
    told = ""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while True:
            objects = cluster.get(f"models.{GROUP},pods", "-n", namespace)
            models = [o for o in objects if o["kind"] == "Model"]
            pods = [o for o in objects if o["kind"] == "Pod"]
            if console.is_terminal:
                live.update(picture(models, pods))
            else:
                # A line only when something changed: a log of the wait, not a live view.
                now = "; ".join(
                    f"{m['metadata']['name']}: {condition(m, reasons.READY).get('reason', 'not seen yet')}"
                    for m in models
                )
                if now != told:
                    told = now
                    console.print(f"  {now}", markup=False, highlight=False)
            if models and all(condition(m, reasons.READY).get("status") == "True" for m in models):
                return models
            if time.monotonic() > deadline:
                why = "\n".join(
                    f"  model/{m['metadata']['name']}: {condition(m, reasons.READY).get('reason', 'no status')}: "
                    f"{condition(m, reasons.READY).get('message', 'is the operator running?')}"
                    for m in models
                )
                raise click.ClickException(f"not Ready after {timeout:.0f} s:\n{why}")
            time.sleep(0.5)
