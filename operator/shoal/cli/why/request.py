"""Why a request went to its replica, or was refused, from the memories of the gateways."""

from datetime import UTC, datetime
from typing import Final

import click
from rich.console import Group

from shoal.api.choices import FallbackRecord, RefusalRecord, RequestChoices, StayRecord
from shoal.cli.client import run_command
from shoal.cli.options import Installation
from shoal.cli.output import console, emit
from shoal.cli.services import GatewayClient
from shoal.cli.why.show import cause_block, cause_document
from shoal.core.layers.candidates import age
from shoal.core.layers.externals import OUTCOMES
from shoal.core.layers.refusals import refusal
from shoal.core.layers.types import Evidence, LayerCause

COLUMNS: Final = ("time", "gateway", "model", "attempt", "replica", "message", "promptTokens", "cachedTokens")
_WHILE: Final = {
    "client_left_early": "its body was read, or it waited for its tenant's limits",
    "client_left_waiting": "it waited for a replica",
    "client_left_working": "a replica worked on it",
    "client_left_answering": "it was answered",
}


def show(installation: Installation, url: str | None, request: str, output: str) -> None:
    """Prints the choices of one request and its error. Raises ClickException where none is remembered."""

    async def work() -> RequestChoices:
        async with await installation.connect() as client:
            return await GatewayClient(client, installation.namespace, url).choices(request)

    found = run_command(work())
    for missing in found.missing:
        click.echo(f"missing: gateway {missing}", err=True)
    if not (found.choices or found.fallbacks or found.stays or found.refusals):
        raise click.ClickException(
            f"no gateway remembers request {request}: each remembers its last requests, {found.remembered:,} at the "
            "moment, until it restarts. Is it the id in the answer's header x-shoal-request-id?"
        )
    now = datetime.now(UTC)
    causes = [cause(each, now) for each in found.refusals]
    data = found.model_dump(mode="json", by_alias=True) | {"causes": [cause_document(each) for each in causes]}
    if emit(output, data, data["choices"], COLUMNS):
        return
    for each in sorted((*found.choices, *found.fallbacks, *found.stays), key=lambda each: each.time):
        if isinstance(each, FallbackRecord):
            click.echo(f"{each.time:%H:%M:%S}Z  {each.left} by {each.gateway}")
        elif isinstance(each, StayRecord):
            click.echo(f"{each.time:%H:%M:%S}Z  {each.target} by {each.gateway}")
        else:
            again = f", attempt {each.attempt}" if each.attempt > 1 else ""
            click.echo(f"{each.time:%H:%M:%S}Z  {each.model} by {each.gateway}{again}")
        click.echo(f"  {each.message}")
    for place, each in enumerate(causes, 1):
        console(markup=False).print(Group(*cause_block(place, each)))


def cause(refused: RefusalRecord, now: datetime) -> LayerCause:
    """What the error means, and what to do."""
    row = refusal(refused.code, refused.outcome)
    about = f" (field {refused.param})" if refused.param else ""
    said = f"{refused.status} {refused.code or 'without a code'}{about}"
    proof = Evidence(said, f"gateway {refused.gateway}", age(now, refused.time))
    whose = f": the limit is {refused.limit}" if refused.limit else ""
    reason = refused.code or str(refused.status)
    if refused.outcome is not None and refused.outcome in OUTCOMES:
        reason, words = OUTCOMES[refused.outcome]
        whose = f": of its external target, {words}"
    text = f"it was answered with {said}{whose}"
    if refused.seconds is not None:
        text = f"its client left after {refused.seconds:.1f} s, while {_WHILE.get(refused.code or '', 'it ran')}"
    return LayerCause(reason, row.layer, "fault", text, row.do, (proof,))
