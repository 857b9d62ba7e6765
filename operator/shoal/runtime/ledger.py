"""`shoal ledger`: the entry points."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.ledger.settings import LedgerSettings


@click.group(name="ledger")
def command() -> None:
    """Run the ledger, or maintain its database."""


@command.command("run")
@click.option("--kubeconfig", help="Default: KUBECONFIG, ~/.kube/config or the pod's ServiceAccount.")
def run(kubeconfig: str | None) -> None:
    """Store usage records and serve totals and queries. Settings come from SHOAL_LEDGER_* (docs/ledger.md)."""
    from shoal.ledger.process import LedgerProcess
    from shoal.net import loop
    from shoal.runtime import logs

    settings = _settings()
    logs.configure(settings.log_level)

    async def main() -> None:
        if not (settings.reconcile or settings.metrics_auth or settings.gateway_tokens or settings.role_tokens):
            await LedgerProcess(settings).run()
            return
        from shoal.kube.client import KubeClient

        scope = settings.scope_namespaces
        async with await KubeClient.from_environment(kubeconfig=kubeconfig, scope=scope) as client:
            await LedgerProcess(settings, client).run()

    try:
        loop.run(main())
    except* ValueError as group:
        why = "; ".join(map(str, group.exceptions))
        raise click.ClickException(f"{why}; without a cluster: SHOAL_LEDGER_RECONCILE=false") from None
    except* (RuntimeError, OSError) as group:
        raise click.ClickException("; ".join(map(str, group.exceptions))) from None


@command.command("migrate")
def migrate() -> None:
    """Migrate the database's tables to this version. `run` does the same when it starts."""
    from shoal.ledger.database import Database, DatabaseUnavailable

    settings = _settings()
    database = Database(settings.database_url)
    try:
        with contextlib.ExitStack() as stack:
            database.open(stack)
    except DatabaseUnavailable as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"the tables in {database.name} are of this version")


@command.command("backup")
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
def backup(target: Path) -> None:
    """Copy the SQLite database to TARGET, also while the ledger runs. PostgreSQL: pg_dump (docs/ledger.md)."""
    from shoal.ledger.backup import backup as copy

    _files(copy, target)


@command.command("restore")
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--force", is_flag=True, help="Replace an existing database, which is kept as *.before.")
def restore(source: Path, force: bool) -> None:
    """Restore a backup of a SQLite database, while no ledger runs. PostgreSQL: pg_restore (docs/ledger.md)."""
    from shoal.ledger.backup import restore as put

    _files(lambda database, path: put(database, path, force=force), source)


@command.command("records")
@click.option("--request", help="Only this request.")
@click.option("--tenant", help="Only this tenant.")
@click.option("--aside", is_flag=True, help="Show quarantined records and the reason.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Number of newest records to show."
)
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml", "csv"]), default="table", show_default=True)
def records(request: str | None, tenant: str | None, aside: bool, limit: int, output: str) -> None:
    """Print the ledger's records of single requests, also while it runs. `-o json` prints one per line."""
    from shoal.cli.output import emit_each, write_csv
    from shoal.ledger import listing
    from shoal.ledger.database import Database, DatabaseUnavailable

    database = Database(_settings().database_url)
    try:
        found = listing.newest(database, request=request, tenant=tenant, aside=aside, limit=limit)
        if output == "csv":
            write_csv(found.columns, ())
        if not emit_each(output, found.documents, found.columns):
            click.echo("\n".join(found.lines))
    except DatabaseUnavailable as error:
        raise click.ClickException(str(error)) from None
    finally:
        database.close()


def _files(work: "Callable[[Path, Path], str]", path: Path) -> None:
    from shoal.ledger.backup import BackupError
    from shoal.ledger.database import Database, DatabaseUnavailable

    database = Database(_settings().database_url)
    if database.kind != "sqlite":
        raise click.ClickException(
            "this ledger's database is PostgreSQL: use pg_dump --format=custom and pg_restore --clean (docs/ledger.md)"
        )
    try:
        click.echo(work(database.path, path))
    except (BackupError, DatabaseUnavailable) as error:
        raise click.ClickException(str(error)) from None


def _settings() -> "LedgerSettings":
    import pydantic

    from shoal.ledger.settings import LedgerSettings

    try:
        return LedgerSettings()
    except pydantic.ValidationError as error:
        faults = "; ".join(f"SHOAL_LEDGER_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        raise click.ClickException(faults) from None
