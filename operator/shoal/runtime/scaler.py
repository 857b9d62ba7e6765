"""The external scaler of this process: its address, its certificate, and when it is started."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.api import names
from shoal.controllers.keda.answers import Answers
from shoal.controllers.keda.endpoints import Endpoints, OwnAddress
from shoal.controllers.keda.server import ScalerServer
from shoal.controllers.keda.tls import CertificateFiles
from shoal.controllers.world import World


@dataclass(frozen=True, slots=True)
class ScalerPlace:
    """Address and certificate of the external scaler."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: any free port."""
    pod_ip: str = ""
    """Address under which KEDA reaches it; "": outside of a pod, and no EndpointSlice is written."""
    pod: str = ""
    pod_uid: str = ""
    certificate: Path = Path(names.SCALER_TLS_DIR)
    """Folder of tls.crt, tls.key, ca.crt."""


def scaler_server(world: World, answers: Answers, certain: Callable[[], bool], place: ScalerPlace) -> ScalerServer:
    """The external scaler of this process, which listens once a Model is driven by KEDA. `certain`: whether this
    process is certain to be the leader. Raises ValueError for an invalid pod address."""
    settings = world.config.scaling.keda
    certificate = None
    if settings.tls:
        certificate = CertificateFiles(place.certificate, settings.tls_secret_name or names.SCALER_TLS_SECRET)
    endpoints = None
    if place.pod_ip:
        here = OwnAddress(place.pod_ip, place.port, place.pod, place.pod_uid)
        endpoints = Endpoints(world.client, world.namespace, here, certain)
    return ScalerServer(
        answers, certain, host=place.host, port=place.port, certificate=certificate, endpoints=endpoints
    )
