"""The steps of the demo, each usable by itself: the end-to-end tests take the same ones."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import click

from shoal.api import names
from shoal_dev.demo import enginecpu
from shoal_dev.demo.clusters import NAMESPACE, DemoCluster
from shoal_dev.lab.fleet import FleetFile, NodeGroup

ROOT: Final = Path(__file__).parents[3]
EXAMPLES: Final = ROOT / "examples"
EXAMPLE_FILES: Final = ("gpuclasses.yaml", "models.yaml", "tenant.yaml")
SCALING_FILE: Final = "scaling.yaml"
LORA_FILE: Final = "lora.yaml"
TENANTS_FILE: Final = "tenants.yaml"
ENGINES_FILE: Final = "engines.yaml"
CANARY_FILE: Final = "canary.yaml"
DEVICES_FILE: Final = "devices.yaml"
PRICES_FILE: Final = "prices/demo.yaml"
ACTS: Final = ("fleet", "elastic", "tunes", "engines", "routes")
"""Namespaces of the acts' examples."""
"""Applied by its act."""
DEMO_NAMESPACE: Final = "demo"
DEMO_KEY: Final = "sk-demo-acme-5f0c2b7e9a"
"""The key whose hash stands in examples/tenant.yaml: public, not a secret."""
LAB_IMAGE: Final = "shoal:lab"
_DEVICE_NODES: Final[Mapping[str, Any]] = {
    "name": "dra-{n}",
    "count": 2,
    "gpus": 1,
    "gpuProduct": "NVIDIA L4",
    "gpuMemoryMiB": 23034,
    "dra": True,
}
"""A GPU each, so that the one that sickens is the replica's."""
_RECORD_SECONDS: Final = 20.0
"""How long a record is waited for."""

EngineChoice = Literal["simulator", "sglang"]


def install(
    cluster: DemoCluster, engine: EngineChoice, image: str, values: Mapping[str, Any] | None = None, root: Path = ROOT
) -> None:
    """Installs both charts and waits until operator and gateway are up. `values` go over the demo's own. `root`: the
    checkout whose charts they are."""
    repository, _, tag = image.rpartition(":")
    prices = root / "examples" / PRICES_FILE
    own: dict[str, Any] = {
        "image": {"repository": repository, "tag": tag},
        "ledger": {"prices": {prices.name: prices.read_text()}},
    }
    if engine == "simulator":
        # What a real engine asks for by default would not fit on a laptop's kind or k3d.
        own["engines"] = {"simulator": {"enabled": True}, "cpuPerGPU": "100m", "memoryPerGPU": "512Mi"}
    else:
        own |= enginecpu.VALUES
    where = ("--namespace", NAMESPACE, "--create-namespace", "--wait")
    cluster.helm("upgrade", "--install", "shoal-crds", str(root / "charts" / "shoal-crds"), *where)
    cluster.helm(
        "upgrade",
        "--install",
        "shoal",
        str(root / "charts" / "shoal"),
        *where,
        "-f",
        "-",
        values=own | dict(values or {}),
    )


def apply_examples(cluster: DemoCluster) -> None:
    cluster.kubectl("apply", *[arg for file in EXAMPLE_FILES for arg in ("-f", str(EXAMPLES / file))])


def with_devices(fleet: FleetFile) -> FleetFile:
    """The fleet, and nodes whose GPUs are devices of a DRA driver."""
    return fleet.model_copy(update={"nodes": (*fleet.nodes, NodeGroup.model_validate(_DEVICE_NODES))})


def apply_devices(cluster: DemoCluster) -> None:
    """Applies the Model on these devices."""
    cluster.kubectl("apply", "-f", str(EXAMPLES / DEVICES_FILE))


def usage_record(cluster: DemoCluster, request_id: str) -> dict[str, Any]:
    """The final usage record of the request, from the spool of whichever gateway served it.

    It is written a moment after the client has read the last byte. Raises ClickException when no gateway comes to have
    it.
    """
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY}"
    command = ("shoal", "gateway", "records", "--request", request_id, "-o", "json")
    deadline = time.monotonic() + _RECORD_SECONDS
    while True:
        for pod in cluster.get("pods", "-n", NAMESPACE, "-l", selector):
            output = cluster.exec(pod["metadata"]["name"], *command)
            rows = [json.loads(line) for line in output.splitlines() if line.strip()]
            for row in rows:
                if row["data"]["kind"] == "final":
                    return row
        if time.monotonic() > deadline:
            raise click.ClickException(f"no gateway has a usage record of request {request_id}")
        time.sleep(0.5)
