"""What the short-lived containers of Shoal's image have in common: stage and facts."""

import os
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import ValidationError

if TYPE_CHECKING:
    from shoal.artifacts import Settings

TERMINATION_LOG = "/dev/termination-log"


def leave_at_once() -> None:
    """As number 1 of its container a process has no default action for SIGTERM, and a download in a thread cannot be
    cancelled: leave at once. What was fetched stays, and the next start goes on from there."""
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def source_settings(hub_endpoint: str, sources: str) -> "Settings":
    """How sources are spoken to, and which may be: `sources` is the chart's section as JSON. Raises UsageError."""
    from shoal.api.config import SOURCES_ENV, Sources
    from shoal.artifacts import Settings
    from shoal.core import network

    try:
        rules = Sources.model_validate_json(sources or "{}")
    except ValidationError as error:
        faults = ", ".join(".".join(map(str, fault["loc"])) or fault["type"] for fault in error.errors())
        raise click.UsageError(f"{SOURCES_ENV} is not the chart's `sources`: {faults}") from None
    return Settings(hub_endpoint=hub_endpoint.rstrip("/") or None, network=network.of_config(rules))


def termination(path: Path) -> Callable[[str], None]:
    """Writes the termination message; a place that cannot be written is no reason to fail."""

    def write(message: str) -> None:
        try:
            path.write_text(message)
        except OSError as error:
            click.echo(f"termination message not written: {error}", err=True)

    return write


def trust(bundle: str, combined: Path) -> None:
    """Lets SSL_CERT_FILE name the public roots and those of `bundle`, together in the file `combined`."""
    from shoal.artifacts.connect import with_public_roots

    if not bundle:
        return
    try:
        # Read by Python's TLS, by the hub's client and for object stores alike.
        os.environ["SSL_CERT_FILE"] = str(with_public_roots(Path(bundle), combined))
    except (OSError, ssl.SSLError) as error:
        click.echo(f"the CA bundle {bundle} is not usable, going on without it: {error}", err=True)
        os.environ.pop("SSL_CERT_FILE", None)
