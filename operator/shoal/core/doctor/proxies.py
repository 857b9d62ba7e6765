"""Proxies that carry requests: external processing, InferencePools, and the proof that a gateway admitted a request."""

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from shoal.core.doctor.results import ok, result, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread

NO_POOLS: Final = "InferencePoolsMissing"
POOLS_UNUSED: Final = "InferencePoolsUnused"
NO_PROOFS: Final = "ProxiesWithoutProof"
NO_PROXIES: Final = "NoProxyNamespace"


def check(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether the setting `gateway.extProc` and the cluster's kinds go together, and what an engine asks of a proxy."""
    name, settings = "proxies", seen.proxies
    if isinstance(settings, Unread):
        yield unread(name, Layer.GATEWAY, settings)
        return
    if settings is None or not settings.enabled:
        if settings is not None and settings.pools:
            text = "the cluster has InferencePools, and gateway.extProc is off: Models get none"
            do = "Set gateway.extProc.enabled if proxies are to carry requests; else route to the gateways' Service."
            yield result(name, "warning", POOLS_UNUSED, Layer.GATEWAY, text, do)
        else:
            yield ok(name, Layer.GATEWAY, "off: clients and proxies call the gateways")
        return
    well = True
    if not settings.pools:
        well = False
        text = (
            "gateway.extProc is on, and the API server does not serve InferencePools (inference.networking.k8s.io/v1)"
        )
        do = "Install the CustomResourceDefinitions of the inference extension, or use Envoy's filter alone."
        yield result(name, "warning", NO_POOLS, Layer.GATEWAY, text, do)
    if not settings.mtls:
        well = False
        text = "gateway.extProc is on without mutual TLS: proxies get the engines' keys, and engines ask for no proof"
        do = "Set transport.mtls.enabled, or let the mesh's policies admit only gateways and proxies to the engines."
        yield result(name, "warning", NO_PROOFS, Layer.GATEWAY, text, do)
    if not settings.namespaces:
        well = False
        text = "gateway.extProc is on and names no namespace of proxies: network policies keep all of them out"
        do = "Name the proxies' namespaces in gateway.extProc.proxyNamespaces."
        yield result(name, "error", NO_PROXIES, Layer.GATEWAY, text, do)
    if well:
        yield ok(name, Layer.GATEWAY, f"proxies of {len(settings.namespaces)} namespaces carry requests, with proofs")
