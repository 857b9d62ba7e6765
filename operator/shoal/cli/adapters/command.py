"""`shoal adapters`: asks the operator that leads, and shows pools, replicas and adapters."""

from typing import Final

import click
from rich.console import Console

from shoal.api.adapterstats import AdapterStatsAnswer
from shoal.cli.adapters.picture import SORTS, picture
from shoal.cli.client import run_command
from shoal.cli.options import Installation, operator_options
from shoal.cli.services import OperatorClient

WIDTH: Final = 160
"""Columns where the output is no terminal."""
WIDER: Final = 240
"""The same with `-o wide`."""


@click.command()
@click.option("--pool", help="Only this LoRAPool.")
@click.option("-n", "--namespace", help="That of the pools. Default: that of the kubeconfig's context.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Pools of all namespaces.")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True, help="What comes first.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Adapters shown of each pool.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json"]),
    default="table",
    show_default=True,
    help="wide: with the replicas that have each adapter.",
)
@operator_options
def command(
    pool: str | None,
    namespace: str | None,
    all_namespaces: bool,
    sort: str,
    limit: int,
    output: str,
    installation: Installation,
) -> None:
    """Show the adapters of LoRA pools: where they are loaded, hits, loads, when they were last used.

    What is not known is `?`. An adapter that has no place says why. Needs the right to get the operator's Lease and
    pods/proxy in Shoal's namespace.
    """
    if all_namespaces and namespace:
        raise click.UsageError("--all-namespaces does not go with --namespace")

    async def work() -> AdapterStatsAnswer:
        async with await installation.connect() as client:
            where = None if all_namespaces else namespace or client.namespace or "default"
            return await OperatorClient(client, installation.namespace, installation.url).adapters(where, pool)

    answer = run_command(work())
    if output == "json":
        click.echo(answer.model_dump_json(indent=2))
        return
    wide = output == "wide"
    console = Console(highlight=False, width=None if Console().is_terminal else WIDER if wide else WIDTH)
    console.print(picture(answer, sort=sort, limit=limit, wide=wide))
