"""`shoal explain` and `shoal render` of Models that have a LoRAPool in the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.api.adapters import ADAPTERS_ENV
from shoal.cli.main import main
from shoal.core.architectures import facts_of
from tests.support.model_configs import LLAMA_8B

L4: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "GPUClass",
    "metadata": {"name": "l4"},
    "spec": {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "memoryPerGPU": "24Gi",
        "hourlyCost": {"amount": "0.43"},
    },
}


def own(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def model(*extra: str) -> dict[str, Any]:
    return own("Model", "base", source={"uri": "hf://org/m"}, engine={"contextLength": 8192, "extraArgs": list(extra)})


def pool(name: str = "pool", **spec: Any) -> dict[str, Any]:
    return own("LoRAPool", name, modelRef={"name": "base"}, **spec)


def adapter(name: str, of: str = "pool") -> dict[str, Any]:
    return own("LoRAAdapter", name, poolRef={"name": of}, source={"uri": f"s3://adapters/{name}"}, tenants=["*"])


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    found = facts_of(LLAMA_8B, source="hf://org/m", parameters=8_030_261_248, weight_bytes=16_060_522_496)
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(found.model_dump(mode="json", by_alias=True, exclude_none=True)))
    return path


def run(command: str, facts: Path, *objects: dict[str, Any], args: tuple[str, ...] = ()) -> Result:
    text = yaml.safe_dump_all([L4, *objects])
    return CliRunner(catch_exceptions=False).invoke(main, [command, "-f", "-", f"--facts={facts}", *args], input=text)


def explained(facts: Path, *objects: dict[str, Any]) -> dict[str, Any]:
    done = run("explain", facts, *objects, args=("-o", "json"))
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["models"]
    return found


def test_the_places_for_adapters_are_in_the_sums(facts: Path) -> None:
    plain, pooled = explained(facts, model()), explained(facts, model(), pool(maxRank=16), adapter("a"), adapter("b"))

    assert plain["classes"][0]["bytesPerGPU"]["adapters"] == 0
    taken = pooled["classes"][0]["bytesPerGPU"]["adapters"]
    assert taken > 0
    # Without them one GPU is enough.
    assert (plain["classes"][0]["gpusPerReplica"], pooled["classes"][0]["gpusPerReplica"]) == (1, 2)
    assert pooled["loraPool"] == "pool"
    assert "8 places for adapters of rank 16 on each replica, 64 in its host memory" in pooled["loraPoolNote"]
    assert "adapters in these files: 2" in pooled["loraPoolNote"]
    shown = run("explain", facts, model(), pool(maxRank=16), args=("--sums",)).output
    assert " + adapters " in " ".join(shown.split())


def test_a_class_that_the_places_exclude_says_so(facts: Path) -> None:
    done = run("explain", facts, model("--mem-fraction-static=0.9"), pool(maxRank=1024, slotsPerReplica=64))

    assert done.exit_code == 1
    assert "places for adapters" in " ".join(done.output.split())


def test_a_pool_that_the_engine_refuses_is_left_out_with_the_reason(facts: Path) -> None:
    found = explained(facts, model("--attn-dp-size=2"), pool())

    assert found["loraPool"] is None
    assert found["loraPoolNote"].startswith(
        "LoRAPool default/pool is left out: Model default/base: with parallelism.attentionData (--attn-dp-size)"
    )


def test_of_two_pools_the_first_counts(facts: Path) -> None:
    found = explained(facts, model(), pool("one", maxRank=8), pool("two", maxRank=16))

    assert found["loraPool"] == "one"
    assert "LoRAPool default/two comes too late: one pool per Model" in found["loraPoolNote"]


def test_a_spelling_mistake_in_a_pool_or_an_adapter_is_told(facts: Path) -> None:
    wrong = run("explain", facts, model(), pool(slotsPerReplicas=4))
    assert wrong.exit_code == 2
    assert "LoRAPool pool: spec.slotsPerReplicas: unknown field; did you mean `slotsPerReplica`?" in wrong.output

    lost = adapter("a")
    del lost["spec"]["tenants"]
    assert "LoRAAdapter a: spec.tenants: Field required" in run("explain", facts, model(), pool(), lost).output


def test_rendered_pods_have_what_the_pool_needs(facts: Path) -> None:
    done = run("render", facts, model(), pool(slotsPerReplica=4, maxRank=8))
    assert done.exit_code == 0, done.output
    (deployment,) = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    agent = next(c for c in spec["initContainers"] if c["name"] == "agent")

    assert "--max-loras-per-batch=4" in spec["containers"][0]["args"]
    assert json.loads(next(e["value"] for e in agent["env"] if e["name"] == ADAPTERS_ENV))["maxRank"] == 8
