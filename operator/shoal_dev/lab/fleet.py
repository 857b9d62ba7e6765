"""The fleet file: which nodes a lab has, and which images it knows."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from shoal_dev.lab.errors import LabError
from shoal_dev.lab.node.config import GPU_RESOURCE, DRADevices, ImageConfig, NodeCapacity, NodeSpec, NodeTaint

MAX_NODES: Final = 250
"""Nodes that run processes: each has a /24 of 10.244.0.0/16."""
_FIRST_KUBELET_PORT: Final = 10300
"""Above etcd's and the control plane's ports, below the ephemeral range."""


class _Section(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class NodeGroup(_Section):
    """`count` nodes that are alike."""

    name: str = Field(min_length=1, max_length=50)
    """With {n}, which counts from 1; needed when count is more than 1."""
    count: int = Field(1, ge=1, le=5000)
    gpus: int = Field(0, ge=0, le=64)
    gpu_product: str | None = Field(None, alias="gpuProduct")
    """As GPU feature discovery writes it into the label nvidia.com/gpu.product."""
    gpu_memory_mib: int | None = Field(None, alias="gpuMemoryMiB", ge=1)
    cpu: str = Field("64", pattern=r"^[0-9]+m?$")
    memory: str = Field("256Gi", pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$")
    ephemeral_storage: str = Field("1Ti", pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$")
    pods: int = Field(110, ge=1, le=253)
    labels: dict[str, str] = {}
    taints: tuple[NodeTaint, ...] | None = None
    """Left out: nvidia.com/gpu:NoSchedule on nodes with GPUs, none on others."""
    status_only: bool = False
    """Pods on it turn Ready without a process: for thousands of pods."""
    dra: bool = False
    """Its GPUs are devices of a DRA driver, in a ResourceSlice: no extended resource, and no labels about GPUs."""
    real_kubelet: bool = False
    """A real kubelet with containerd, which runs images from `archives`; its CPUs and memory are the machine's."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.count > 1 and "{n}" not in self.name:
            raise ValueError(f"name {self.name!r} needs {{n}}, because count is {self.count}")
        if self.real_kubelet and self.status_only:
            raise ValueError("a node with realKubelet runs its pods: leave statusOnly out")
        if self.dra and (not self.gpus or self.real_kubelet):
            raise ValueError("dra needs gpus, and a node that is no realKubelet")
        if self.gpus and (self.gpu_product is None or self.gpu_memory_mib is None):
            raise ValueError("gpus needs gpuProduct and gpuMemoryMiB")
        if not self.gpus and (self.gpu_product is not None or self.gpu_memory_mib is not None):
            raise ValueError("gpuProduct and gpuMemoryMiB need gpus")
        return self

    def node_labels(self, name: str) -> dict[str, str]:
        """What a kubelet and GPU feature discovery would set, and then the group's own."""
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        if self.gpus and not self.dra:
            product = cast("str", self.gpu_product)
            labels |= {
                "nvidia.com/gpu.present": "true",
                "nvidia.com/gpu.product": product,
                "nvidia.com/gpu.count": str(self.gpus),
                "nvidia.com/gpu.memory": str(self.gpu_memory_mib),
                "nvidia.com/gpu.replicas": "1",
                "nvidia.com/gpu.sharing-strategy": "none",
                "nvidia.com/mig.capable": "true" if "H100" in product or "A100" in product else "false",
                "nvidia.com/mig.strategy": "none",
                "node.kubernetes.io/instance-type": product.lower(),
            }
        return labels | self.labels

    def node_taints(self) -> tuple[NodeTaint, ...]:
        if self.taints is not None:
            return self.taints
        return (NodeTaint(key=GPU_RESOURCE, value="present"),) if self.gpus else ()


class FleetFile(_Section):
    """The whole file."""

    nodes: tuple[NodeGroup, ...] = Field(min_length=1)
    images: dict[str, ImageConfig] = {}
    archives: tuple[Path, ...] = ()
    """Image archives (OCI or docker) that nodes with realKubelet import; they pull nothing either."""
    termination_messages: dict[str, str] = {}
    """Of containers on nodes with statusOnly: container's name -> the termination message with which a pod of
    `restartPolicy: Never` ends there."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        seen: set[str] = set()
        for name, _ in self._names():
            if name in seen:
                raise ValueError(f"two nodes are called {name!r}")
            seen.add(name)
        running = sum(group.count for group in self.nodes if not group.status_only)
        if running > MAX_NODES:
            raise ValueError(
                f"{running} nodes that run processes; at most {MAX_NODES} fit (statusOnly ones do not count)"
            )
        return self

    def _names(self) -> Iterator[tuple[str, NodeGroup]]:
        for group in self.nodes:
            for number in range(1, group.count + 1):
                yield group.name.replace("{n}", str(number)), group

    def running(self, pki: Path) -> list[NodeSpec]:
        """Nodes that run processes, each with its own identity's kubeconfig below `pki`."""
        names = [(name, group) for name, group in self._names() if not group.status_only]
        return [
            _spec(name, group, index, _FIRST_KUBELET_PORT + index, pki / f"node-{name}.kubeconfig")
            for index, (name, group) in enumerate(names, 1)
        ]

    def with_real_kubelet(self) -> frozenset[str]:
        """Names of those among `running` that a real kubelet runs."""
        return frozenset(name for name, group in self._names() if group.real_kubelet)

    def status_only(self) -> list[NodeSpec]:
        """Nodes that only report. They share one kubelet port, and no pod of theirs has a reachable address."""
        names = [(name, group) for name, group in self._names() if group.status_only]
        return [_spec(name, group, 254, _FIRST_KUBELET_PORT, None) for name, group in names]

    def with_status_nodes(self, count: int) -> "FleetFile":
        """This fleet and `count` more 8-GPU nodes that only report."""
        if count == 0:
            return self
        group = NodeGroup(  # pyright: ignore[reportCallIssue] - it takes the aliases of unset fields for required
            name="status-{n}",
            count=count,
            gpus=8,
            gpuProduct="NVIDIA-H100-80GB-HBM3",
            gpuMemoryMiB=81559,
            cpu="192",
            memory="2Ti",
            status_only=True,
        )
        return self.model_copy(update={"nodes": (*self.nodes, group)})


def _spec(name: str, group: NodeGroup, index: int, port: int, kubeconfig: Path | None) -> NodeSpec:
    return NodeSpec(
        name=name,
        index=index,
        kubelet_port=port,
        labels=group.node_labels(name),
        taints=group.node_taints(),
        capacity=NodeCapacity(
            cpu=group.cpu,
            memory=group.memory,
            ephemeral_storage=group.ephemeral_storage,
            pods=group.pods,
            gpus=0 if group.dra else group.gpus,
        ),
        dra=DRADevices(count=group.gpus, product=group.gpu_product or "", memory_mib=group.gpu_memory_mib or 1)
        if group.dra
        else None,
        kubeconfig=kubeconfig,
    )


def default_fleet_text() -> str:
    """The fleet file that is used when none is given."""
    return resources.files("shoal_dev.lab").joinpath("fleet.yaml").read_text()


def load(path: Path | None) -> FleetFile:
    """Reads a fleet file; None is the default one. Raises LabError with each wrong field and its place."""
    source = "the default fleet" if path is None else str(path)
    try:
        text = default_fleet_text() if path is None else path.read_text()
    except OSError as error:
        raise LabError(f"fleet file {source}: {error.strerror}") from error
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LabError(f"fleet file {source} is no YAML: {error}") from error
    try:
        return FleetFile.model_validate(data)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        ]
        raise LabError("\n".join([f"fleet file {source}:", *lines])) from error
