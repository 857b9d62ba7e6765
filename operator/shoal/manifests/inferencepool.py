"""What proxies of the Gateway API need of a Model: an InferencePool, and the way from its namespace to the gateways.

An InferencePool names its endpoint picker as a Service in its own namespace, and no ExternalName. So each Model gets a
Service without a selector, whose one EndpointSlice has the addresses of the gateways that are ready.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import children, facts
from shoal.manifests.shape import metadata, selector

API_VERSION: Final = "inference.networking.k8s.io/v1"
_SERVICE_NAME: Final = "kubernetes.io/service-name"
_MANAGED_BY: Final = "endpointslice.kubernetes.io/managed-by"
MOST_ADDRESSES: Final = 100
"""Of one EndpointSlice; Kubernetes takes 1,000. More gateways than that are not needed to answer one proxy."""


def pool(model: Model, config: OperatorConfig) -> JsonObject:
    """The InferencePool. FailClose: a request on which no gateway decides is refused."""
    port = names.ENGINE_PROXY_PORT if config.transport.mtls.enabled else names.ENGINE_PORT
    return {
        "apiVersion": API_VERSION,
        "kind": "InferencePool",
        "metadata": metadata(model, children.inference_pool(model.metadata.name)),
        "spec": {
            "selector": {"matchLabels": selector(model)},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": children.picker(model.metadata.name),
                "port": {"number": names.EXT_PROC_PORT},
                "failureMode": "FailClose",
            },
        },
    }


def service(model: Model) -> JsonObject:
    """The Service that the InferencePool names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, children.picker(model.metadata.name)),
        "spec": {
            "type": "ClusterIP",
            "ports": [_port() | {"targetPort": names.EXT_PROC_PORT}],
        },
    }


def endpoints(model: Model, gateways: Iterable[facts.Pod]) -> JsonObject:
    """Its EndpointSlice."""
    found = _addresses(gateways)
    name = children.picker(model.metadata.name)
    version = ipaddress.ip_address(found[0]).version if found else 4
    told = metadata(model, name, **{_SERVICE_NAME: name, _MANAGED_BY: "operator.shoal.dev"})
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": told,
        "addressType": f"IPv{version}",
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": True}}
            for address in found
            if ipaddress.ip_address(address).version == version
        ],
        "ports": [_port()],
    }


def _port() -> JsonObject:
    return {"name": "grpc", "port": names.EXT_PROC_PORT, "protocol": "TCP"}


def _addresses(gateways: Iterable[facts.Pod]) -> Sequence[str]:
    ready = {pod.ip for pod in gateways if pod.ready and not pod.deleting and pod.ip}
    return sorted(ready)[:MOST_ADDRESSES]
