"""`shoal operator run`: the process around an `Operator`: configuration, probes, signals, the end."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import click
import prometheus_client
import structlog
import yaml
from pydantic import ValidationError
from starlette.responses import PlainTextResponse, Response

from shoal.api import names, rights
from shoal.api.config import OperatorConfig
from shoal.controllers.lora import serve as serve_adapters
from shoal.controllers.scaling import serve as serve_decisions
from shoal.kube.access import Access
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.net import trace
from shoal.net.pages import METRICS, TokenGuard, denial_response, metrics_page
from shoal.net.server import make_server
from shoal.net.serving import KEEP_ALIVE_SECONDS, serving
from shoal.net.shell import GET, Shell, ShellRequest
from shoal.runtime import logs
from shoal.runtime.operator import OperatorProcess
from shoal.runtime.scaler import ScalerPlace

log = structlog.get_logger()


def operator_ops(
    operator: OperatorProcess, access: Access, callers: Callers | None, *, open_metrics: bool = False
) -> Shell:
    """/healthz, /readyz, /metrics, /v1/decisions, /v1/adapters. The last two ask `access`, or `callers` for people with
    a role; so does /metrics, unless `open_metrics`."""
    guard = TokenGuard(access, callers, rights.OPERATOR, open_metrics=open_metrics)
    shell = Shell("the operator", wording=denial_response, guard=guard)

    async def answer(request: ShellRequest, problems: list[str]) -> Response:
        told = problems if await guard.may_know(request) else ["not ok"]
        return PlainTextResponse("\n".join(told if problems else ["ok"]) + "\n", 503 if problems else 200)

    async def healthz(request: ShellRequest) -> Response:
        return await answer(request, operator.unhealthy())

    async def readyz(request: ShellRequest) -> Response:
        return await answer(request, operator.unready())

    async def metrics(_: ShellRequest) -> Response:
        return await metrics_page(prometheus_client.REGISTRY, operator.registry)

    shell.route(GET, "/healthz", healthz)
    shell.route(GET, "/readyz", readyz)
    shell.route(GET, METRICS, metrics)
    leads, leader = (lambda: operator.elector.leading), (lambda: operator.elector.holder)
    identity = operator.identity
    serve_decisions.add_routes(shell, operator.history, operator=identity, leads=leads, leader=leader)
    serve_adapters.add_routes(shell, operator.lora.view, operator=identity, leads=leads, leader=leader)
    return shell


def read_config(path: Path) -> OperatorConfig:
    """Reads the operator's configuration file. Raises click.ClickException with what is wrong in it."""
    try:
        config = OperatorConfig.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise click.ClickException(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors())
        raise click.ClickException(f"{path}: {problems}") from error
    if (problem := config.engines.undefined_default()) is not None:
        raise click.ClickException(f"{path}: {problem}")
    return config


async def serve(
    config: OperatorConfig,
    namespace: str,
    *,
    host: str,
    port: int,
    scaler: ScalerPlace | None = None,
    kubeconfig: str | None = None,
) -> None:
    """Runs an operator until SIGTERM or SIGINT; then the workers stop, the Lease is freed, and it returns."""
    scope = config.scope_namespaces
    try:
        connected = await KubeClient.from_environment(kubeconfig=kubeconfig, scope=scope)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    async with connected as client:
        name = os.environ.get("POD_NAME")
        operator = OperatorProcess(client, config, namespace, identity=name, kubeconfig=kubeconfig, scaler=scaler)
        traces = trace.from_environment("shoal-operator", prometheus_client.REGISTRY)
        if traces is not None:
            operator.trace(traces.tracer)
        callers = Callers(client, rights.OPERATOR_AUDIENCE) if config.role_tokens else None
        pages = operator_ops(operator, Access(client), callers, open_metrics=not config.metrics_auth)
        ops = make_server(pages, host=host, port=port, keep_alive=KEEP_ALIVE_SECONDS, stop_seconds=1)
        try:
            async with serving(ops):
                log.info(
                    "operator", identity=operator.identity, namespace=namespace, api_server=client.server, port=port
                )
                task = asyncio.ensure_future(operator.run())
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, task.cancel)
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                log.info("stopped")
        finally:
            await trace.close(traces)


@click.group()
def command() -> None:
    """The operator."""


@command.command()
@click.option(
    "--config",
    "path",
    envvar="SHOAL_CONFIG",
    default="/etc/shoal/config.yaml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The configuration file that the chart writes.",
)
@click.option("--namespace", envvar="POD_NAMESPACE", default="shoal-system", show_default=True, help="Shoal's own.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address of probes and metrics.")  # noqa: S104
@click.option("--port", envvar="SHOAL_OPS_PORT", default=names.OPS_PORT, show_default=True, help="Their port.")
@click.option("--scaler-port", default=names.SCALER_PORT, show_default=True, help="Where KEDA is answered, if need be.")
@click.option(
    "--pod-ip", envvar="POD_IP", default="", help="By which KEDA reaches this process; empty: by other means."
)
def run(path: Path, namespace: str, host: str, port: int, scaler_port: int, pod_ip: str) -> None:
    """Runs the operator: reconciles GPUClasses, Models and Tenants while it holds the Lease."""
    config = read_config(path)
    logs.configure(config.log_level)
    code = 0
    try:
        pod, uid = os.environ.get("POD_NAME", ""), os.environ.get("POD_UID", "")
        scaler = ScalerPlace(host, scaler_port, pod_ip, pod, uid)
        asyncio.run(serve(config, namespace, host=host, port=port, scaler=scaler))
    except ValueError as error:  # no credentials, or no address
        raise click.ClickException(str(error)) from error
    except BaseExceptionGroup as error:
        log.exception("the operator ends", error=str(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The workers have stopped and the Lease is free. Kopf's thread may still wait for its streams, and the interpreter
    # would wait for it.
    os._exit(code)
