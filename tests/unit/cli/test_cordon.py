"""What people name when they take GPUs out of use."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from shoal.api.gpuclass import GPUClass
from shoal.cli.cordon.command import cordon
from shoal.cli.cordon.units import of_device, of_node, put_back
from shoal.cli.gpus import GPUsView
from shoal.cli.main import main
from shoal.core.devices import DeviceClass
from shoal.core.facts import Node
from shoal.core.health import Unit
from shoal.kube import deviceviews
from tests.support.cannedapi import CannedApi
from tests.support.devices import class_of_devices, resource_slice
from tests.support.operators import gpu_class


def node(name: str, product: str) -> Node:
    return Node(
        name, {"nvidia.com/gpu.product": product}, True, False, (), {"nvidia.com/gpu": 8}, {"nvidia.com/gpu": 8}
    )


def view(**status: Any) -> GPUsView:
    plugin = GPUClass.model_validate(gpu_class("h100", "H100") | {"status": status})
    devices = GPUClass.model_validate(class_of_devices("devices"))
    slices = (deviceviews.resource_slice(resource_slice("b", "gpu-0", "gpu-1")),)
    return GPUsView(
        (devices, plugin), (node("a", "H100"), node("b", "L4")), slices, {"gpu.test": DeviceClass("gpu.test", ())}
    )


def test_a_node_is_that_of_the_classes_that_count_it() -> None:
    [found] = of_node(view(), "a", None)
    assert (found.gpu_class.metadata.name, found.unit) == ("h100", Unit("a"))
    [found] = of_node(view(), "b", None)
    assert (found.gpu_class.metadata.name, found.unit) == ("devices", Unit("b"))
    with pytest.raises(click.ClickException, match="no GPUClass has the node c"):
        of_node(view(), "c", None)
    with pytest.raises(click.ClickException, match="GPUClass devices does not have the node a"):
        of_node(view(), "a", "devices")


@pytest.mark.parametrize("device", ["gpu-1", "gpu.test/b/gpu-1"])
def test_a_device_has_its_short_or_its_whole_name(device: str) -> None:
    found = of_device(view(), "b", device, None)
    assert (found.gpu_class.metadata.name, found.unit) == ("devices", Unit("b", "gpu.test/b/gpu-1"))


def test_a_gpu_of_a_device_plugin_cannot_be_left_out_alone_and_that_is_said() -> None:
    with pytest.raises(click.ClickException, match="`shoal cordon node a`"):
        of_device(view(), "a", "GPU-7", None)
    with pytest.raises(click.ClickException, match="no GPUClass has a device gpu-9 on node b"):
        of_device(view(), "b", "gpu-9", None)


def test_only_what_is_out_of_use_can_be_put_back() -> None:
    entry = {
        "node": "a", "device": "GPU-7", "state": "Probation", "reason": "R", "message": "", "by": "Shoal",
        "since": "2026-11-26T00:00:00Z", "times": 1,
    }  # fmt: skip
    seen = view(quarantined=[entry])
    assert [each.unit for each in put_back(seen, "a", None, None)] == [Unit("a", "GPU-7")]
    assert [each.unit for each in put_back(seen, "a", "GPU-7", "h100")] == [Unit("a", "GPU-7")]
    for which in (("b", None), ("a", "GPU-8")):
        with pytest.raises(click.ClickException, match="is not out of use"):
            put_back(seen, *which, None)


def test_programs_read_what_was_taken_out_of_use(tmp_path: Path) -> None:
    classes = "/apis/shoal.dev/v1alpha1/gpuclasses"
    raw = gpu_class("h100", "H100")
    gpus = {"nvidia.com/gpu": "8"}
    labels = {"nvidia.com/gpu.product": "H100"}
    host = {"metadata": {"name": "a", "labels": labels}, "status": {"capacity": gpus, "allocatable": gpus}}
    api = CannedApi(
        {
            classes: {"metadata": {"resourceVersion": "1"}, "items": [raw]},
            f"{classes}/h100": raw,
            "/api/v1/nodes": {"metadata": {"resourceVersion": "1"}, "items": [host]},
        }
    )
    row = {"gpuClass": "h100", "node": "a", "device": None}
    with api.kubeconfig(tmp_path) as kubeconfig:
        where = ("--kubeconfig", str(kubeconfig))
        told = CliRunner().invoke(main, ["cordon", "node", "a", "--reason", "loud fan", "-o", "json", *where])
        assert told.exit_code == 0, told.output
        assert json.loads(told.stdout) == {"cordoned": [{**row, "reason": "loud fan", "until": None}]}
        ((_, patch),) = api.patches
        raw["metadata"]["annotations"] = {k: v for k, v in patch["metadata"]["annotations"].items() if v is not None}
        told = CliRunner().invoke(main, ["uncordon", "node", "a", "-o", "yaml", *where])
        assert told.exit_code == 0, told.output
        assert yaml.safe_load(told.stdout) == {"uncordoned": [{**row, "reason": None, "until": None}]}
        told = CliRunner().invoke(main, ["cordon", "node", "a", "--for", "12h", *where])
        assert told.stdout.startswith("gpuclass/h100: node a is taken out of use until 20")


@pytest.mark.parametrize("duration", ["", "12", "0h", "1w", "999999h", "-1h"])
def test_a_duration_has_a_unit(duration: str) -> None:
    found = CliRunner().invoke(cordon, ["node", "a", "--for", duration])
    assert found.exit_code == 2
    assert "such as 30m, 12h or 7d" in found.output
