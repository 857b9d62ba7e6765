"""Reads Models, pods and the progress of each fetch from the API server.

The progress comes from the last lines of the stage container's log: whoever may see pods may usually read logs (the
cluster's own `view` role does), while exec and port-forward are for few.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from pydantic import ValidationError

from shoal.api import names
from shoal.api.replica import StageProgress
from shoal.cli.status.view import ModelRow, engine_pods, fetching, rows
from shoal.core import facts
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError
from shoal.kube.resources import MODELS, PODS

AT_ONCE: Final = 8
"""Logs that are read at a time."""
MOST: Final = 64
"""Pods whose progress is asked for; with more, the per cent is that of the first ones."""
LINES: Final = 20
EVENT: Final = "stage.progress"


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """What was read."""

    rows: list[ModelRow]
    notes: tuple[str, ...]
    """What could not be read, for people."""


async def read(client: KubeClient, namespace: str | None, name: str | None) -> StatusSnapshot:
    """The Models of a namespace (None: of all), or the one of this name. Raises KubeError."""
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
        notes.append(f"without the progress of pods: {error.message}")
    progress, problem = await _progress(client, fetching(pods or ()))
    if problem:
        notes.append(f"without the per cent of fetching: {problem}")
    return StatusSnapshot(rows(models, pods, progress), tuple(notes))


async def _progress(client: KubeClient, pods: Sequence[facts.Pod]) -> tuple[dict[str, StageProgress], str]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(pod: facts.Pod) -> StageProgress | KubeError | None:
        async with gate:
            try:
                text = await client.log(pod.name, pod.namespace, container=names.CONTAINER_STAGE, lines=LINES)
            except KubeError as error:
                return error
        return last_progress(text)

    asked = pods[:MOST]
    answers = await asyncio.gather(*(one(pod) for pod in asked))
    known = {pod.key: a for pod, a in zip(asked, answers, strict=True) if isinstance(a, StageProgress)}
    refused = next((a.message for a in answers if isinstance(a, Forbidden)), "")
    return known, refused


def last_progress(log: str) -> StageProgress | None:
    """What the last line about progress says; None while there is none."""
    for line in reversed(log.splitlines()):
        try:
            entry = orjson.loads(line)
            if isinstance(entry, dict) and entry.get("event") == EVENT:  # pyright: ignore[reportUnknownMemberType]
                return StageProgress.model_validate(entry)
        except (orjson.JSONDecodeError, ValidationError):
            continue
    return None
