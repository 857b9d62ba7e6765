"""One lab for the whole suite, with Shoal installed by helm and the examples applied: what a user has after a demo."""

import json
import os
from collections.abc import Generator
from typing import Any

import pytest
from rich.console import Console

from shoal.api import names
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import LabCluster
from shoal_dev.demo.watch import wait_until_ready
from shoal_dev.lab.api import Lab
from tests.support.waiting import until

HUB_NAMESPACE = "hub"
"""Where the chart's hub mirror would be; tests that need one start it."""
NEXT_ENGINE = "0.5.23-next"
"""A second row of the engine table."""
VALUES = {
    "hubEndpoint": f"http://hub.{HUB_NAMESPACE}.svc",
    "engines": {
        "simulator": {"enabled": True},
        "cpuPerGPU": "100m",
        "memoryPerGPU": "512Mi",
        "versions": {NEXT_ENGINE: {"image": "sglang:next"}},
    },
}
"""Of the chart, over the demo's own."""


STAY = ("tiny-chat", "tiny-code")
"""Models that every test finds, each with one replica."""


def serves(pod: dict[str, Any]) -> bool:
    """Whether it is ready, and not going."""
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))
    return ready and "deletionTimestamp" not in pod["metadata"]


_APPLY_SECONDS = 180
"""Many objects at once, on a machine that starts as many pods."""


class Fleet(LabCluster):
    """The lab with Shoal in it, and what the tests ask of it."""

    def model(self, name: str, namespace: str = steps.DEMO_NAMESPACE) -> dict[str, Any]:
        return json.loads(self.kubectl("get", "models.shoal.dev", name, "-n", namespace, "-o", "json"))

    def condition(self, name: str, type: str, namespace: str = steps.DEMO_NAMESPACE) -> dict[str, Any]:
        conditions = self.model(name, namespace).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type), {"reason": None, "message": ""})

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed), timeout=_APPLY_SECONDS)

    def make_model(self, name: str, namespace: str = steps.DEMO_NAMESPACE, **spec: Any) -> None:
        source = {"uri": "file:///opt/shoal/models/tiny-chat"}
        metadata = {"name": name, "namespace": namespace}
        self.apply(
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "Model",
                "metadata": metadata,
                "spec": {"source": source} | spec,
            }
        )

    def delete_model(self, name: str, namespace: str = steps.DEMO_NAMESPACE) -> None:
        self.kubectl("delete", "models.shoal.dev", name, "-n", namespace, "--ignore-not-found", timeout=120)

    def expect(self, name: str, type: str, reason: str, *, within: float = 120) -> str:
        """Waits until the condition has this reason, and returns its message."""
        last: dict[str, Any] = {}

        def found() -> bool:
            nonlocal last
            last = self.condition(name, type)
            return last["reason"] == reason

        until(found, within, lambda: last)
        return last["message"]

    def until_alone(self, *where: str) -> None:
        """Waits until no engine runs but those of the two Models that stay: what other tests deleted is removed in the
        background, drains, and has its GPUs until then. `where`: as kubectl takes it; the demo's namespace."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
        engines = ("pods", *(where or ("-n", steps.DEMO_NAMESPACE)), "-l", selector)

        def found() -> list[tuple[str, bool]]:
            return sorted((p["metadata"]["labels"][names.LABEL_MODEL], serves(p)) for p in self.get(*engines))

        until(lambda: found() == [(name, True) for name in STAY], 300, found)


@pytest.fixture(scope="session")
def fleet() -> Generator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    given = os.environ.get("SHOAL_E2E_LAB")  # one that somebody else made, and removes
    lab = Lab.get(given) if given else Lab.up(f"e2e-{os.getpid()}")
    try:
        fleet = Fleet(lab)
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
        steps.apply_examples(fleet)
        for model in STAY:
            # The tests of one worker take longer than a Model idles before it goes to zero.
            stays = json.dumps({"spec": {"scaling": {"minReplicas": 1}}})
            fleet.kubectl("patch", "models.shoal.dev", model, "-n", steps.DEMO_NAMESPACE, "--type=merge", "-p", stays)
        wait_until_ready(fleet, steps.DEMO_NAMESPACE, Console(quiet=True), 240)
        yield fleet
    finally:
        if not given:
            lab.down()
