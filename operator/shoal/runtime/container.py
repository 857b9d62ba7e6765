"""Common parts of the short-lived containers of Shoal's image: stage and facts."""

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


def exit_on_sigterm() -> None:
    """Makes SIGTERM exit at once: PID 1 of a container has no default action for it, and a download in a thread cannot
    be cancelled. Downloaded parts stay, and the next start continues from them."""
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def source_settings(hub_endpoint: str, sources: str) -> "Settings":
    """Settings of sources, with the chart's `sources` section as JSON. Raises UsageError."""
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
    """A function that writes the termination message; errors are printed only."""

    def write(message: str) -> None:
        try:
            path.write_text(message)
        except OSError as error:
            click.echo(f"termination message not written: {error}", err=True)

    return write


def trust(bundle: str, combined: Path) -> None:
    """Points SSL_CERT_FILE to the file `combined`, which contains the public roots and those of `bundle`."""
    from shoal.artifacts.connect import with_public_roots

    if not bundle:
        return
    try:
        # Python's TLS, the hub's client and obstore read it.
        os.environ["SSL_CERT_FILE"] = str(with_public_roots(Path(bundle), combined))
    except (OSError, ssl.SSLError) as error:
        click.echo(f"the CA bundle {bundle} is not usable, continuing without it: {error}", err=True)
        os.environ.pop("SSL_CERT_FILE", None)
