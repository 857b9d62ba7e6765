"""The command `shoal why`."""

import click

from shoal.api.decisions import Decisions
from shoal.cli.client import run_command
from shoal.cli.options import Installation, ca_option, operator_options
from shoal.cli.output import console, emit, output_option
from shoal.cli.scaling import why as scaling
from shoal.cli.viewing import explaining_refusals
from shoal.cli.why import request, subjects
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion


@click.command()
@click.argument("words", metavar="KIND/NAME|request/ID", nargs=-1, required=True)
@click.option("-n", "--namespace", help="Default: the kubeconfig context's.")
@click.option("--last", type=click.IntRange(min=1), default=5, show_default=True, help="Decisions about a Model.")
@click.option("--scaling", "only_scaling", is_flag=True, help="Only the decisions about a Model's replicas.")
@click.option(
    "--gateway-url", help="For request/ID: URL of a gateway's operations port. Default: through the API server's proxy."
)
@ca_option
@output_option()
@operator_options
def command(
    words: tuple[str, ...],
    namespace: str | None,
    last: int,
    only_scaling: bool,
    gateway_url: str | None,
    ca_file: str | None,
    output: str,
    installation: Installation,
) -> None:
    """Explain what is wrong: the cause, its layer, evidence, what was tried, and what to do.

    KIND is model, adapter, pool, route, tenant, pod, gpuclass or node; a name alone is a Model's. The most upstream
    cause is first: a broken GPU before the engine that ends because of it. Of a Model, the last decisions about its
    replicas follow, with the result and the inputs of every rule. What cannot be read is listed.

    request/ID is one of the last requests, by the id in its answer's header x-shoal-request-id: what it was predicted
    to cost at its replica, and at the next best one; of a refused one the layer, and what to do. Needs the ClusterRole
    shoal-logs in Shoal's namespace.
    """
    target = subjects.joined(words)
    if target.startswith("request/"):
        request.show(installation, gateway_url, ca_file, target.removeprefix("request/"), output)
        return
    kind, name = subjects.parse(target)
    if only_scaling:
        if kind != "model":
            raise click.UsageError("--scaling is for Models")
        _scaling(name, namespace, last, output, installation)
        return

    async def work() -> WhyAnswer:
        async with await installation.connect() as client:
            where = namespace or client.namespace or "default"
            question = WhyQuestion(client, installation, where, name, last)
            if kind == "node":  # the role is for Shoal's kinds
                return await subjects.answer(kind, question)
            async with explaining_refusals(client, None if kind in subjects.OF_THE_CLUSTER else where):
                return await subjects.answer(kind, question)

    found = run_command(work())
    if not emit(output, found.document, found.rows, found.columns):
        console(markup=False).print(found.shown)


def _scaling(name: str, namespace: str | None, last: int, output: str, installation: Installation) -> None:
    async def work() -> Decisions:
        async with await installation.connect() as client:
            return await scaling.read(client, installation, namespace or client.namespace or "default", name, last)

    answer = run_command(work())
    data = answer.models[0].model_dump(mode="json", by_alias=True)
    if not emit(output, data, data["decisions"], scaling.COLUMNS):
        console().print(scaling.render(answer.models[0], answer.time))
