"""Where KEDA finds the external scaler: the leader writes its own address into the EndpointSlice of the Service, which
has no selector. A Service with one would lead to the operator that stands by as well, and a gRPC client stays where it
is connected."""

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.drift import covers
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.resources import ENDPOINTSLICES

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0
MANAGER: Final = "shoal-operator"


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """This process, as others reach it."""

    address: str
    """The pod's IP."""
    port: int
    pod: str = ""
    """Its name; "" outside of a pod."""
    pod_uid: str = ""
    """With both, the EndpointSlice goes with the pod."""


class Endpoints:
    """`run` it while this process leads. One that is right is only read."""

    def __init__(self, client: KubeClient, namespace: str, here: OwnAddress, certain: Callable[[], bool]) -> None:
        """Raises ValueError when the address is none."""
        self._client, self._namespace, self._here, self._certain = client, namespace, here, certain
        self._wanted = endpoint_slice(namespace, here)
        self.problem: str | None = None
        """Why KEDA may not find this process."""

    async def run(self) -> None:
        """Writes it at once, and again when it was edited or deleted, until cancelled."""
        while True:
            try:
                await self.check()
            except KubeError as error:
                problem = f"EndpointSlice {self._namespace}/{names.SCALER_SERVICE} cannot be written: {error.message}"
                if problem != self.problem:
                    log.warning("KEDA may not find the operator", problem=problem)
                self.problem = problem
            else:
                self.problem = None
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Raises KubeError."""
        try:
            live = await self._client.get(ENDPOINTSLICES, names.SCALER_SERVICE, self._namespace)
        except NotFound:
            live = None
        if live is not None and covers(live, self._wanted):
            return
        if not self._certain():
            return
        await self._client.apply(ENDPOINTSLICES, self._wanted, manager=MANAGER)
        log.info("KEDA is sent here", address=self._here.address, port=self._here.port)


def endpoint_slice(namespace: str, here: OwnAddress) -> JsonObject:
    """The one EndpointSlice of the Service. Raises ValueError when the address is none."""
    metadata: JsonObject = {
        "name": names.SCALER_SERVICE,
        "namespace": namespace,
        "labels": {
            "kubernetes.io/service-name": names.SCALER_SERVICE,
            # Kubernetes' own controller leaves slices of other managers alone.
            "endpointslice.kubernetes.io/managed-by": "operator.shoal.dev",
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
        },
    }
    endpoint: JsonObject = {"addresses": [here.address], "conditions": {"ready": True}}
    if here.pod and here.pod_uid:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": here.pod, "uid": here.pod_uid}
        metadata["ownerReferences"] = [owner]
        endpoint["targetRef"] = {"kind": "Pod", "namespace": namespace, "name": here.pod, "uid": here.pod_uid}
    return {
        "apiVersion": ENDPOINTSLICES.api_version,
        "kind": ENDPOINTSLICES.kind,
        "metadata": metadata,
        "addressType": f"IPv{ipaddress.ip_address(here.address).version}",
        "endpoints": [endpoint],
        "ports": [{"name": "grpc", "port": here.port, "protocol": "TCP"}],
    }
