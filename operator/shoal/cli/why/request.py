"""Why a request went to its replica, or was refused, from the memories of the gateways; and what is wrong with the
Model, adapter or route that refused it."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.text import Text

from shoal.api.choices import ChoiceRecord, FallbackRecord, RequestChoices, StayRecord
from shoal.cli.client import run_command
from shoal.cli.options import Installation
from shoal.cli.output import console, emit
from shoal.cli.services import GatewayClient
from shoal.cli.why import adapter, model, route
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.show import SAID, cause_block, cause_document, unread_document, unread_lines
from shoal.cli.why.subjects import WhyQuestion
from shoal.core.layers import requests
from shoal.core.layers.causes import causes
from shoal.core.layers.types import KINDS, ExplainedKind, Explanation
from shoal.kube.client import KubeClient
from shoal.kube.resources import LORA_ADAPTERS, MODEL_ROUTES, MODELS, Resource

COLUMNS: Final = (
    "time",
    "gateway",
    "model",
    "attempt",
    "replica",
    "message",
    "promptTokens",
    "cachedTokens",
    "failure",
)
_RESOURCES: Final[Mapping[ExplainedKind, Resource]] = {
    "model": MODELS,
    "adapter": LORA_ADAPTERS,
    "route": MODEL_ROUTES,
}
"""Of the kinds of `requests.Subject`."""


def show(installation: Installation, url: str | None, ca_file: str | None, request: str, output: str) -> None:
    """Prints the choices of one request, its error, and what is wrong with the object that explains the error. Raises
    ClickException where none is remembered."""

    async def work() -> tuple[RequestChoices, Explanation | None]:
        async with await installation.connect() as client:
            gateways = GatewayClient(client, installation.namespace, url, ca_file=ca_file)
            found = await gateways.choices(request)
            subject = requests.subject_of(found)
            return found, None if subject is None else await _explained(client, installation, subject)

    found, below = run_command(work())
    for missing in found.missing:
        click.echo(f"missing: gateway {missing}", err=True)
    if not (found.choices or found.fallbacks or found.stays or found.refusals):
        raise click.ClickException(
            f"no gateway remembers request {request}: each remembers its last requests, {found.remembered:,} at the "
            "moment, until it restarts. Is it the id in the answer's header x-shoal-request-id?"
        )
    found_causes = requests.causes(found, below, datetime.now(UTC))
    data = found.model_dump(mode="json", by_alias=True)
    data |= {"causes": [cause_document(each) for each in found_causes], "subjectNow": _document(below)}
    if emit(output, data, data["choices"], COLUMNS):
        return
    parts: list[RenderableType] = list(_steps(found))
    if below is not None and below.state != "unknown":
        parts += ["", f"{KINDS[below.kind]} {below.key} now: {SAID[below.state]}"]
    for place, each in enumerate(found_causes, 1):
        parts += ["", *cause_block(place, each)]
    if below is not None and below.unread:
        parts += ["", *unread_lines(below.unread)]
    console(markup=False).print(Group(*(parts[1:] if parts[:1] == [""] else parts)))


async def _explained(client: KubeClient, installation: Installation, subject: requests.Subject) -> Explanation:
    """What `shoal why KIND/NAME` finds of the object; where that cannot be read, only why."""
    kind, namespace, name = subject
    reader, key = WhyReader(client), f"{namespace}/{name}"
    view = await reader.get(f"{KINDS[kind]} {key}", kind, _RESOURCES[kind], name, namespace)
    if view is None:
        return Explanation(kind, key, "unknown", (), tuple(reader.unread))
    question = WhyQuestion(client, installation, namespace, name, last=1)
    if kind == "adapter":
        seen = await adapter.read(question, view)
    elif kind == "route":
        seen = await route.read(question, view)
    else:
        seen, _ = await model.read(question, view)
    return causes(seen, datetime.now(UTC))


def _document(below: Explanation | None) -> dict[str, Any] | None:
    if below is None:
        return None
    return {"kind": KINDS[below.kind], "name": below.key, "state": below.state, "unread": unread_document(below.unread)}


def _steps(found: RequestChoices) -> Iterator[Text]:
    """The attempts of a request, and the targets that it left or stayed with, in the order in which they came."""
    for each in sorted((*found.choices, *found.fallbacks, *found.stays), key=lambda each: each.time):
        who = f"{each.time:%H:%M:%S}Z  {_subject(each)} by {each.gateway}"
        failure = None
        if isinstance(each, ChoiceRecord):
            who += f", attempt {each.attempt}" if each.attempt > 1 else ""
            failure = requests.failure_of(each)
        yield Text(who)
        yield Text(f"  {each.message}")
        if failure is not None:
            layer, words = failure
            yield Text(f"  failed on {layer.label}: {words}")


def _subject(step: ChoiceRecord | FallbackRecord | StayRecord) -> str:
    if isinstance(step, ChoiceRecord):
        return step.model
    return step.left if isinstance(step, FallbackRecord) else step.target
