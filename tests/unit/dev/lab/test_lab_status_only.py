"""What nodes that start nothing say of their pods."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from shoal_dev.lab.kubeapi import Api
from shoal_dev.lab.node.config import NodeConfig, StatusOnly
from shoal_dev.lab.node.statusonly import StatusOnlyNodes


def said(pod: dict[str, Any], **termination_messages: str) -> dict[str, Any]:
    """The status that the node writes for a pod."""
    written: list[dict[str, Any]] = []

    async def request(method: str, path: str, body: dict[str, Any], *, content_type: str) -> None:
        assert (method, path) == ("PATCH", "/api/v1/namespaces/ns/pods/p/status")
        written.append(body["status"])

    async def main() -> None:
        config = SimpleNamespace(nodes=(), pod_prefix="10.1", host_address="10.0.0.1")
        settings = StatusOnly(ready_delay_seconds=0, termination_messages=termination_messages)
        nodes = StatusOnlyNodes(cast("NodeConfig", config), settings, cast("Api", SimpleNamespace(request=request)))
        await nodes._become_ready(pod)

    asyncio.run(main())
    return written[0]


def pod(name: str, policy: str) -> dict[str, Any]:
    spec = {"restartPolicy": policy, "containers": [{"name": name, "image": "i"}]}
    return {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": spec}


def test_a_pod_that_is_to_end_ends_with_its_termination_messages() -> None:
    found = said(pod("facts", "Never"), facts='{"facts": {}}')
    assert found["phase"] == "Succeeded"
    ended = found["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (0, '{"facts": {}}')
    assert {c["type"]: c["status"] for c in found["conditions"]}["Ready"] == "False"


def test_other_pods_run() -> None:
    assert said(pod("facts", "Always"), facts="x")["phase"] == "Running"
    assert said(pod("engine", "Never"), facts="x")["phase"] == "Running"
