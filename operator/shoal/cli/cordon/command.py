"""`shoal cordon` and `shoal uncordon`."""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.cli import gpus
from shoal.cli.client import run_command
from shoal.cli.cordon import units
from shoal.cli.cordon.units import ClassUnit
from shoal.cli.options import kubeconfig_options
from shoal.cli.output import emit, output_option
from shoal.core.health.requests import CordonRequest, cordoned, uncordoned
from shoal.core.layers.texts import shorten
from shoal.core.status.healthstatus import stored
from shoal.kube.client import KubeClient
from shoal.kube.errors import Conflict
from shoal.kube.resources import GPUCLASSES

MANAGER: Final = "kubectl-shoal"
_TRIES: Final = 5
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400}
_LONGEST_REASON: Final = 200
_COLUMNS: Final = ("gpuClass", "node", "device", "reason", "until")
Change = Callable[[GPUClass], dict[str, str | None]]


@dataclass(frozen=True, slots=True)
class _Changed:
    """A unit that was taken out of use, or put back."""

    found: ClassUnit
    text: str
    """What was done, for people."""
    reason: str | None = None
    until: str | None = None

    def row(self) -> dict[str, Any]:
        unit = self.found.unit
        return {
            "gpuClass": self.found.gpu_class.metadata.name,
            "node": unit.node,
            "device": unit.device or None,
            "reason": self.reason,
            "until": self.until,
        }


def _duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,4})([mhd])", value)
    if found is None:
        raise click.BadParameter("write minutes, hours or days, such as 30m, 12h or 7d")
    return timedelta(seconds=int(found[1]) * _SECONDS[found[2]])


_of_class = click.option("--class", "gpu_class", help="GPUClass, where several have GPUs there.")
_reason = click.option("--reason", default="", help="Why, for those who look later.")
_for = click.option("--for", "duration", callback=_duration, help="For how long, such as 12h. Default: until uncordon.")


@click.group()
def cordon() -> None:
    """Take GPUs out of Shoal's use: replicas there are replaced, then drained, and no new one is placed there.

    Only Shoal leaves the GPUs out; `kubectl cordon` keeps all pods off a node. The commands write the annotation
    shoal.dev/cordon of the GPUClass and need the right to patch it. No bound and no signal changes what a person says.
    """


@cordon.command("node")
@click.argument("node")
@_of_class
@_reason
@_for
@output_option()
@kubeconfig_options
def cordon_node(
    node: str, gpu_class: str | None, reason: str, duration: timedelta | None, output: str, kubeconfig: str | None,
    context: str | None,
) -> None:  # fmt: skip
    """Take all GPUs of NODE out of use."""

    async def work(client: KubeClient) -> AsyncIterator[_Changed]:
        for found in units.of_node(await gpus.read(client), node, gpu_class):
            yield await _cordon(client, found, reason, duration)

    _run(work, output, "cordoned", kubeconfig, context)


@cordon.command("gpu")
@click.argument("node")
@click.argument("device")
@_of_class
@_reason
@_for
@output_option()
@kubeconfig_options
def cordon_gpu(
    node: str, device: str, gpu_class: str | None, reason: str, duration: timedelta | None, output: str,
    kubeconfig: str | None, context: str | None,
) -> None:  # fmt: skip
    """Take one GPU of NODE out of use. DEVICE is its name in the ResourceSlice, such as gpu-3."""

    async def work(client: KubeClient) -> AsyncIterator[_Changed]:
        found = units.of_device(await gpus.read(client), node, device, gpu_class)
        yield await _cordon(client, found, reason, duration)

    _run(work, output, "cordoned", kubeconfig, context)


@click.group()
def uncordon() -> None:
    """Put GPUs back into use that a person or Shoal took out. Signals about them do not count for a day."""


@uncordon.command("node")
@click.argument("node")
@_of_class
@output_option()
@kubeconfig_options
def uncordon_node(
    node: str, gpu_class: str | None, output: str, kubeconfig: str | None, context: str | None
) -> None:  # fmt: skip
    """Put all GPUs of NODE back into use."""
    _put_back(node, None, gpu_class, output, kubeconfig, context)


@uncordon.command("gpu")
@click.argument("node")
@click.argument("device")
@_of_class
@output_option()
@kubeconfig_options
def uncordon_gpu(
    node: str, device: str, gpu_class: str | None, output: str, kubeconfig: str | None, context: str | None
) -> None:
    """Put one GPU of NODE back into use."""
    _put_back(node, device, gpu_class, output, kubeconfig, context)


def _put_back(
    node: str, device: str | None, gpu_class: str | None, output: str, kubeconfig: str | None, context: str | None
) -> None:
    async def work(client: KubeClient) -> AsyncIterator[_Changed]:
        for found in units.put_back(await gpus.read(client), node, device, gpu_class):
            yield await _uncordon(client, found)

    _run(work, output, "uncordoned", kubeconfig, context)


async def _cordon(client: KubeClient, found: ClassUnit, reason: str, duration: timedelta | None) -> _Changed:
    now = datetime.now(UTC).replace(microsecond=0)
    ends = now + duration if duration is not None else None
    request = CordonRequest(found.unit, now, shorten(reason, _LONGEST_REASON), ends)
    await _change(client, found.gpu_class, lambda live: cordoned(live.metadata.annotations, request))
    until = None if ends is None else f"{ends:%Y-%m-%dT%H:%M:%SZ}"
    text = "is taken out of use" + ("" if until is None else f" until {until}")
    return _Changed(found, text, request.reason or None, until)


async def _uncordon(client: KubeClient, found: ClassUnit) -> _Changed:
    stands = [q.since for q in stored(found.gpu_class) if q.unit == found.unit]
    at = max([datetime.now(UTC).replace(microsecond=0), *stands])  # the operator's clock may be ahead
    await _change(client, found.gpu_class, lambda live: uncordoned(live.metadata.annotations, [found.unit], at))
    return _Changed(found, "is put back into use")


async def _change(client: KubeClient, gpu_class: GPUClass, change: Change) -> None:
    """Raises Conflict where others keep changing the class."""
    name = gpu_class.metadata.name
    for left in reversed(range(_TRIES)):
        live = GPUClass.model_validate(await client.get(GPUCLASSES, name))
        version = live.metadata.resource_version  # two people may do this at once
        body: JsonObject = {"metadata": {"resourceVersion": version, "annotations": change(live)}}
        try:
            await client.merge_patch(GPUCLASSES, name, None, body, manager=MANAGER)
        except Conflict:
            if not left:
                raise
        else:
            return


def _run(
    work: Callable[[KubeClient], AsyncIterator[_Changed]],
    output: str,
    list_name: str,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Prints what was changed, also where a later change fails. `list_name`: its name in JSON and YAML."""
    rows: list[dict[str, Any]] = []

    async def connected() -> None:
        async with await KubeClient.from_environment(kubeconfig=kubeconfig, context=context) as client:
            async for each in work(client):
                rows.append(each.row())
                if output == "table":
                    click.echo(f"gpuclass/{each.found.gpu_class.metadata.name}: {each.found.unit} {each.text}")

    try:
        run_command(connected())
    finally:
        if rows:
            emit(output, {list_name: rows}, rows, _COLUMNS)
