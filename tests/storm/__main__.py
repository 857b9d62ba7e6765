"""`python -m tests.storm`: a storm on a fleet in a lab. Exit status 1 if a request was lost or an invariant broken."""

import signal
import sys
import tempfile
from pathlib import Path

import click

from shoal.api.model import Driver
from tests.storm import faults, versions
from tests.storm.ground import MODEL_PATH
from tests.storm.run import StormConfig, judge_folder, run

_KILL_SECONDS = 20.0
_MOST_KILLS = 100


@click.command()
@click.option("--requests", type=click.IntRange(1), default=20_000, show_default=True, help="How many are sent.")
@click.option("--rate", type=float, default=100.0, show_default=True, help="Requests per second, open loop.")
@click.option("--minutes", type=float, help="Instead of --requests: as many as fit.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of requests, faults and their targets.")
@click.option("--faults", "wanted", help="Comma-separated, in this order; default: all, shuffled by the seed.")
@click.option("--gap", type=float, default=15.0, show_default=True, help="Seconds between two faults.")
@click.option("--pace", type=float, default=1.0, show_default=True, help="Factor for how long faults last.")
@click.option(
    "--kills", type=click.IntRange(0), help="SIGKILLs of gateways and ledger; default: every 20 s, 100 at most."
)
@click.option(
    "--driver",
    type=click.Choice(["BuiltIn", "KEDA"]),
    default="BuiltIn",
    show_default=True,
    help="Who writes replicas. KEDA: the real one, and it has faults of its own.",
)
@click.option(
    "--from",
    "since",
    help="A tag or commit that is installed first; faults then upgrade to this checkout and go back. 'release': the "
    "last one.",
)
@click.option("--routes", is_flag=True, help="60 % of the requests go to routes; a canary is broken, too.")
@click.option(
    "--sick/--no-sick",
    default=None,
    help="GPUs sicken, and some are devices of a DRA driver; default: yes, but not with --from.",
)
@click.option(
    "--nodes",
    is_flag=True,
    help="Two more Models, on nodes that an autoscaler adds for pending replicas, and that go or are taken away.",
)
@click.option(
    "--rests",
    is_flag=True,
    help="Two more Models on such nodes, one of which rests between bursts: Shoal empties its node.",
)
@click.option("--mutation", help="A protection that is switched off; the storm must find out.")
@click.option("--folder", type=click.Path(path_type=Path), help="For the journals; default: a new one.")
@click.option("--judge", "judged", type=click.Path(path_type=Path, exists=True), help="Only judge this folder again.")
@click.option("--list", "listed", is_flag=True, help="Show the faults, and do nothing.")
def main(
    requests: int,
    rate: float,
    minutes: float | None,
    seed: int,
    wanted: str | None,
    gap: float,
    pace: float,
    kills: int | None,
    driver: Driver,
    since: str | None,
    routes: bool,
    sick: bool | None,
    nodes: bool,
    rests: bool,
    mutation: str | None,
    folder: Path | None,
    judged: Path | None,
    listed: bool,
) -> None:
    """A storm: load, faults, and what became of every request."""
    if listed:
        for name, fault in faults.EVERY.items():
            click.echo(f"{name:20} {(fault.__doc__ or '').splitlines()[0]}")
        return
    if judged is not None:
        sys.exit(0 if judge_folder(judged).good else 1)
    if not MODEL_PATH.exists():
        raise click.UsageError(f"{MODEL_PATH.name}, which the engines serve, is not there: run `make models` first")
    if since == "release" and (since := versions.last_release()) is None:
        raise click.UsageError("nothing was released yet: name a commit")
    if routes and since is not None:
        raise click.UsageError("--routes and --from exclude each other: the earlier version may not have the kind")
    if nodes and rests:
        raise click.UsageError("--nodes and --rests exclude each other: their Models would fill each other's nodes")
    if (nodes or rests) and since is not None:
        raise click.UsageError(
            "--nodes, --rests and --from exclude each other: the earlier version may not know such nodes"
        )
    sickening = since is None if sick is None else sick
    if sickening and since is not None:
        raise click.UsageError("--sick and --from exclude each other: the earlier version may not know devices")
    known = (
        faults.ALL
        | (faults.SICK if sickening else {})
        | (faults.ROUTES if routes else {})
        | (faults.NODES if nodes else {})
        | (faults.RESTS if rests else {})
        | (faults.KEDA if driver == "KEDA" else {})
        | (faults.VERSIONS if since else {})
    )
    default = faults.BETWEEN_VERSIONS if since else known
    chosen = wanted.split(",") if wanted else list(default)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise click.UsageError(f"no such fault: {', '.join(unknown)}; --list shows them")
    # Also when started in the background, where a shell has SIGINT ignored: the lab must go in any case.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    count = round(minutes * 60 * rate) if minutes else requests
    config = StormConfig(
        requests=count,
        rate=rate,
        seed=seed,
        faults=chosen,
        gap=gap,
        pace=pace,
        shuffled=wanted is None and since is None,
        since=since,
        driver=driver,
        mutation=mutation,
        routes=routes,
        sick=sickening,
        nodes=nodes,
        rests=rests,
        kills=min(_MOST_KILLS, round(count / rate / _KILL_SECONDS)) if kills is None else kills,
    )
    sys.exit(0 if run(config, folder or Path(tempfile.mkdtemp(prefix="storm-"))).good else 1)


if __name__ == "__main__":
    main()
