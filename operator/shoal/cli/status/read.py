"""Reads Models, routes, pods and the progress of fetches from the API server.

Progress is read from the end of the stage container's log: most people who may view pods may read logs (the cluster's
`view` role includes it), while few may exec or port-forward.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from pydantic import ValidationError

from shoal.api import names, reasons
from shoal.api.replica import StageProgress
from shoal.cli.status.view import ModelRow, RouteRow, engine_pods, fetching, route_rows, rows
from shoal.core import facts
from shoal.core.layers.texts import shorten
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.layerviews import shoal_object
from shoal.kube.resources import GPUCLASSES, MODEL_ROUTES, MODELS, PODS

AT_ONCE: Final = 8
"""Logs read concurrently."""
MOST: Final = 64
"""Pods whose progress is read at most; with more pods, the percentage covers the first ones only."""
LINES: Final = 20
EVENT: Final = "stage.progress"


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """Rows and notes of one read."""

    rows: list[ModelRow]
    notes: tuple[str, ...]
    """Data that could not be read, as messages."""
    routes: tuple[RouteRow, ...] = ()


async def read(client: KubeClient, namespace: str | None, name: str | None) -> StatusSnapshot:
    """The Models and routes of a namespace (None: all), or the Model of this name. Raises KubeError."""
    if name is not None:
        models = [await client.get(MODELS, name, namespace)]
    else:
        models = [m async for m in client.list(MODELS, namespace=namespace)]
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    if name is not None:
        selector += f",{names.LABEL_MODEL}={name}"
    notes: list[str] = []
    pods: list[facts.Pod] | None = None
    try:
        pods = engine_pods([p async for p in client.list(PODS, namespace=namespace, label_selector=selector)])
    except Forbidden as error:
        notes.append(f"progress of pods is unknown: {error.message}")
    progress, problem = await _progress(client, fetching(pods or ()))
    if problem:
        notes.append(f"progress of fetches is unknown: {problem}")
    found = rows(models, pods, progress)
    notes += await _sick(client, {variant.gpu_class for row in found for variant in row.variants})
    routes: list[RouteRow] = []
    if name is None:
        try:
            routes = route_rows([r async for r in client.list(MODEL_ROUTES, namespace=namespace)])
        except (Forbidden, NotFound) as error:
            notes.append(f"routes are unknown: {error.message}")
    return StatusSnapshot(found, tuple(notes), tuple(routes))


async def read_route(client: KubeClient, namespace: str | None, name: str) -> StatusSnapshot:
    """The ModelRoute of this name. Raises KubeError."""
    return StatusSnapshot([], (), tuple(route_rows([await client.get(MODEL_ROUTES, name, namespace)])))


async def _sick(client: KubeClient, used: set[str]) -> list[str]:
    """What GPUClasses that the Models use say of GPUs that are out of use. Who sees one namespace may not read them."""
    if not used:
        return []
    try:
        views = [shoal_object("class", raw) async for raw in client.list(GPUCLASSES)]
    except KubeError:
        return []
    return [
        f"GPUClass {view.name}: {condition.reason}: {shorten(condition.message)}"
        for view in views
        for condition in view.conditions
        if view.name in used and condition.type == reasons.GPUS_HEALTHY
    ]


async def _progress(client: KubeClient, pods: Sequence[facts.Pod]) -> tuple[dict[str, StageProgress], str]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(pod: facts.Pod) -> StageProgress | KubeError | None:
        async with gate:
            try:
                text = await client.log(pod.name, pod.namespace, container=names.CONTAINER_STAGE, lines=LINES)
            except KubeError as error:
                return error
        return last_progress(text)

    selected = pods[:MOST]
    answers = await asyncio.gather(*(one(pod) for pod in selected))
    known = {pod.key: a for pod, a in zip(selected, answers, strict=True) if isinstance(a, StageProgress)}
    refused = next((a.message for a in answers if isinstance(a, Forbidden)), "")
    return known, refused


def last_progress(log: str) -> StageProgress | None:
    """Progress from the last progress line of a log; None: there is none."""
    for line in reversed(log.splitlines()):
        try:
            entry = orjson.loads(line)
            if isinstance(entry, dict) and entry.get("event") == EVENT:  # pyright: ignore[reportUnknownMemberType]
                return StageProgress.model_validate(entry)
        except (orjson.JSONDecodeError, ValidationError):
            continue
    return None
