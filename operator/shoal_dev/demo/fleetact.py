"""The act on a mixed fleet: three Models on three classes, one that fits nowhere, one that waits and gets its GPUs."""

import time
from typing import Final

import click
from rich.markup import escape
from rich.table import Table

from shoal.api import names, reasons
from shoal.api.meta import GROUP
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import Objects, condition, until

FILE: Final = steps.EXAMPLES / "fleet.yaml"
NAMESPACE: Final = "fleet"
PLURAL: Final = "models"
PLACED: Final = ("small-8b", "medium-24b", "large-104b")
TOO_LARGE: Final = "giant-405b"
WAITS: Final = "nightly-8b"
IN_ITS_WAY: Final = "small-8b"


def run(cluster: DemoCluster, stages: Stages, timeout: float) -> None:
    """Applies the example, shows what was decided and why, then makes room for the one that waits.

    Raises ClickException with what the conditions say when it does not come to that within `timeout` seconds.
    """
    console = stages.console
    console.print("\n[bold]A mixed fleet[/]: five Models, sized as spec.sizing says (their weights are tiny stand-ins)")
    with stages.stage("Three Models placed and Ready, one that fits nowhere, one that waits"):
        _clear(cluster, timeout)
        cluster.kubectl("apply", "-f", str(FILE))
        models = until(cluster, PLURAL, NAMESPACE, decided, timeout)
    console.print(picture({name: models[name] for name in (*PLACED, TOO_LARGE, WAITS)}))
    for name in (TOO_LARGE, WAITS):
        told = condition(models[name], reasons.PLACED)
        console.print(f"  [bold]{name}[/] {told.get('reason')}: {escape(told.get('message', ''))}", soft_wrap=True)
    with stages.stage(f"{WAITS} has its GPUs, since {IN_ITS_WAY} was deleted"):
        cluster.kubectl("delete", f"{PLURAL}.{GROUP}", IN_ITS_WAY, "-n", NAMESPACE, timeout=timeout)
        models = until(cluster, PLURAL, NAMESPACE, lambda found: _is(found, WAITS, reasons.READY, "True"), timeout)
    console.print(picture({WAITS: models[WAITS]}))


def _clear(cluster: DemoCluster, timeout: float) -> None:
    """Takes away what an earlier run left: what runs stays, so its Models would hold the GPUs of this one's."""
    for namespace in steps.ACTS:
        cluster.kubectl("delete", f"{PLURAL}.{GROUP}", "--all", "-n", namespace, timeout=timeout)
    deadline = time.monotonic() + timeout
    engines = ("-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}")
    while any(cluster.get("pods", "-n", namespace, *engines) for namespace in steps.ACTS):
        if time.monotonic() > deadline:
            raise click.ClickException(f"pods of an earlier run do not go from the namespaces {', '.join(steps.ACTS)}")
        time.sleep(0.2)


def decided(models: Objects) -> bool:
    """Whether everything is as the example says that it will be."""
    return (
        all(_is(models, name, reasons.READY, "True") for name in PLACED)
        and _is(models, TOO_LARGE, reasons.PLACED, "False")
        and condition(models[TOO_LARGE], reasons.PLACED).get("reason") == reasons.NO_FIT
        and _is(models, WAITS, reasons.PLACED, "False")
    )


def _is(models: Objects, name: str, type: str, status: str) -> bool:
    return name in models and condition(models[name], type).get("status") == status


def picture(models: Objects) -> Table:
    """A line per Model: its class, GPUs, KV tokens as predicted, cost, start."""
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("  model", "sized as", "class", "GPUs", "KV tokens", "cost/h", "cold start"):
        table.add_column(heading, justify="right" if heading in ("GPUs", "KV tokens", "cost/h") else "left")
    for name, model in models.items():
        sizing = model["spec"].get("sizing", {}).get("weightBytes", "its config says")
        used = [v for v in model.get("status", {}).get("variants", []) if v.get("desired")]
        for variant in used or [{}]:
            tokens = variant.get("kvTokensPerReplica", {}).get("predicted")
            start = variant.get("coldStartSeconds")
            table.add_row(
                f"  {name}",
                sizing,
                variant.get("class", "[red]none[/]"),
                str(variant.get("gpusPerReplica", "-")),
                "-" if tokens is None else f"{tokens:,}",
                variant.get("hourlyCost", "-"),
                "-" if start is None else f"{start} s",
            )
    return table


def delete(cluster: DemoCluster) -> None:
    """Takes the example away again."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(FILE), timeout=300)
