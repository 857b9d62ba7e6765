"""`shoal wake`: wakes a Model without sending a request."""

import asyncio
from datetime import UTC, datetime
from typing import Any, Final

import click
from pydantic import ValidationError

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.cli.client import run_command
from shoal.cli.options import kubeconfig_options
from shoal.cli.output import emit, output_option
from shoal.core.layers.obstacle import obstacle
from shoal.core.status.conditions import find
from shoal.kube.client import KubeClient
from shoal.kube.resources import MODELS

MANAGER: Final = "kubectl-shoal"
POLL_SECONDS: Final = 0.5
_COLUMNS: Final = ("model", "readySeconds", "message")


@click.command()
@click.argument("model")
@click.option("-n", "--namespace", help="Default: the kubeconfig context's.")
@click.option("--wait", is_flag=True, help="Wait until a replica is ready, and show progress.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Timeout of --wait in seconds."
)
@output_option()
@kubeconfig_options
def command(
    model: str,
    namespace: str | None,
    wait: bool,
    timeout: float,
    output: str,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Wake a Model as a request would, ahead of expected load or to test that it starts.

    MODEL is a name, or model/name as kubectl writes it. The command sets the annotation shoal.dev/wake on the Model and
    needs the right to patch it.
    """
    programs = output != "table"  # read one document, and people see the progress meanwhile

    async def work() -> None:
        async with await KubeClient.from_environment(kubeconfig=kubeconfig, context=context) as client:
            where = namespace or client.namespace or "default"
            name = model.removeprefix("model/")
            model_read = await client.get(MODELS, name, where)
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            patch: JsonObject = {"metadata": {"annotations": {names.ANNOTATION_WAKE: now}}}
            await client.merge_patch(MODELS, name, where, patch, manager=MANAGER)
            message = effect(model_read)
            click.echo(f"{where}/{name}: {message}", err=programs)
            row: dict[str, Any] = {"model": f"{where}/{name}", "readySeconds": None, "message": message}
            try:
                if wait:
                    row["readySeconds"] = await _wait(client, name, where, timeout, err=programs)
            finally:
                emit(output, row, [row], _COLUMNS)

    try:
        run_command(work())
    except KeyboardInterrupt:
        return


def effect(raw: JsonObject) -> str:
    """Describes the effect of waking the Model in its current state."""
    annotations: JsonObject = raw["metadata"].get("annotations") or {}
    if annotations.get(names.ANNOTATION_PAUSED) == "true":
        return f"is paused: it wakes when the annotation {names.ANNOTATION_PAUSED} is gone"
    try:
        model = Model.model_validate(raw)
    except ValidationError:
        return "is asked to wake, but this version finds it invalid: see its condition Accepted"
    counts = model.status.replicas if model.status else None
    idle = model.spec.scaling.idle_seconds
    then = (
        f"and keeps {model.spec.scaling.min_replicas} in any case"
        if model.spec.scaling.min_replicas
        else f"and goes back to zero {idle} s after the last request"
    )
    if counts is not None and counts.ready:
        return f"has {counts.ready} replica{'s' if counts.ready > 1 else ''}: counts as a request now, {then}"
    if (fault := obstacle(model)) is not None:
        return f"cannot start now: {fault.reason}: {fault.message}; the wake counts as a request now, {then}"
    if counts is not None and counts.desired:
        return f"is starting already: counts as a request now, {then}"
    return f"wakes on the cheapest class that fits and is free, {then}"


async def _wait(client: KubeClient, name: str, namespace: str, timeout: float, *, err: bool) -> float:
    """The seconds until a replica was ready. Prints progress; `err`: to standard error. Raises ClickException with the
    Model's condition when no replica becomes ready in time."""
    loop = asyncio.get_running_loop()
    began, printed = loop.time(), ""
    while True:
        raw = await client.get(MODELS, name, namespace)
        try:
            model = Model.model_validate(raw)
        except ValidationError as error:
            raise click.ClickException(f"model/{name} is not valid: {error.errors()[0]['msg']}") from None
        ready = find(model.status.conditions if model.status else (), reasons.READY)
        line = f"{ready.reason}: {ready.message}" if ready else "the operator has not reconciled it yet: is it running?"
        if model.status and model.status.replicas and model.status.replicas.ready:
            waited = loop.time() - began
            click.echo(f"  a replica serves after {waited:.1f} s", err=err)
            return waited
        if line != printed:
            printed = line
            click.echo(f"  {line}", err=err)
        if loop.time() - began > timeout:
            raise click.ClickException(f"no replica serves after {timeout:.0f} s: {line}")
        await asyncio.sleep(POLL_SECONDS)
