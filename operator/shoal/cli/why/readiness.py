"""What a gateway that is not ready says of itself."""

import asyncio
from typing import Any, Final, cast

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.client import as_object
from shoal.core.layers.types import WhyPod
from shoal.kube import projections
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError

_SECONDS: Final = 5.0


async def missing(client: KubeClient, gateway: WhyPod, raw: JsonObject) -> tuple[str, ...]:
    """Names of the parts that it misses, by its /readyz. Nothing where it does not run or answer: its pod says why."""
    if gateway.ready or not any(each.state == "running" for each in gateway.containers):
        return ()
    seen = projections.pod(raw)
    tls = seen is not None and seen.mtls
    port = names.OPS_TLS_PORT if tls else names.OPS_PORT
    try:
        async with asyncio.timeout(_SECONDS):
            _, body = await client.proxied(gateway.name, gateway.namespace, port=port, path="/readyz", tls=tls)
    except (TimeoutError, KubeError):
        return ()
    listed = as_object(body).get("missing")
    return tuple(str(each) for each in cast("list[Any]", listed)) if isinstance(listed, list) else ()
