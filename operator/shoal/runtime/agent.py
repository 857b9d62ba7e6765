"""`shoal agent`: the two containers that Shoal adds to an engine pod."""

import asyncio
import os
import signal
import ssl
import sys
from pathlib import Path

import click

from shoal.api import names
from shoal.runtime.logs import configure

TERMINATION_LOG = "/dev/termination-log"


@click.group()
def command() -> None:
    """Run an engine pod's agent, or stage a model."""


@command.command()
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104
@click.option("--port", default=names.AGENT_PORT, show_default=True, help="Port to listen on.")
@click.option("--engine-url", default=f"http://127.0.0.1:{names.ENGINE_PORT}", show_default=True)
@click.option("--keys", default=names.AGENT_KEYS_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--run-dir", default=names.RUN_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--log-level", default="info", envvar="SHOAL_LOG_LEVEL", show_default=True)
def serve(host: str, port: int, engine_url: str, keys: Path, run_dir: Path, log_level: str) -> None:
    """Serve what this replica does: its phase, its load, its engine's boot id."""
    from shoal.agent.observe import Observer
    from shoal.agent.serve import Agent
    from shoal.agent.serve import serve as run
    from shoal.agent.stream import Hub

    configure(log_level)

    async def main() -> None:
        stop = asyncio.Event()
        # A process that is number 1 of its container has no default action for these signals.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        hub = Hub()
        observer = Observer(hub, run_dir / Path(names.STAGE_PROGRESS_FILE).name, run_dir / Path(names.BOOT_FILE).name)
        await run(Agent(engine_url, keys, hub, observer), hub, host=host, port=port, stop=stop)

    asyncio.run(main())


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)


@command.command()
@click.option("--uri", envvar="SHOAL_STAGE_URI", required=True, help="The Model's source (SHOAL_STAGE_URI).")
@click.option("--digest", envvar="SHOAL_STAGE_DIGEST", default="", help="What it must be (SHOAL_STAGE_DIGEST).")
@click.option("--revision", envvar="SHOAL_STAGE_REVISION", default="", help="Commit of a hub (SHOAL_STAGE_REVISION).")
@click.option("--manifest", envvar="SHOAL_STAGE_MANIFEST", default="", help="Its manifest (SHOAL_STAGE_MANIFEST).")
@click.option("--hub-endpoint", envvar="HF_ENDPOINT", default="", help="A mirror of the hub (HF_ENDPOINT).")
@click.option("--target", default=names.MODEL_PATH, show_default=True, type=click.Path(path_type=Path))
@click.option("--source-dir", default=names.SOURCE_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--secret-dir", default=names.SOURCE_SECRET_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--progress", default=names.STAGE_PROGRESS_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--termination-log", default=TERMINATION_LOG, show_default=True, type=click.Path(path_type=Path))
@click.option("--ca-bundle", envvar="SSL_CERT_FILE", default="", help="Further CA certificates (SSL_CERT_FILE).")
@click.option("--log-level", default="info", envvar="SHOAL_LOG_LEVEL", show_default=True)
def stage(
    uri: str,
    digest: str,
    revision: str,
    manifest: str,
    hub_endpoint: str,
    target: Path,
    source_dir: Path,
    secret_dir: Path,
    progress: Path,
    termination_log: Path,
    ca_bundle: str,
    log_level: str,
) -> None:
    """Bring a model to where the engine reads it, whole and verified."""
    from shoal.agent.stage.request import StagePaths, StageRequest
    from shoal.agent.stage.run import run_stage
    from shoal.artifacts import Settings
    from shoal.artifacts.trust import with_public_roots

    configure(log_level)
    # As number 1 of its container a process has no default action for SIGTERM, and a download in a thread cannot be
    # cancelled: leave at once. What was fetched stays, and the next start goes on from there.
    signal.signal(signal.SIGTERM, _leave)

    def write_termination(message: str) -> None:
        try:
            termination_log.write_text(message)
        except OSError as error:
            click.echo(f"termination message not written: {error}", err=True)

    if ca_bundle:
        try:
            combined = with_public_roots(Path(ca_bundle), target.with_name(".ca.crt"))
            os.environ["SSL_CERT_FILE"] = str(combined)  # read by Python's TLS and by the hub's client alike
        except (OSError, ssl.SSLError) as error:
            click.echo(f"the CA bundle {ca_bundle} is not usable, going on without it: {error}", err=True)
            os.environ.pop("SSL_CERT_FILE", None)
    settings = Settings(hub_endpoint=hub_endpoint.rstrip("/") or None)
    request = StageRequest(uri, digest or None, revision or None, manifest or None, settings)
    paths = StagePaths(target=target, source=source_dir, secret=secret_dir, progress=progress)
    sys.exit(run_stage(request, paths, write_termination))
