"""examples/fleet.yaml on the lab's own nodes, without a cluster: what its comments say is what is decided."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from shoal.cli.main import main
from shoal_dev.lab import fleet as lab

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
FLEET = ("small-8b", "medium-24b", "large-104b", "giant-405b", "nightly-8b")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the image's tiny models."""
    folder = tmp_path_factory.mktemp("models")
    script = ROOT / "images" / "shoal" / "make_models.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def fleet_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's default fleet as kubectl prints it, with the classes of the examples."""
    nodes = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": spec.name, "labels": spec.labels},
            "spec": {"taints": [taint.model_dump(by_alias=True) for taint in spec.taints]},
            "status": {
                "capacity": {"nvidia.com/gpu": str(spec.capacity.gpus)},
                "allocatable": {"nvidia.com/gpu": str(spec.capacity.gpus)},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for spec in lab.load(None).running(Path("none"))
    ]
    classes = list(yaml.safe_load_all((EXAMPLES / "gpuclasses.yaml").read_text()))
    path = tmp_path_factory.mktemp("fleet") / "fleet.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [*classes, *nodes]}))
    return path


def explain(config: Path, fleet_file: Path, files: tuple[Path, ...], names: tuple[str, ...]) -> dict[str, Any]:
    args = [part for file in files for part in ("-f", str(file))]
    sources = {
        model["metadata"]["name"]: model["spec"]["source"]["uri"].rpartition("/")[2]
        for file in files
        for model in yaml.safe_load_all(file.read_text())
        if model["kind"] == "Model"
    }
    facts = [part for name in names for part in ("--facts", f"{name}={config / sources[name] / 'config.json'}")]
    done = CliRunner(catch_exceptions=False).invoke(
        main, ["explain", *args, *facts, "--fleet", str(fleet_file), "-o", "json"]
    )
    assert done.exit_code in (0, 1), done.output
    report = json.loads(done.output)
    return {m["model"]: m for m in report["models"]} | {"fleet": report["fleet"]}


def used(model: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(c["gpuClass"], c["gpusPerReplica"], c["waiting"]) for c in model["classes"] if c["replicas"]]


def test_three_find_a_class_one_fits_nowhere_and_one_waits(config: Path, fleet_file: Path) -> None:
    files = (EXAMPLES / "models.yaml", EXAMPLES / "fleet.yaml")
    found = explain(config, fleet_file, files, ("tiny-chat", "tiny-code", *FLEET))
    assert used(found["demo/tiny-chat"]) == [("l40s-48gb", 1, 0)]
    assert used(found["demo/tiny-code"]) == [("l4-24gb", 1, 0)]
    assert used(found["fleet/small-8b"]) == [("l4-24gb", 2, 0)]
    assert used(found["fleet/medium-24b"]) == [("l40s-48gb", 2, 0)]
    assert used(found["fleet/large-104b"]) == [("h100-80gb", 4, 0)]
    assert found["fleet/giant-405b"]["reason"] == "NoFit"
    sums = {c["gpuClass"]: c["message"] for c in found["fleet/giant-405b"]["classes"]}
    assert "on 4 GPUs with 79.65 GiB each, weights need 189 GiB" in sums["h100-80gb"]
    assert "on 2 GPUs with 22.49 GiB each, weights need 378 GiB" in sums["l4-24gb"]
    assert not found["fleet/nightly-8b"]["placed"]
    assert found["fleet"]["notPlaced"] == ["fleet/giant-405b", "fleet/nightly-8b"]


def test_the_one_that_waits_has_room_without_the_other(config: Path, fleet_file: Path, tmp_path: Path) -> None:
    kept = [o for o in yaml.safe_load_all((EXAMPLES / "fleet.yaml").read_text()) if o["metadata"]["name"] != "small-8b"]
    rest = tmp_path / "rest.yaml"
    rest.write_text(yaml.safe_dump_all(kept))
    names = ("tiny-chat", "tiny-code", *(name for name in FLEET if name != "small-8b"))
    found = explain(config, fleet_file, (EXAMPLES / "models.yaml", rest), names)
    assert used(found["fleet/nightly-8b"]) == [("l4-24gb", 2, 0)]
