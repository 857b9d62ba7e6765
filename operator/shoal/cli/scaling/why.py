"""The last decisions about one Model, each with its inputs and the rejected alternative, for `shoal why`."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.api.decisions import DecisionRecord, Decisions, DriverStats, ModelScaling, ReplicaStats, RuleResult
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.cli.options import Installation
from shoal.cli.services import OperatorClient
from shoal.core.coldstart import describe, measured
from shoal.core.layers.layer import Layer
from shoal.kube.client import KubeClient
from shoal.kube.resources import MODELS

COLUMNS: Final = ("time", "before", "wanted", "reason", "layer", "message", "alternative", "count")

_BELOW: Final = frozenset(Layer) - {Layer.CONTROL}


async def read(client: KubeClient, installation: Installation, namespace: str, name: str, last: int) -> Decisions:
    """The operator's answer about one Model, with at most `last` decisions. Raises KubeError, ServiceError."""
    found = await client.get(MODELS, name, namespace)  # the API server's message names a misspelt Model
    answer = await OperatorClient(client, installation.namespace, installation.url).one(namespace, name)
    model = answer.models[0]
    shown = {
        "decisions": model.decisions[:last],
        "cold_starts": _cold_starts(found),
        "speculation": speculation(found, model.replicas),
    }
    return answer.model_copy(update={"models": (model.model_copy(update=shown),)})


def speculation(found: JsonObject, replicas: Sequence[ReplicaStats]) -> str:
    """How much the Model's speculation gives, by its replicas; "": it has none."""
    told = [replica.tokens_per_step for replica in replicas if replica.tokens_per_step is not None]
    if told:
        of = "1 replica" if len(replicas) == 1 else f"{len(told)} of {len(replicas)} replicas"
        return f"speculation: {sum(told) / len(told):.2f} tokens per step and request since the engines' start ({of})"
    try:
        asked = Model.model_validate(found).spec.engine.speculation
    except ValidationError:
        return ""  # of another version
    return "" if asked is None else "speculation: no replica has told its tokens per step"


def _cold_starts(found: JsonObject) -> tuple[str, ...]:
    """A sentence for each class with a measured start, from the Model's status."""
    try:
        model = Model.model_validate(found)
    except ValidationError:
        return ()  # of another version
    known = [(v.gpu_class, v.cold_start) for v in (model.status.variants if model.status else ()) if v.cold_start]
    return tuple(describe(name, measured(start.last), measured(start.median)) for name, start in known)


def render(model: ModelScaling, now: datetime, *, rules: bool = True) -> RenderableType:
    """Renders the current state, then a block per decision, or without `rules` a line. `now` is the operator's time of
    the answer."""
    parts: list[RenderableType] = [
        Text.assemble((model.model, "bold"), f": {model.wanted} wanted, {model.ready_replicas} ready"),
        Text(_because(model.layer, model.reason, model.message)),
    ]
    if model.driven is not None:
        parts.append(_driven(model.driven))
    if model.stale:
        parts.append(
            Text(f"stale signals, so no scale-down: {', '.join(model.stale)}", style="yellow"),
        )
    parts += [Text(sentence) for sentence in model.cold_starts]
    if model.speculation:
        parts.append(Text(model.speculation))
    if not model.decisions:
        parts.append(Text("no decision since this operator became leader"))
    for decision in model.decisions:
        parts += [Text(""), *_decision(decision, now)] if rules else [_heading(decision, now)]
    return Group(*parts)


def _driven(driven: DriverStats) -> Text:
    """The driver of the replicas, and variants whose replicas differ from the answer."""
    late = [
        f"{v.gpu_class}: {_value(v.answered)} answered, {_value(v.replicas_written)} written"
        for v in driven.variants
        if v.answered != v.replicas_written
    ]
    summary = f"driver {driven.driver}: {driven.reason}: {driven.message}"
    return Text("; ".join([summary, *late]), style="" if driven.status == "True" else "yellow")


def _heading(decision: DecisionRecord, now: datetime) -> Text:
    times = f", {decision.count} times" if decision.count > 1 else ""
    change = f"{decision.before} -> {decision.wanted}" if decision.before != decision.wanted else f"{decision.wanted}"
    return Text.assemble(
        (f"{decision.time:%H:%M:%S}Z", "bold"),
        f" ({ago(now - decision.time)} ago{times})  ",
        (change, "bold"),
        f"  {_because(decision.layer, decision.reason, decision.message)}",
    )


def _because(layer: str | None, reason: str, message: str) -> str:
    """Reason and message, behind the layer where it is not Shoal's own."""
    where = f"{Layer(layer).label} " if layer is not None and layer in _BELOW else ""
    return f"{where}{reason}: {message}" if message else f"{where}{reason}"


def _decision(decision: DecisionRecord, now: datetime) -> list[RenderableType]:
    parts: list[RenderableType] = [_heading(decision, now)]
    if decision.rules:
        table = Table(show_edge=False, box=None, pad_edge=False)
        table.add_column("RULE", no_wrap=True)
        table.add_column("ASKS", justify="right", no_wrap=True)
        table.add_column("FROM", overflow="fold")
        table.add_column("THAT IS", overflow="fold")
        for rule in decision.rules:
            asks = "?" if rule.replicas is None else str(rule.replicas)
            table.add_row(Text(rule.rule), Text(asks), Text(inputs(rule)), Text(rule.sentence))
        parts.append(Padding(table, (0, 0, 0, 2), expand=False))
    if decision.alternative:
        parts.append(Padding(Text(f"not done: {decision.alternative}"), (0, 0, 0, 2)))
    return parts


def inputs(rule: RuleResult) -> str:
    """Inputs of a rule as `waiting 14, target 4`; an unknown value is `?`."""
    return ", ".join(f"{name} {_value(value)}" for name, value in rule.inputs.items())


def _value(value: float | int | str | None) -> str:
    match value:
        case None:
            return "?"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}".rstrip("0").rstrip(".")


def ago(span: timedelta) -> str:
    """`34 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(0, int(span.total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
