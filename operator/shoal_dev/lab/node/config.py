"""The configuration file of a node process. The lab writes it; the node reads it once, at its start."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

GPU_RESOURCE = "nvidia.com/gpu"


class _Section(BaseModel):
    # forbid: a misspelt key must not be ignored
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class NodeTaint(_Section):
    key: str
    value: str = ""
    effect: str = "NoSchedule"


class NodeCapacity(_Section):
    """What the Node object offers. Nothing enforces it but the scheduler."""

    cpu: str = "64"
    memory: str = "512Gi"
    ephemeral_storage: str = "1Ti"
    pods: int = Field(110, ge=1, le=253)
    gpus: int = Field(0, ge=0)

    def resources(self) -> dict[str, str]:
        """As in `status.capacity`."""
        values = {
            "cpu": self.cpu,
            "memory": self.memory,
            "ephemeral-storage": self.ephemeral_storage,
            "pods": str(self.pods),
        }
        return values | ({GPU_RESOURCE: str(self.gpus)} if self.gpus else {})


class DRADevices(_Section):
    """GPUs that a driver publishes in a ResourceSlice."""

    count: int = Field(ge=1, le=64)
    product: str
    memory_mib: int = Field(ge=1)


class NodeSpec(_Section):
    name: str
    index: int = Field(ge=1, le=254)
    """Third byte of the node's pod addresses: 10.244.<index>.0/24. Unique in the lab among nodes that run processes."""
    kubelet_port: int = Field(ge=1, le=65535)
    """Of the TLS server on `NodeConfig.host_address`. Unique in the lab. Status-only nodes may share one."""
    labels: dict[str, str] = {}
    taints: tuple[NodeTaint, ...] = ()
    capacity: NodeCapacity = Field(default_factory=lambda: NodeCapacity.model_validate({}))
    dra: DRADevices | None = None
    """Its GPUs, if they are devices; `capacity` has none then."""
    kubeconfig: Path | None = None
    """This node's own identity (system:node:NAME). Without it, the process's `kubeconfig`."""


class Bind(_Section):
    """A file or folder of this machine inside the image."""

    host: Path
    container: str
    read_only: bool = True


class ImageConfig(_Section):
    """How containers of one image repository run on this machine: this machine's files, plus these."""

    command: tuple[str, ...] = ()
    """Used when the pod names no command (a real image's ENTRYPOINT)."""
    env: dict[str, str] = {}
    path_prepend: tuple[str, ...] = ()
    """Folders in front of PATH. Folders on the way to them become passable for every user, inside the container."""
    binds: tuple[Bind, ...] = ()
    user: int = 0
    """The image's USER, when the pod names none."""


class StatusOnly(_Section):
    ready_delay_seconds: float = Field(1.0, ge=0)
    """A pod turns Running and Ready so long after it was bound."""
    termination_messages: dict[str, str] = {}
    """Container's name -> termination message: a pod with `restartPolicy: Never` that has such a container ends with it
    instead, with exit code 0."""


class NodeConfig(_Section):
    lab: str
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    """Exactly one, unless `status_only`."""
    status_only: StatusOnly | None = None
    """Set: the nodes start no process, they only report."""

    api_server: str
    """https://HOST:PORT as reached from the lab's network namespace; replaces the kubeconfig's server."""
    kubeconfig: Path
    serving_cert: Path
    serving_key: Path
    client_ca: Path
    """Signs the API server's kubelet client certificate; the node's server demands one."""

    log_dir: Path
    """Container logs: <log_dir>/<node>/<namespace>_<pod>_<uid>/<container>/<restart>.log, in the CRI format."""
    run_dir: Path
    """Small state which `shoal lab exec` reads; the node mounts a tmpfs of its own below it, for root file systems."""
    data_dir: Path
    """On disk: emptyDir volumes that may become large. Emptied at the node's start and end."""

    bridge: str = "pods0"
    gateway: str = "10.244.0.1"
    pod_prefix: str = "10.244"
    """First two bytes of pod addresses; pods have a /16 on the bridge."""
    host_address: str = "10.200.0.1"
    """The nodes' InternalIP; where the kubelet ports listen."""
    dns_address: str = "10.96.0.10"
    service_address: str = "10.96.0.1"
    """The API server as pods see it (KUBERNETES_SERVICE_HOST)."""
    cluster_domain: str = "cluster.local"
    images: dict[str, ImageConfig] = {}
    """Image repository without tag and digest -> how it runs. `shoal` also serves `registry.example/x/shoal:v1`."""
    lease_seconds: float = Field(40.0, gt=0)
    """Duration of the node's Lease; renewed four times in it."""
    log_level: str = "info"

    @model_validator(mode="after")
    def _one_process_one_node(self) -> Self:
        if self.status_only is None and len(self.nodes) != 1:
            raise ValueError("a process runs exactly one node, unless the nodes are status-only")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError or pydantic.ValidationError."""
        return cls.model_validate_json(path.read_bytes())
