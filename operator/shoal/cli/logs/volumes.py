"""Volumes of gateways that were scaled away: their request logs are out of every gateway's reach."""

from typing import Final

from shoal.cli.services import GATEWAY_PODS
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden
from shoal.kube.resources import PERSISTENTVOLUMECLAIMS, PODS

_CLAIM: Final = "logs-"
"""What a StatefulSet puts before the pod's name in the claims of its template `logs`."""


async def left_behind(client: KubeClient, namespace: str) -> list[str]:
    """A message for each such volume. Raises KubeError."""
    try:
        claims = [
            str(raw["metadata"]["name"])
            async for raw in client.list(PERSISTENTVOLUMECLAIMS, namespace=namespace, label_selector=GATEWAY_PODS)
        ]
        pods = {
            str(raw["metadata"]["name"])
            async for raw in client.list(PODS, namespace=namespace, label_selector=GATEWAY_PODS)
        }
    except Forbidden as error:
        return [f"volumes of gateways that were scaled away are not known: {error.message}"]
    gone = sorted((claim, claim.removeprefix(_CLAIM)) for claim in claims if claim.startswith(_CLAIM))
    return [
        f"gateway {pod}: it was scaled away, and what it logged is on its volume still. Scale up again to reach "
        f"it, or delete it: kubectl -n {namespace} delete persistentvolumeclaim {claim}"
        for claim, pod in gone
        if pod not in pods
    ]
