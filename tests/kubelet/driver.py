"""A DRA driver for one node: `python -m tests.kubelet.driver CONFIG`, in the mount namespace of the node.

What `sigs.k8s.io/dra-example-driver` does, without its devices being anything: it registers with the kubelet, prepares
the devices that the scheduler has allocated to a claim, gives each a name in the container runtime (CDI) with an
environment variable, and tells which devices are well. The journal has a line for each call.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
from pydantic import BaseModel, ConfigDict

CDI_KIND: Final = "shoal.test/gpu"
VARIABLE: Final = "SHOAL_TEST_GPU"
"""Names a container's device in its environment."""
_KUBELET: Final = Path("/var/lib/kubelet")
_CDI: Final = Path("/var/run/cdi/shoal-test.json")
_PROTOCOL: Final = "tests/kubelet/protocol"
_POLL_SECONDS: Final = 0.5
_TIMEOUT: Final = 20


class DriverConfig(BaseModel):
    """What the test hands over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    driver: str
    pool: str
    devices: tuple[str, ...]
    kubectl: tuple[str, ...]
    """With its kubeconfig: what a claim was given stands in its status."""
    journal: Path
    sick: Path
    """A file with the names of devices that are not well, one a line."""


class Driver:
    """The three services."""

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._dra, _ = _compiled("dra")
        self._health, _ = _compiled("health")
        self._registration, _ = _compiled("registration")
        self._lock = threading.Lock()

    def say(self, what: str, **fields: Any) -> None:
        with self._lock, self._config.journal.open("a") as file:
            file.write(json.dumps({"what": what, "at": time.time(), **fields}) + "\n")

    # --- registration -------------------------------------------------------------------------------------------------

    def GetInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802 - of the protocol
        return self._registration.PluginInfo(
            type="DRAPlugin",
            name=self._config.driver,
            endpoint=str(socket_of(self._config.driver)),
            supported_versions=["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"],
        )

    def NotifyRegistrationStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802 - of the protocol
        self.say("registered" if request.plugin_registered else "refused", error=request.error)
        return self._registration.RegistrationStatusResponse()

    # --- claims -------------------------------------------------------------------------------------------------------

    def NodePrepareResources(self, request: Any, _context: Any) -> Any:  # noqa: N802 - of the protocol
        answer = self._dra.NodePrepareResourcesResponse()
        for claim in request.claims:
            try:
                results = self._allocated(claim)
            except (subprocess.SubprocessError, ValueError, KeyError) as error:
                answer.claims[claim.uid].error = f"{type(error).__name__}: {error}"
                continue
            for result in results:
                answer.claims[claim.uid].devices.add(
                    request_names=[result["request"]],
                    pool_name=result["pool"],
                    device_name=result["device"],
                    cdi_device_ids=[f"{CDI_KIND}={result['device']}"],
                )
            self.say("prepared", claim=claim.uid, name=claim.name, devices=[result["device"] for result in results])
        return answer

    def NodeUnprepareResources(self, request: Any, _context: Any) -> Any:  # noqa: N802 - of the protocol
        answer = self._dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = ""
            self.say("unprepared", claim=claim.uid, name=claim.name)
        return answer

    def _allocated(self, claim: Any) -> list[dict[str, str]]:
        command = [*self._config.kubectl, "get", "resourceclaim", claim.name, "-n", claim.namespace, "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
        found = json.loads(done.stdout)
        if found["metadata"]["uid"] != claim.uid:
            raise ValueError("another claim has this name now")
        results: list[dict[str, str]] = found["status"]["allocation"]["devices"]["results"]
        return [each for each in results if each["driver"] == self._config.driver]

    # --- health -------------------------------------------------------------------------------------------------------

    def NodeWatchResources(self, _request: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - of the protocol
        told: frozenset[str] | None = None
        while context.is_active():
            sick = frozenset(self._config.sick.read_text().split())
            if sick != told:
                told = sick
                self.say("health", sick=sorted(sick))
                yield self._health.NodeWatchResourcesResponse(
                    devices=[self._said(d, sick) for d in self._config.devices]
                )
            time.sleep(_POLL_SECONDS)

    def _said(self, device: str, sick: frozenset[str]) -> Any:
        return self._health.DeviceHealth(
            device={"pool_name": self._config.pool, "device_name": device},
            health="UNHEALTHY" if device in sick else "HEALTHY",
            last_updated_time=int(time.time()),
            health_check_timeout_seconds=3600,
            message="Xid 79: fallen off the bus" if device in sick else "",
        )

    # --- serving ------------------------------------------------------------------------------------------------------

    def write_cdi(self) -> None:
        """What the container runtime does for each device."""
        _CDI.parent.mkdir(parents=True, exist_ok=True)
        devices = [
            {"name": device, "containerEdits": {"env": [f"{VARIABLE}={device}"]}} for device in self._config.devices
        ]
        _CDI.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": CDI_KIND, "devices": devices}))

    def serve(self) -> None:
        """Until SIGTERM. The socket by which the kubelet finds the driver comes last."""
        self.write_cdi()
        name = self._config.driver
        servers = [
            self._served(socket_of(name), "dra", "health"),
            self._served(_KUBELET / "plugins_registry" / f"{name}-reg.sock", "registration"),
        ]
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: ended.set())
        ended.wait()
        for server in servers:
            server.stop(1).wait()

    def _served(self, socket: Path, *protocols: str) -> grpc.Server:
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(8))
        for protocol in protocols:
            services: Any = _compiled(protocol)[1]
            (add,) = [each for each in dir(services) if each.startswith("add_") and each.endswith("_to_server")]
            getattr(services, add)(self, server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        return server


def socket_of(driver: str) -> Path:
    """Where the kubelet asks the driver."""
    return _KUBELET / "plugins" / driver / "dra.sock"


def _compiled(protocol: str) -> tuple[Any, Any]:
    """Messages and services."""
    compile_: Any = grpc.protos_and_services  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType] - not in the stubs
    return compile_(f"{_PROTOCOL}/{protocol}.proto")


if __name__ == "__main__":
    Driver(DriverConfig.model_validate_json(Path(sys.argv[1]).read_bytes())).serve()
