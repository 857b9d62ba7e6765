"""`shoal cache`: the node cache."""

import asyncio
import os
import ssl
import tempfile
from pathlib import Path

import click


@click.group(name="cache")
def command() -> None:
    """Run the node cache."""


@command.command("run")
@click.option("--kubeconfig", help="Default: KUBECONFIG, ~/.kube/config or the pod's ServiceAccount.")
def run(kubeconfig: str | None) -> None:
    """Fetch models once for all pods of this node. Settings come from SHOAL_CACHE_* (docs/cache.md)."""
    import pydantic

    from shoal.cache.process import run as serve
    from shoal.cache.settings import CacheSettings
    from shoal.kube.client import KubeClient
    from shoal.runtime import logs

    try:
        settings = CacheSettings()
    except pydantic.ValidationError as error:
        faults = "; ".join(f"SHOAL_CACHE_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        raise click.ClickException(faults) from None
    logs.configure(settings.log_level)
    if settings.ca_bundle:
        _trust(settings.ca_bundle)

    async def main() -> None:
        client = await KubeClient.from_environment(kubeconfig=kubeconfig)
        async with client:
            await serve(settings, client)

    try:
        asyncio.run(main())
    except* (OSError, ValueError) as group:
        raise click.ClickException("; ".join(map(str, group.exceptions))) from None


def _trust(bundle: str) -> None:
    from shoal.artifacts.connect import with_public_roots

    if not Path(bundle).is_file():
        return
    combined = Path(tempfile.gettempdir()) / "ca.crt"
    try:
        os.environ["SSL_CERT_FILE"] = str(with_public_roots(Path(bundle), combined))
    except (OSError, ssl.SSLError) as error:
        click.echo(f"the CA bundle {bundle} is not usable, continuing without it: {error}", err=True)
