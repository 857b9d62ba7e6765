"""The act on scaling: zero, a request that wakes the Model, load, scale out, idle, zero again."""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Final, TypeVar

import click
import yaml

from shoal.api.decisions import ModelScaling
from shoal.api.meta import GROUP, JsonObject
from shoal.api.model import Driver
from shoal.api.reasons import NO_CAPACITY, SCALED_TO_ZERO
from shoal.cli.client import run_command
from shoal.cli.scaling.why import render as why
from shoal.cli.services import OperatorClient
from shoal.kube.client import KubeClient
from shoal_dev.demo import steps
from shoal_dev.demo.clients import DemoClients
from shoal_dev.demo.clusters import NAMESPACE as SHOAL_NAMESPACE
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.liveview import LiveView, history
from shoal_dev.demo.stages import Stages

T = TypeVar("T")

FILE: Final = steps.EXAMPLES / steps.SCALING_FILE
NAMESPACE: Final = "elastic"
MODEL: Final = "bursty"
KEY: Final = "sk-demo-elastic-2d91c7a40b"
"""The key whose hash stands in the example: public, not a secret."""
CLIENTS: Final = 16
MOST: Final = 3
"""The example's maxReplicas."""
TOKENS: Final = 64
"""Of an answer."""
SHOWN: Final = 20
"""Decisions that are printed at the end, at most."""


def run(cluster: DemoCluster, stages: Stages, timeout: float, driver: Driver = "BuiltIn") -> None:
    """Plays the act and prints what happened. `driver`: who writes the Model's replicas.

    Raises ClickException with what the Model says when a step does not come within `timeout` seconds, or when a
    request was not answered.
    """
    console = stages.console
    console.print(
        f"\n[bold]Scaling[/]: {NAMESPACE}/{MODEL} goes to zero when nobody asks, wakes with the first request, "
        f"and has up to {MOST} replicas under load" + ("; KEDA and its HPA write them" if driver == "KEDA" else "")
    )
    cluster.kubectl("delete", f"models.{GROUP}", MODEL, "-n", NAMESPACE, "--ignore-not-found", timeout=timeout)
    cluster.kubectl(
        "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": _objects(driver)})
    )
    with cluster.gateway() as url:
        run_command(_play(cluster, DemoClients(url, KEY, f"{NAMESPACE}/{MODEL}"), stages, timeout))
    if driver == "KEDA":
        console.print(f"\n[bold]kubectl get scaledobjects,hpa -n {NAMESPACE}[/]")
        console.print(cluster.kubectl("get", "scaledobjects,hpa", "-n", NAMESPACE), markup=False, soft_wrap=True)


def _objects(driver: Driver) -> list[JsonObject]:
    """The example, with its Model's driver."""
    objects: list[JsonObject] = list(yaml.safe_load_all(FILE.read_text()))
    for each in objects:
        if each["kind"] == "Model":
            each["spec"]["scaling"]["driver"] = driver
    return objects


async def _play(cluster: DemoCluster, clients: DemoClients, stages: Stages, timeout: float) -> None:
    console = stages.console
    async with await KubeClient.from_environment(kubeconfig=cluster.tools.env.get("KUBECONFIG")) as client:
        operator = OperatorClient(client, SHOAL_NAMESPACE)
        view = LiveView(operator, NAMESPACE, MODEL, console)
        async with view:
            with stages.stage("A new Model starts one replica, and goes to zero when nobody asks", spin=False):
                await view.until(
                    lambda m: m.ready_replicas >= 1, timeout, "the first replica starts, so that a fault shows"
                )
                await view.until(at_zero, timeout, "nobody asks: it goes to zero")
            with stages.stage("A request at zero was held, woke the Model and was answered", spin=False):
                began = time.monotonic()
                async with _beside(clients.one(TOKENS)) as asked:
                    await view.until(lambda m: m.wanted >= 1, timeout, "one request waits; the Model wakes", asked)
                    woken = time.monotonic() - began
                    await view.until(
                        lambda m: m.ready_replicas >= 1, timeout, "one request waits; a replica starts", asked
                    )
            first = asked.result().first_seconds
            with stages.stage(f"{CLIENTS} clients at once: out to as many replicas as they need", spin=False):
                async with _beside(clients.many(CLIENTS, TOKENS)) as asking:
                    doing = f"{CLIENTS} clients ask again and again"
                    await view.until(scaled_out, timeout, doing, asking)
                    clients.enough.set()
            with stages.stage("Nobody asks any more: back to zero", spin=False):
                await view.until(at_zero, timeout, "nobody asks: back to zero")
        answer = await operator.one(NAMESPACE, MODEL)
    stats = answer.models[0]
    console.print(f"\n  first token {first:.1f} s after a request at zero (the decision was seen after {woken:.1f} s)")
    if clients.answers:
        middle = statistics.median(heard.first_seconds for heard in clients.answers)
        console.print(f"  under load {len(clients.answers)} answered, first token after {middle:.1f} s in the median")
    console.print(f"  replicas that served: {history(view.frames)}", soft_wrap=True)
    console.print(f"\n[bold]kubectl shoal why model/{MODEL} -n {NAMESPACE}[/]")
    console.print(why(stats.model_copy(update={"decisions": stats.decisions[:SHOWN]}), answer.time, rules=False))
    if clients.problems:
        count = len(clients.problems)
        raise click.ClickException(f"{count} requests were not answered; the first: {clients.problems[0]}")


def scaled_out(model: ModelScaling) -> bool:
    """As many replicas serve as may, or as the cluster has GPUs for."""
    return model.ready_replicas >= MOST or (model.ready_replicas > 1 and model.reason == NO_CAPACITY)


def at_zero(model: ModelScaling) -> bool:
    """No replica is wanted, none serves any more, and it says so."""
    return model.wanted == 0 and model.ready_replicas == 0 and model.reason == SCALED_TO_ZERO


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[object, object, T]) -> AsyncGenerator[asyncio.Task[T]]:
    """Runs `work` beside the body and to its end after it; when the body fails, it is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield task
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def delete(cluster: DemoCluster) -> None:
    """Takes the example away again."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(FILE), timeout=300)
