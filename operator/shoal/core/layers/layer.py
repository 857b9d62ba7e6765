"""The layers of an inference stack."""

from enum import StrEnum
from typing import Final


class Layer(StrEnum):
    """Where a problem is. The value is what messages, events and metrics show."""

    HARDWARE = "L0"
    FABRIC = "L0.5"
    DRIVER = "L1"
    CONTAINER = "L2"
    ARTIFACT = "L2.5"
    EXECUTION = "L3"
    ENGINE = "L4"
    GATEWAY = "L5"
    CLIENT = "L6"
    CONTROL = "control"

    @property
    def noun(self) -> str:
        """Its name: `engine`."""
        return _TITLES[self][0]

    @property
    def about(self) -> str:
        """What belongs to it."""
        return _TITLES[self][1]

    @property
    def label(self) -> str:
        """`L4 engine`, for people."""
        return self.value if self is Layer.CONTROL else f"{self.value} {self.noun}"

    @property
    def order(self) -> int:
        """The most upstream layer is 0. A problem of a layer may cause problems of every later one."""
        return _ORDER[self]


_TITLES: Final = {
    Layer.HARDWARE: ("hardware", "GPUs and machines"),
    Layer.FABRIC: ("fabric", "links between GPUs and between machines: NVLink, InfiniBand, RDMA"),
    Layer.DRIVER: ("driver", "GPU driver, container toolkit and device plugin"),
    Layer.CONTAINER: ("container", "Kubernetes: nodes, scheduling, quotas, images, volumes, memory of containers"),
    Layer.ARTIFACT: ("artifact", "weights and adapters: source, fetch, check, node cache"),
    Layer.EXECUTION: ("execution", "what runs on the GPU: kernels, collectives, GPU memory"),
    Layer.ENGINE: ("engine", "the engine's process and its arguments"),
    Layer.GATEWAY: ("gateway", "gateways, and what they know of replicas and of each other"),
    Layer.CLIENT: ("client", "the request, its key, and what its tenant may use"),
    Layer.CONTROL: ("control", "Shoal's own decisions, settings and processes"),
}
_ORDER: Final = {layer: place for place, layer in enumerate(Layer)}
