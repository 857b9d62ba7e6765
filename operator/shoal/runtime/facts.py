"""`shoal agent facts`: the container of the Jobs that read the facts of a model or of LoRA adapters."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import ValidationError

from shoal.api import names
from shoal.api.adapterfacts import BATCH_ENV, AdapterBatch
from shoal.runtime import container
from shoal.runtime.logs import configure

if TYPE_CHECKING:
    from shoal.artifacts import Settings


@click.command()
@click.option("--uri", envvar="SHOAL_STAGE_URI", default="", help="The Model's source (SHOAL_STAGE_URI).")
@click.option("--adapters", is_flag=True, help="Read a batch of LoRA adapters (SHOAL_ADAPTER_FACTS).")
@click.option("--batch", envvar=BATCH_ENV, default="", help="The batch, as JSON (SHOAL_ADAPTER_FACTS).")
@click.option(
    "--identity",
    is_flag=True,
    envvar="SHOAL_STAGE_IDENTITY",
    help="Read a bucket with the ServiceAccount's identity if the Secret has no keys (SHOAL_STAGE_IDENTITY).",
)
@click.option("--hub-endpoint", envvar="HF_ENDPOINT", default="", help="URL of a mirror of the hub (HF_ENDPOINT).")
@click.option("--sources", envvar="SHOAL_SOURCES", default="", help="The chart's `sources`, as JSON (SHOAL_SOURCES).")
@click.option("--source-dir", default=names.SOURCE_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option("--secret-dir", default=names.SOURCE_SECRET_DIR, show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--adapter-secrets-dir", default=names.ADAPTER_SECRETS_DIR, show_default=True, type=click.Path(path_type=Path)
)
@click.option(
    "--termination-log", default=container.TERMINATION_LOG, show_default=True, type=click.Path(path_type=Path)
)
@click.option("--ca-bundle", envvar="SSL_CERT_FILE", default="", help="Additional CA certificates (SSL_CERT_FILE).")
@click.option("--log-level", default="info", envvar="SHOAL_LOG_LEVEL", show_default=True)
def facts(
    uri: str,
    adapters: bool,
    batch: str,
    identity: bool,
    hub_endpoint: str,
    sources: str,
    source_dir: Path,
    secret_dir: Path,
    adapter_secrets_dir: Path,
    termination_log: Path,
    ca_bundle: str,
    log_level: str,
) -> None:
    """Read the facts of a model, or of a batch of adapters, without their weights."""
    if not adapters and not uri:
        raise click.UsageError("--uri or SHOAL_STAGE_URI names the source, --adapters reads a batch")
    configure(log_level)
    container.exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        container.trust(ca_bundle, Path(folder, "ca.crt"))
        settings = container.source_settings(hub_endpoint, sources)
        write = container.termination(termination_log)
        if adapters:
            code = _adapters(batch, adapter_secrets_dir, settings, write)
        else:
            from shoal.agent.facts import FactsRequest, run_facts

            code = run_facts(FactsRequest(uri, source_dir, secret_dir, settings, identity), write)
    sys.exit(code)


def _adapters(batch: str, secrets: Path, settings: "Settings", write: Callable[[str], None]) -> int:
    from shoal.agent.adapterfacts import FactsReading, run_batch

    try:
        wanted = AdapterBatch.model_validate_json(batch)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors()[:3])
        raise click.UsageError(f"{BATCH_ENV} is not a batch of adapters: {problems}") from None
    return run_batch(FactsReading(wanted, secrets, settings), write)
