"""`shoal agent`: the agent and stage containers of an engine pod, and the facts container."""

import asyncio
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from pydantic import ValidationError

from shoal.api import names
from shoal.api.adapters import ADAPTERS_ENV, AdapterSettings
from shoal.runtime import container
from shoal.runtime.facts import facts
from shoal.runtime.logs import configure


@click.group()
def command() -> None:
    """Run an engine pod's agent, stage a model, or read its facts."""


command.add_command(facts)


@command.command()
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104
@click.option("--port", default=names.AGENT_PORT, show_default=True, help="Port to listen on.")
@click.option("--engine-url", default=f"http://127.0.0.1:{names.ENGINE_PORT}", show_default=True)
@click.option("--engine", envvar=names.ENGINE_ENV, default="", help=f"Type of the engine ({names.ENGINE_ENV}).")
@click.option(
    "--max-running",
    envvar=names.MAX_RUNNING_ENV,
    type=click.IntRange(min=1),
    help=f"Requests that the engine runs at once at most, if it does not say so itself ({names.MAX_RUNNING_ENV}).",
)
@click.option("--keys", default=names.AGENT_KEYS_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--run-dir", default=names.RUN_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--cache", envvar="SHOAL_AGENT_CACHE", default="", help="Folder of the node cache (SHOAL_AGENT_CACHE).")
@click.option(
    "--drain-seconds", envvar="SHOAL_AGENT_DRAIN_SECONDS", default=900.0, show_default=True, help="Longest drain."
)
@click.option(
    "--stall-seconds",
    envvar="SHOAL_AGENT_STALL_SECONDS",
    default=180.0,
    show_default=True,
    help="Time without progress after which an engine with requests is stalled.",
)
@click.option(
    "--tls-dir",
    envvar="SHOAL_AGENT_TLS_DIR",
    default="",
    help="Folder of this replica's certificate; endpoints with keys then require mutual TLS (SHOAL_AGENT_TLS_DIR).",
)
@click.option("--tls-port", default=names.AGENT_TLS_PORT, show_default=True, help="Port for mutual TLS.")
@click.option(
    "--proxies",
    is_flag=True,
    envvar=names.ADMISSION_ENV,
    help=f"Lets requests through that a proxy brings and a gateway admitted ({names.ADMISSION_ENV}).",
)
@click.option("--pod-ip", envvar="POD_IP", default="", help="This pod's address (POD_IP).")
@click.option("--pool", envvar=ADAPTERS_ENV, default="", help=f"The Model's LoRAPool, as JSON ({ADAPTERS_ENV}).")
@click.option("--adapters-dir", default=names.ADAPTERS_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--secrets-dir", default=names.ADAPTER_SECRETS_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--hub-endpoint", envvar="HF_ENDPOINT", default="", help="URL of a mirror of the hub (HF_ENDPOINT).")
@click.option("--sources", envvar="SHOAL_SOURCES", default="", help="The chart's `sources`, as JSON (SHOAL_SOURCES).")
@click.option("--ca-bundle", envvar="SSL_CERT_FILE", default="", help="Additional CA certificates (SSL_CERT_FILE).")
@click.option("--log-level", default="info", envvar="SHOAL_LOG_LEVEL", show_default=True)
def serve(
    host: str,
    port: int,
    engine_url: str,
    engine: str,
    max_running: int | None,
    keys: Path,
    run_dir: Path,
    cache: str,
    drain_seconds: float,
    stall_seconds: float,
    tls_dir: str,
    tls_port: int,
    proxies: bool,
    pod_ip: str,
    pool: str,
    adapters_dir: Path,
    secrets_dir: Path,
    hub_endpoint: str,
    sources: str,
    ca_bundle: str,
    log_level: str,
) -> None:
    """Run the agent: publish the replica's phase, load and adapters, and drain it."""
    from shoal.agent import cacheclient
    from shoal.agent.adapters.files import AdapterFolder
    from shoal.agent.adapters.service import AdapterService
    from shoal.agent.drain import Drain
    from shoal.agent.hook import Hook
    from shoal.agent.observe import EngineObserver
    from shoal.agent.serve import EngineAgent
    from shoal.agent.serve import serve as run
    from shoal.agent.stage.adapter import IMPATIENT, stage_adapter
    from shoal.agent.stalls import StallTracker
    from shoal.agent.stream import AgentStream
    from shoal.engine.kinds import DEFAULT, KINDS
    from shoal.net.tls import TLSCredentials

    configure(log_level)
    kind = KINDS.get(engine) if engine else DEFAULT
    if kind is None:
        raise click.BadParameter(f"{engine!r} is none of {', '.join(KINDS)}", param_hint=names.ENGINE_ENV)
    settings = _pool(pool)
    fetching = container.source_settings(hub_endpoint, sources)
    if settings is not None:
        container.trust(ca_bundle, run_dir / ".ca.crt")
    stalls = StallTracker(stall_seconds, run_dir / Path(names.STALLED_FILE).name)

    async def main() -> None:
        stop = asyncio.Event()
        # PID 1 of a container has no default action for these signals.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        stream = AgentStream()
        drain = Drain(drain_seconds)
        adapters = None
        if settings is not None:
            fetch = partial(
                stage_adapter,
                settings=settings,
                rules=kind.pod.adapter_rules,
                secrets=secrets_dir,
                cache=Path(cache) if cache else None,
                sources=replace(IMPATIENT, hub_endpoint=fetching.hub_endpoint, network=fetching.network),
            )
            adapters = AdapterService(settings, drain, AdapterFolder(adapters_dir), fetch, kind.agent)
        observer = EngineObserver(stream, drain, stalls, run_dir, adapters)
        model_file = run_dir / Path(names.CACHE_MODEL_FILE).name
        background = [Hook(drain, run_dir).run]
        if cache:
            background.append(partial(cacheclient.hold, Path(cache), model_file))
        credentials = TLSCredentials(Path(tls_dir)) if tls_dir else None
        agent = EngineAgent(
            engine_url, keys, stream, observer, drain, adapters, credentials, kind=kind, max_running=max_running
        )
        await run(
            agent,
            stream,
            host=host,
            port=port,
            tls_port=tls_port,
            stop=stop,
            beside=background,
            admits_for=pod_ip if proxies else None,
        )

    asyncio.run(main())


def _pool(text: str) -> AdapterSettings | None:
    if not text:
        return None
    try:
        return AdapterSettings.model_validate_json(text)
    except ValidationError as error:
        faults = ", ".join(".".join(map(str, fault["loc"])) or fault["type"] for fault in error.errors())
        raise click.BadParameter(f"not a pool's settings: {faults}", param_hint=ADAPTERS_ENV) from None


@command.command()
@click.option("--uri", envvar="SHOAL_STAGE_URI", required=True, help="The Model's source (SHOAL_STAGE_URI).")
@click.option("--digest", envvar="SHOAL_STAGE_DIGEST", default="", help="Required digest (SHOAL_STAGE_DIGEST).")
@click.option("--revision", envvar="SHOAL_STAGE_REVISION", default="", help="Commit on the hub (SHOAL_STAGE_REVISION).")
@click.option("--manifest", envvar="SHOAL_STAGE_MANIFEST", default="", help="Its manifest (SHOAL_STAGE_MANIFEST).")
@click.option(
    "--identity",
    is_flag=True,
    envvar="SHOAL_STAGE_IDENTITY",
    help="Read a bucket with the ServiceAccount's identity if the Secret has no keys (SHOAL_STAGE_IDENTITY).",
)
@click.option("--hub-endpoint", envvar="HF_ENDPOINT", default="", help="URL of a mirror of the hub (HF_ENDPOINT).")
@click.option("--sources", envvar="SHOAL_SOURCES", default="", help="The chart's `sources`, as JSON (SHOAL_SOURCES).")
@click.option("--target", default=names.MODEL_PATH, show_default=True, type=click.Path(path_type=Path))
@click.option("--source-dir", default=names.SOURCE_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--secret-dir", default=names.SOURCE_SECRET_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--progress", default=names.STAGE_PROGRESS_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--cache", envvar="SHOAL_STAGE_CACHE", default="", help="Folder of the node cache (SHOAL_STAGE_CACHE).")
@click.option(
    "--termination-log", default=container.TERMINATION_LOG, show_default=True, type=click.Path(path_type=Path)
)
@click.option("--ca-bundle", envvar="SSL_CERT_FILE", default="", help="Additional CA certificates (SSL_CERT_FILE).")
@click.option("--log-level", default="info", envvar="SHOAL_LOG_LEVEL", show_default=True)
def stage(
    uri: str,
    digest: str,
    revision: str,
    manifest: str,
    identity: bool,
    hub_endpoint: str,
    sources: str,
    target: Path,
    source_dir: Path,
    secret_dir: Path,
    progress: Path,
    cache: str,
    termination_log: Path,
    ca_bundle: str,
    log_level: str,
) -> None:
    """Fetch a model to the path where the engine reads it, and verify it."""
    from shoal.agent.stage.request import StagePaths, StageRequest
    from shoal.agent.stage.run import run_stage

    configure(log_level)
    container.exit_on_sigterm()
    container.trust(ca_bundle, target.with_name(".ca.crt"))
    settings = container.source_settings(hub_endpoint, sources)
    request = StageRequest(uri, digest or None, revision or None, manifest or None, settings, identity)
    paths = StagePaths(
        target=target, source=source_dir, secret=secret_dir, progress=progress, cache=Path(cache) if cache else None
    )
    sys.exit(run_stage(request, paths, container.termination(termination_log)))
