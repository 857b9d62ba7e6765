"""`shoal agent facts`: the container of the Job that reads what is known of a model without its weights."""

import sys
import tempfile
from pathlib import Path

import click

from shoal.api import names
from shoal.runtime import container
from shoal.runtime.logs import configure


@click.command()
@click.option("--uri", envvar="SHOAL_STAGE_URI", required=True, help="The Model's source (SHOAL_STAGE_URI).")
@click.option("--hub-endpoint", envvar="HF_ENDPOINT", default="", help="A mirror of the hub (HF_ENDPOINT).")
@click.option("--source-dir", default=names.SOURCE_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--secret-dir", default=names.SOURCE_SECRET_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--termination-log", default=container.TERMINATION_LOG, show_default=True, type=click.Path(path_type=Path)
)
@click.option("--ca-bundle", envvar="SSL_CERT_FILE", default="", help="Further CA certificates (SSL_CERT_FILE).")
@click.option("--log-level", default="info", envvar="SHOAL_LOG_LEVEL", show_default=True)
def facts(
    uri: str,
    hub_endpoint: str,
    source_dir: Path,
    secret_dir: Path,
    termination_log: Path,
    ca_bundle: str,
    log_level: str,
) -> None:
    """Read what is known of a model without its weights."""
    from shoal.agent.facts import FactsRequest, run_facts
    from shoal.artifacts import Settings

    configure(log_level)
    container.leave_at_once()
    with tempfile.TemporaryDirectory() as folder:
        container.trust(ca_bundle, Path(folder, "ca.crt"))
        settings = Settings(hub_endpoint=hub_endpoint.rstrip("/") or None)
        request = FactsRequest(uri, source_dir, secret_dir, settings)
        code = run_facts(request, container.termination(termination_log))
    sys.exit(code)
