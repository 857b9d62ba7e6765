"""What `shoal lab up` waits for."""

from typing import Any, cast

from shoal_dev.lab import bootstrap
from shoal_dev.lab.kubeapi import Api


class Nodes:
    """An API server that knows these nodes."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = items

    async def request(self, method: str, path: str) -> dict[str, Any]:
        assert (method, path) == ("GET", "/api/v1/nodes")
        return {"items": self.items}


def node(name: str, ready: str | None, *taints: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}] if ready else []
    spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]} if taints else {}
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": conditions}}


async def test_a_node_is_waited_for_until_it_takes_pods() -> None:
    nodes = Nodes(
        node("ready", "True"),
        node("gpu", "True", "nvidia.com/gpu"),
        node("still-tainted", "True", "nvidia.com/gpu", "node.kubernetes.io/not-ready"),
        node("silent", None),
        node("down", "False"),
    )
    names = ["ready", "gpu", "still-tainted", "silent", "down", "missing"]
    unready = await bootstrap.unready_nodes(cast("Api", nodes), names)
    assert unready == ["down", "missing", "silent", "still-tainted"]
