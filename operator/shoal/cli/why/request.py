"""Why a request went to its replica, from the memories of the gateways."""

from typing import Final

import click

from shoal.api.choices import RequestChoices
from shoal.cli.client import run_command
from shoal.cli.options import Installation
from shoal.cli.output import emit
from shoal.cli.services import GatewayClient

COLUMNS: Final = ("time", "gateway", "model", "attempt", "replica", "message", "promptTokens", "cachedTokens")


def show(installation: Installation, url: str | None, request: str, output: str) -> None:
    """Prints the choices of one request. Raises ClickException where none is remembered."""

    async def work() -> RequestChoices:
        async with await installation.connect() as client:
            return await GatewayClient(client, installation.namespace, url).choices(request)

    found = run_command(work())
    for missing in found.missing:
        click.echo(f"missing: gateway {missing}", err=True)
    if not found.choices:
        raise click.ClickException(
            f"no gateway remembers request {request}: each remembers its last requests, {found.remembered:,} at the "
            "moment, until it restarts. Is it the id in the answer's header x-shoal-request-id?"
        )
    data = found.model_dump(mode="json", by_alias=True)
    if not emit(output, data, data["choices"], COLUMNS):
        for choice in found.choices:
            again = f", attempt {choice.attempt}" if choice.attempt > 1 else ""
            click.echo(f"{choice.time:%H:%M:%S}Z  {choice.model} by {choice.gateway}{again}")
            click.echo(f"  {choice.message}")
