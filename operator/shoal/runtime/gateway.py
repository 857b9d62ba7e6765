"""`shoal gateway`: the entry points."""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.api import names

if TYPE_CHECKING:
    from shoal.metering.record import UsageRecord
    from shoal.metering.spoolreader import SpooledRecord, SpoolReader


@click.group(name="gateway")
def command() -> None:
    """Run the gateway, or inspect its spool."""


@command.command("run")
@click.option("--kubeconfig", help="Default: KUBECONFIG, ~/.kube/config or the pod's ServiceAccount.")
def run(kubeconfig: str | None) -> None:
    """Serve the OpenAI API. Settings come from SHOAL_GATEWAY_* (docs/gateway.md)."""
    import pydantic

    from shoal.gateway.settings import GatewaySettings
    from shoal.net import loop
    from shoal.net.serving import CannotListen
    from shoal.runtime import logs

    try:
        settings = GatewaySettings()
    except pydantic.ValidationError as error:
        faults = "; ".join(f"SHOAL_GATEWAY_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        raise click.ClickException(faults) from None
    logs.configure(settings.log_level)

    async def main() -> None:
        from shoal.gateway.process import GatewayProcess
        from shoal.kube.client import KubeClient

        try:
            client = await KubeClient.from_environment(kubeconfig=kubeconfig, scope=settings.scope_namespaces)
        except OSError as error:
            raise click.ClickException(str(error)) from None
        async with client:
            await GatewayProcess(settings, client).run()

    try:
        loop.run(main())
    except* ValueError as group:
        raise click.ClickException("; ".join(map(str, group.exceptions))) from None
    except* CannotListen as group:
        raise click.ClickException("; ".join(map(str, group.exceptions))) from None


@command.command("records")
@click.option(
    "--path", type=click.Path(path_type=Path), default=Path(names.SPOOL_DIR), show_default=True, help="Spool folder."
)
@click.option("--request", help="Only this request: its id, the response's `id`, or the client's x-request-id.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Number of newest rows to show."
)
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml", "csv"]), default="table", show_default=True)
@click.option("--follow", is_flag=True, help="Keep printing new rows.")
@click.option("--damaged", is_flag=True, help="Show quarantined damaged rows, and damaged files.")
@click.option("--all-rows", is_flag=True, help="Also show open and checkpoint rows.")
def records(
    path: Path, request: str | None, limit: int, output: str, follow: bool, damaged: bool, all_rows: bool
) -> None:
    """Print usage records from the spool, also while the gateway runs. `-o json` prints one per line."""
    from shoal.cli.output import emit_each, write_csv
    from shoal.metering.spoolreader import SpooledRecord, SpoolReader

    try:
        reader = SpoolReader(path)
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from None

    if damaged:
        with contextlib.closing(reader):
            _show_damaged(reader, path if path.is_dir() else path.parent, output)
        return

    columns = _columns()

    def show(rows: list[SpooledRecord]) -> None:
        documents = (_document(row) if output != "csv" else _flat(row) for row in rows)
        if not emit_each(output, documents, columns):
            for row in rows:
                click.echo(_line(row.record))

    kinds = None if all_rows else ("final",)
    with contextlib.closing(reader):
        if output == "table":
            click.echo(_HEADER)
        elif output == "csv":
            write_csv(columns, ())
        last = reader.last_seq()
        show(reader.newest(limit, request, kinds=kinds))
        with contextlib.suppress(KeyboardInterrupt):
            while follow:
                time.sleep(0.2)
                rows = list(reader.after(last))
                if rows:
                    last = rows[-1].seq
                show([r for r in rows if _wanted(r, request, kinds)])


_HEADER = (
    f"{'TIME':<20} {'REQUEST':<36} {'TENANT':<12} {'MODEL':<24} {'KIND':<10} {'OUTCOME':<9} {'STATUS':>6} "
    f"{'INPUT':>7} {'CACHED':>7} {'OUTPUT':>7} {'TTFT-MS':>9} {'MS':>10} REPLICA"
)


def _show_damaged(reader: "SpoolReader", folder: Path, output: str) -> None:
    from shoal.cli.output import emit_each, write_csv
    from shoal.metering.spoolfile import DAMAGED_FOLDER

    rows = [
        {"seq": seq, "time": f"{at:%Y-%m-%dT%H:%M:%SZ}", "reason": reason, "body": repr(body[:2000])}
        for seq, at, reason, body in reader.damaged()
    ]
    files = [{"file": str(file)} for file in sorted(folder.glob(f"{DAMAGED_FOLDER}/*.sqlite"))]
    columns = ("seq", "time", "reason", "body", "file")
    if output == "csv":
        write_csv(columns, ())
    if emit_each(output, [*rows, *files], columns):
        return
    for row in rows:
        click.echo("row {seq}  {time}  {reason}: {body}".format_map(row))
    for file in files:
        click.echo("file {file}".format_map(file))


def _document(row: "SpooledRecord") -> dict[str, Any]:
    return {"seq": row.seq, "shipped": row.shipped, **row.record.model_dump(mode="json")}


def _flat(row: "SpooledRecord") -> dict[str, Any]:
    """The same for CSV, without the event around the record's data."""
    whole = _document(row)
    return {"seq": row.seq, "shipped": row.shipped, "time": whole["time"], **whole["data"]}


def _columns() -> tuple[str, ...]:
    """Of the CSV."""
    from shoal.metering.record import UsageData

    return ("seq", "shipped", "time", *(str(field.alias) for field in UsageData.model_fields.values()))


def _line(record: "UsageRecord") -> str:
    data = record.data

    def number(value: float | None, width: int) -> str:
        return f"{'-' if value is None else value:>{width}}"

    return (
        f"{record.time:%Y-%m-%dT%H:%M:%SZ} {data.request_id:<36} {data.tenant:<12} {data.model:<24} {data.kind:<10} "
        f"{data.outcome or '-':<9} {number(data.status, 6)} {number(data.input_tokens, 7)} "
        f"{number(data.cached_tokens, 7)} {number(data.output_tokens, 7)} {number(data.ttft_ms, 9)} "
        f"{number(data.duration_ms, 10)} {data.replica or '-'}"
    )


def _wanted(row: "SpooledRecord", request: str | None, kinds: tuple[str, ...] | None) -> bool:
    data = row.record.data
    return (kinds is None or row.kind in kinds) and (request in (None, data.request_id, data.client_request_id))
