"""`python -m tests.storm.tenants`: gateways and ledger killed under load, in processes on loopback, without a lab.

Exit status 1 when a record was lost or counted twice, or when an invariant was broken.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import click
from pydantic import TypeAdapter

from tests.storm.mutants import MUTATIONS
from tests.storm.tenants.run import DATABASES, ENDED, Database, Ended, TenantStormConfig, judge_folder, run
from tests.support.engines import Kind

_SHOWN = 20


@click.command()
@click.option("--kills", type=click.IntRange(0), default=100, show_default=True, help="SIGKILLs, in turn.")
@click.option("--rate", type=float, default=12.0, show_default=True, help="Requests per second, open loop.")
@click.option("--pause", type=float, default=1.0, show_default=True, help="Seconds between two kills.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--database", type=click.Choice(DATABASES), default=DATABASES[0], show_default=True, help="Of the ledger."
)
@click.option("--engine", type=click.Choice(["sim", "sglang"]), default="sim", show_default=True)
@click.option("--mutation", type=click.Choice(sorted(MUTATIONS)), help="A protection that is switched off.")
@click.option("--folder", type=click.Path(path_type=Path), help="For the journals; default: a new one.")
@click.option("--judge", "judged", type=click.Path(path_type=Path, exists=True), help="Only judge this folder again.")
def main(
    kills: int,
    rate: float,
    pause: float,
    seed: int,
    database: Database,
    engine: Kind,
    mutation: str | None,
    folder: Path | None,
    judged: Path | None,
) -> None:
    """Kill gateways and the ledger under load, and judge the contents."""
    folder = judged or folder or Path(tempfile.mkdtemp(prefix="storm-tenants-"))
    print(f"journals are in {folder}", flush=True)
    config = TenantStormConfig(kills, rate, seed, pause, database=database, engine=engine, mutation=mutation)
    if judged is not None:
        outcome = judge_folder(folder, TypeAdapter(Ended).validate_json((folder / ENDED).read_bytes()))
    else:
        outcome = asyncio.run(run(config, folder))
    violations = [*outcome.findings.violations, *outcome.account.violations()]
    for text in violations[:_SHOWN]:
        print(f"VIOLATION {text}")
    if len(violations) > _SHOWN:
        print(f"... and {len(violations) - _SHOWN} more: {folder / 'violations.txt'}")
    print("\n".join(outcome.lines()), flush=True)
    sys.exit(0 if outcome.good else 1)


if __name__ == "__main__":
    main()
