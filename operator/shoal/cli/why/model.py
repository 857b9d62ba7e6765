"""`shoal why model/NAME`: causes, and the last decisions about its replicas."""

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shoal.api.decisions import Decisions
from shoal.cli.scaling.why import render as render_scaling
from shoal.cli.services import OperatorClient
from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes, wants_gpus
from shoal.core.layers.types import DecisionView, ObjectView, WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import MODELS


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a Model. Raises KubeError where the Model itself cannot be read."""
    raw = await question.client.get(MODELS, question.name, question.namespace)
    seen, decisions = await read(question, layerviews.shoal_object("model", raw))
    found = causes(seen, datetime.now(UTC))
    scaling = decisions.models[0] if decisions is not None and decisions.models else None
    document = show.document(found, seen)
    document["scaling"] = None if scaling is None else scaling.model_dump(mode="json", by_alias=True)
    parts: list[RenderableType] = [show.render(found, seen)]
    if decisions is not None and scaling is not None:
        parts += [Text(""), render_scaling(scaling, decisions.time)]
    return WhyAnswer(document, show.rows(found), show.COLUMNS, Group(*parts))


async def read(question: WhyQuestion, model: ObjectView) -> tuple[WhySnapshot, Decisions | None]:
    """What explains a Model, and the operator's decisions about it."""
    reader = WhyReader(question.client)
    seen = await read_model(reader, question, model)
    operator = OperatorClient(question.client, question.installation.namespace, question.installation.url)
    answer = await reader.attempt("decisions of the operator", operator.one(model.namespace or "", model.name))
    decision: DecisionView | None = None
    if answer is not None and answer.models:
        one = answer.models[0].model_copy(update={"decisions": answer.models[0].decisions[: question.last]})
        answer = answer.model_copy(update={"models": (one,)})
        last = one.decisions[0] if one.decisions else None
        decision = DecisionView(
            at=last.time if last is not None else answer.time,
            reason=one.reason,
            message=one.message,
            alternative=last.alternative if last is not None else "",
            stale=one.stale,
        )
    return dataclasses.replace(seen, decision=decision, unread=tuple(reader.unread)), answer


async def read_model(reader: WhyReader, question: WhyQuestion, model: ObjectView) -> WhySnapshot:
    """Pods, nodes, classes and events of a Model."""
    namespace = model.namespace or question.namespace
    pods = await reader.pods(namespace, model.name)
    classes = await reader.classes(set(_classes(model)) or None)
    devices = await reader.devices(classes)
    nodes = await reader.nodes(pods, classes, devices)
    pods = await reader.with_devices(pods, classes)
    return WhySnapshot(
        kind="model",
        key=model.key,
        subject=model,
        related=classes,
        pods=pods,
        nodes=nodes,
        holders=await reader.holders(classes, nodes, devices) if wants_gpus(model, pods) else (),
        devices=devices.counts,
        events=await reader.events(namespace),
        gateways=await reader.gateways(question.installation.namespace),
        policies=await reader.policies(namespace, question.installation.namespace),
        claim=await reader.claim(model),
        autoscalers=await reader.autoscalers(namespace),
        lease=await reader.lease(question.installation.namespace),
        unread=tuple(reader.unread),
    )


def _classes(model: ObjectView) -> Iterable[str]:
    """Names of the GPU classes that it uses, may use, or could not use."""
    for part in (model.spec, model.status):
        variants: list[dict[str, Any]] = part.get("variants") or []
        for variant in variants:
            if name := variant.get("class"):
                yield str(name)
