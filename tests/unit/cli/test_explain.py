"""`shoal explain`: what a person sees of a decision without a cluster, and what is said when the input is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.cli.catalog import built_in
from shoal.cli.main import main
from tests.support.devices import DRIVER, class_of_devices, device_class, resource_slice

ROOT = Path(__file__).resolve().parents[3]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
WEIGHTS = 16_060_522_496
SMALL = {"name": "l4-24gb", "product": "NVIDIA-L4", "memory": "23034Mi", "price": "0.43", "cc": "8.9"}
MEDIUM = {"name": "l40s-48gb", "product": "NVIDIA-L40S", "memory": "46068Mi", "price": "0.93", "cc": "8.9"}
LARGE = {"name": "h100-80gb", "product": "NVIDIA-H100-80GB-HBM3", "memory": "81559Mi", "price": "2.49", "cc": "9.0"}


def gpu_class(of: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "GPUClass",
        "metadata": {"name": of["name"]},
        "spec": {
            "nodeSelector": {"nvidia.com/gpu.product": of["product"]},
            "memoryPerGPU": of["memory"],
            "computeCapability": of["cc"],
            "hourlyCost": {"amount": of["price"]},
        }
        | spec,
    }


def node(name: str, of: dict[str, str], gpus: int, **spec: Any) -> dict[str, Any]:
    amount = {"nvidia.com/gpu": str(gpus), "cpu": "64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": of["product"]}},
        "spec": spec,
        "status": {
            "capacity": amount,
            "allocatable": amount,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, on: str, gpus: int, **labels: str) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "chat", "uid": name, "labels": labels},
        "spec": {"nodeName": on, "containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": "Running"},
    }


def model(name: str = "llama", uri: str = "hf://owner/llama-8b", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name, "namespace": "chat"},
        "spec": {"source": {"uri": uri}} | spec,
    }


class Shell:
    """A folder with the files of a call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(LLAMA_8B))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": WEIGHTS}}))

    def write(self, name: str, *objects: dict[str, Any]) -> str:
        path = self.folder / name
        path.write_text(yaml.safe_dump_all(objects))
        return str(path)

    def fleet(self, *objects: dict[str, Any]) -> str:
        # As `kubectl get ... -o yaml` prints it.
        return self.write("fleet.yaml", {"apiVersion": "v1", "kind": "List", "items": list(objects)})

    def run(self, *args: str, models: tuple[dict[str, Any], ...] = (model(),), facts: bool = True) -> Result:
        known = ["--facts", str(self.folder / "config.json")] if facts else []
        return CliRunner(catch_exceptions=False).invoke(
            main, ["explain", "-f", self.write("m.yaml", *models), *known, *args]
        )

    def report(self, *args: str, models: tuple[dict[str, Any], ...] = (model(),)) -> dict[str, Any]:
        done = self.run(*args, "-o", "json", models=models)
        assert done.exit_code in (0, 1), done.output
        return json.loads(done.output)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def classes(report: dict[str, Any], number: int = 0) -> dict[str, dict[str, Any]]:
    return {c["gpuClass"]: c for c in report["models"][number]["classes"]}


def test_the_cheapest_class_that_holds_the_context_is_chosen_and_the_others_say_why_not(shell: Shell) -> None:
    short = model(engine={"contextLength": 8192})
    report = shell.report("--fleet", shell.fleet(*map(gpu_class, (SMALL, MEDIUM, LARGE))), models=(short,))
    found = classes(report)
    assert report["models"][0]["placed"]
    chosen = [c for c in found.values() if c["replicas"]]
    # Two L4 hold it, and two L4 cost less than one L40S.
    assert [(c["gpuClass"], c["gpusPerReplica"], c["hourlyCostPerReplica"]) for c in chosen] == [("l4-24gb", 2, "0.86")]
    assert found["l40s-48gb"]["gpusPerReplica"] == 1
    assert found["h100-80gb"]["kvTokensPerReplica"] > found["l40s-48gb"]["kvTokensPerReplica"] > 8192
    assert all(found[name]["message"] for name in ("l40s-48gb", "h100-80gb"))


def test_requests_at_once_are_counted_for_the_context_that_was_asked_for(shell: Shell) -> None:
    fleet = shell.fleet(gpu_class(LARGE))
    many = classes(shell.report("--fleet", fleet, "--context", "1000"))["h100-80gb"]
    few = classes(shell.report("--fleet", fleet, "--context", "100000"))["h100-80gb"]
    assert few["concurrentRequests"] == few["kvTokensPerReplica"] // 100000
    assert many["concurrentRequests"] > few["concurrentRequests"]


def test_what_fits_nowhere_shows_the_sum_and_ends_with_1(shell: Shell) -> None:
    done = shell.run("--fleet", shell.fleet(gpu_class(SMALL), node("n1", SMALL, 1)))
    assert done.exit_code == 1
    assert "NoFit: no class is large enough" in done.output
    assert "weights 14.96 GiB" in done.output


def test_the_parts_of_a_gpus_memory_are_shown_on_demand(shell: Shell) -> None:
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)), "--sums")
    assert done.exit_code == 0
    assert "79.65 GiB a GPU = gone before" in done.output
    sums = classes(shell.report("--fleet", shell.fleet(gpu_class(LARGE))))["h100-80gb"]["bytesPerGPU"]
    parts = sum(sums[part] for part in ("overhead", "reserve", "weights", "state", "kv"))
    assert abs(parts - sums["memory"]) < 2**20


def test_the_table_says_class_gpus_tokens_and_cost(shell: Shell) -> None:
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)))
    assert "chat/llama  hf://owner/llama-8b" in done.output
    assert "LlamaForCausalLM; weights 14.96 GiB (bfloat16); KV cache 128.0 KiB a token (Full)" in done.output
    (line,) = [line for line in done.output.splitlines() if "h100-80gb" in line and "✓" in line]
    assert "2.49 USD" in line
    assert "1 replica here" in line


def test_a_driver_changes_nothing_but_who_writes(shell: Shell) -> None:
    fleet = shell.fleet(gpu_class(LARGE))
    own = shell.run("--fleet", fleet).output
    driven = shell.run("--fleet", fleet, models=(model(scaling={"driver": "KEDA"}),)).output
    line = "  KEDA writes the replicas (spec.scaling.driver)\n"
    assert line in driven
    assert driven.replace(line, "") == own


def test_pods_of_others_hold_their_gpus_and_those_of_the_model_itself_do_not(shell: Shell) -> None:
    where = (gpu_class(LARGE), node("n1", LARGE, 2))
    labels = {
        "app.kubernetes.io/component": "engine",
        "shoal.dev/model": "llama",
        "shoal.dev/model-uid": "u",
        "shoal.dev/gpu-class": "h100-80gb",
    }
    own = pod("llama-1", "n1", 2, **labels)
    assert shell.report("--fleet", shell.fleet(*where, own))["models"][0]["placed"]
    other = shell.report("--fleet", shell.fleet(*where, pod("batch", "n1", 2)))
    assert not other["models"][0]["placed"]
    assert other["models"][0]["reason"] == "NoCapacity"
    assert other["fleet"]["allocatedPercent"] == 100.0
    assert other["fleet"]["notPlaced"] == ["chat/llama"]


def test_a_cordoned_node_offers_nothing(shell: Shell) -> None:
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE), node("n1", LARGE, 8, unschedulable=True)))
    assert done.exit_code == 1
    assert "NoCapacity" in done.output


def test_a_device_that_a_persons_rule_taints_is_not_free(shell: Shell) -> None:
    where = (
        class_of_devices("h100-dra", hourlyCost={"amount": "2.49"}),
        device_class(),
        node("n1", LARGE, 0),
        resource_slice("n1", "gpu-0", "gpu-1"),
    )
    rule = {
        "apiVersion": "resource.k8s.io/v1beta2",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "repair"},
        "spec": {"deviceSelector": {"pool": "n1"}, "taint": {"key": "example.com/repair", "effect": "NoSchedule"}},
    }
    assert shell.report("--fleet", shell.fleet(*where))["models"][0]["placed"]
    tainted = shell.report("--fleet", shell.fleet(*where, rule))["models"][0]
    assert (tainted["placed"], tainted["reason"]) == (False, "NoCapacity")


def test_many_models_share_one_fleet_and_the_more_important_gets_the_gpus(shell: Shell) -> None:
    both = (model("batch", priority=-10), model("chat", priority=10))
    fleet = shell.fleet(gpu_class(LARGE), node("n1", LARGE, 1))
    report = shell.report("--fleet", fleet, models=both)
    assert [m["placed"] for m in report["models"]] == [False, True]
    assert report["fleet"]["notPlaced"] == ["chat/batch"]
    assert report["fleet"]["hourlyCost"] == {"USD": "2.49"}
    (left,) = report["fleet"]["gpus"]
    assert left == {"gpuClass": "h100-80gb", "gpus": 1, "allocated": 1, "largestFreeOnOneNode": 0}
    text = shell.run("--fleet", fleet, models=both).output
    assert "GPUs allocated: 100.0 % (h100-80gb 1/1)" in text
    assert "Not placed: chat/batch" in text


def test_further_files_of_models_are_placed_together(shell: Shell) -> None:
    more = shell.write("more.yaml", model("second"))
    done = shell.run("--models", more, "--fleet", shell.fleet(gpu_class(LARGE)), "-o", "yaml")
    assert [m["model"] for m in yaml.safe_load(done.output)["models"]] == ["chat/llama", "chat/second"]


def test_of_equals_the_first_in_the_file_is_served_first(shell: Shell) -> None:
    fleet = shell.fleet(gpu_class(LARGE), node("n1", LARGE, 1))
    for order in (("b", "a"), ("a", "b")):
        report = shell.report("--fleet", fleet, models=tuple(map(model, order)))
        assert [m["placed"] for m in report["models"]] == [True, False]


def test_without_nodes_there_is_room_without_end_and_it_is_said(shell: Shell) -> None:
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)), models=(model(scaling={"minReplicas": 1000}),))
    assert done.exit_code == 0, done.output
    assert "Room: without end" in done.output
    assert "1000 replicas here" in done.output


def test_without_a_fleet_well_known_gpus_are_looked_at_and_none_is_chosen_without_a_price(shell: Shell) -> None:
    done = shell.run()
    assert done.exit_code == 0
    for name in built_in():
        assert name in done.output
    assert "no price" in done.output
    assert f"fits on {len(built_in())} of {len(built_in())} classes" in done.output
    assert "none is chosen" in done.output


def test_the_catalogue_has_no_prices_and_says_what_sizing_needs() -> None:
    for name, found in built_in().items():
        assert found.spec.hourly_cost is None, name
        assert found.spec.compute_capability, name
        assert found.spec.memory_bandwidth_gbps, name
        assert (found.spec.memory_per_gpu or "").endswith("Mi"), name


def test_a_class_without_a_price_is_named(shell: Shell) -> None:
    free = gpu_class(LARGE)
    del free["spec"]["hourlyCost"]
    done = shell.run("--fleet", shell.fleet(free), models=(model("a"), model("b")))
    assert "no price" in done.output
    assert "Cost per hour: not known" in done.output


def test_facts_of_a_folder_on_this_machine_are_read_as_in_the_cluster(shell: Shell, tmp_path: Path) -> None:
    script = ROOT / "images" / "shoal" / "make_models.py"
    subprocess.run([sys.executable, script, tmp_path / "models"], check=True, capture_output=True, timeout=60)
    tiny = model(uri=f"file://{tmp_path}/models/tiny-chat")
    done = shell.run("--fleet", shell.fleet(gpu_class(SMALL)), models=(tiny,), facts=False)
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM; 0.1 M parameters" in done.output


def test_facts_that_a_models_status_has_are_used(shell: Shell) -> None:
    raw = {"source": "hf://owner/llama-8b", "architecture": "SeenBefore", "weightBytes": 2**30, "contextLength": 2048}
    seen = model(sizing={"kvBytesPerToken": 1000})
    seen["status"] = {"artifact": raw | {"kv": {"kind": "Unknown"}}}
    done = shell.run("--fleet", shell.fleet(gpu_class(SMALL)), models=(seen,), facts=False)
    assert done.exit_code == 0, done.output
    assert "SeenBefore" in done.output


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("file:///nowhere/model", "file:///nowhere/model does not exist"),
        ("pvc://claim/folder", "pvc://claim/folder cannot be read from outside a cluster"),
    ],
)
def test_weights_that_cannot_be_read_ask_for_facts(shell: Shell, uri: str, told: str) -> None:
    done = shell.run("--fleet", shell.fleet(gpu_class(SMALL)), models=(model(uri=uri),), facts=False)
    assert done.exit_code == 1
    assert told in done.output
    assert "--facts" in done.output


def test_numbers_of_the_spec_stand_in_for_weights_that_cannot_be_read(shell: Shell) -> None:
    stated = model(uri="pvc://claim", sizing={"weightBytes": "15Gi", "kvBytesPerToken": 131072})
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)), models=(stated,), facts=False)
    assert done.exit_code == 0, done.output
    assert "sized without the facts of the weights: pvc://claim cannot be read" in done.output
    assert "as spec.sizing says: weightBytes 15Gi, kvBytesPerToken 131072" in done.output
    assert "contextLength" not in done.output


def test_a_context_that_cannot_be_compared_with_the_models_own_is_not_said_to_fit(shell: Shell) -> None:
    stated = model(uri="pvc://claim", sizing={"weightBytes": "15Gi", "kvBytesPerToken": 131072})
    stated["spec"]["engine"] = {"contextLength": 8192}
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)), models=(stated,), facts=False)
    assert "contextLength is not checked: what the model was made for is not known here" in done.output


def test_what_could_not_be_read_does_not_count_as_what_fits_nowhere(shell: Shell) -> None:
    unread, large = model("unread", uri="pvc://claim"), model("large", sizing={"weightBytes": "900Gi"})
    done = shell.run("--fleet", shell.fleet(gpu_class(SMALL)), models=(unread, large), facts=False)
    assert "Not looked at: chat/unread" in done.output
    assert not any("unread" in line for line in done.output.splitlines() if line.startswith("Not placed"))


def test_an_unknown_architecture_asks_for_numbers(shell: Shell) -> None:
    (shell.folder / "config.json").write_text(json.dumps(LLAMA_8B | {"architectures": ["NewForCausalLM"]}))
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)))
    assert done.exit_code == 1
    assert "kvBytesPerToken" in done.output


def test_refused_arguments_and_missing_classes_are_told_as_the_operator_tells_them(shell: Shell) -> None:
    wrong = model(engine={"extraArgs": ["--tp-size=2"]}, variants=[{"class": "b300"}])
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE)), models=(wrong,))
    assert done.exit_code == 1
    assert "there is no GPUClass 'b300'; there are: h100-80gb" in done.output
    assert "--tp-size is owned by Shoal" in done.output


def test_a_listed_class_that_does_not_exist_is_told_beside_those_that_do(shell: Shell) -> None:
    asked = model(variants=[{"class": "b300"}, {"class": LARGE["name"]}])
    found = classes(shell.report("--fleet", shell.fleet(gpu_class(LARGE)), models=(asked,)))
    assert (found["b300"]["replicas"], found["b300"]["message"]) == (0, "there is no GPUClass of this name")
    assert found[LARGE["name"]]["replicas"] == 1


WRONG = {
    "is not YAML": ("a:\n\t- 1", "line 2: not YAML"),
    "is no object": ("- 1", "document 1: no Kubernetes object"),
    "has no Model": ("apiVersion: v1\nkind: Namespace\nmetadata: {name: a}", "there is no Model"),
    "has a misspelt field": (
        yaml.safe_dump(model(engine={"contextLenght": 1})),
        "engine.contextLenght: unknown field; did you mean `contextLength`?",
    ),
    "has a misspelt field in a list": (
        yaml.safe_dump(model(variants=[{"class": "a", "maxReplica": 1}])),
        "variants[0].maxReplica: unknown field; did you mean `maxReplicas`?",
    ),
    "has a wrong value": (yaml.safe_dump(model(uri="gopher://x")), "spec.source.uri"),
    "is of another version": (
        yaml.safe_dump(model() | {"apiVersion": "shoal.dev/v9"}),
        "apiVersion 'shoal.dev/v9' is not known; this version has shoal.dev/v1alpha1",
    ),
    "has a Model twice": (yaml.safe_dump_all([model(), model()]), "Model chat/llama is given twice"),
    "has a Model without a name": (
        yaml.safe_dump({"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "spec": {"source": {"uri": "hf://a/b"}}}),
        "Model without a name",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_of_models_that_is_wrong_says_where_and_ends_with_2(case: str, tmp_path: Path) -> None:
    text, told = WRONG[case]
    path = tmp_path / "m.yaml"
    path.write_text(text)
    done = CliRunner(catch_exceptions=False).invoke(main, ["explain", "-f", str(path)])
    assert done.exit_code == 2, done.output
    assert told in done.output
    assert "m.yaml" in done.output


def test_a_file_that_is_not_there_ends_with_2(tmp_path: Path) -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["explain", "-f", str(tmp_path / "no.yaml")])
    assert done.exit_code == 2
    assert "there is no such file" in done.output


def test_no_file_at_all_ends_with_2() -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["explain"])
    assert done.exit_code == 2
    assert "-f FILE" in done.output


def test_devices_of_a_fleet_are_counted_and_their_memory_is_used(shell: Shell) -> None:
    fleet = (class_of_devices("devices"), node("n1", LARGE, 0), device_class(), resource_slice("n1", "gpu-0", "gpu-1!"))
    report = shell.report("--fleet", shell.fleet(*fleet))
    assert classes(report)["devices"]["replicas"] == 1
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "theirs", "namespace": "ns"},
        "status": {"allocation": {"devices": {"results": [{"driver": DRIVER, "pool": "n1", "device": "gpu-0"}]}}},
    }
    done = shell.run("--fleet", shell.fleet(*fleet, claim))
    assert done.exit_code == 1, "one device has a taint, and a claim of others has the other"


def test_a_price_without_quotes_is_refused_as_the_api_server_refuses_it(shell: Shell) -> None:
    fleet = shell.fleet(gpu_class(LARGE) | {"spec": gpu_class(LARGE)["spec"] | {"hourlyCost": {"amount": 5.5}}})
    done = shell.run("--fleet", fleet, models=(model(),))
    assert done.exit_code == 2
    assert 'spec.hourlyCost.amount: must be in quotes, as in "5.5"' in done.output


def test_a_fleet_without_classes_says_how_to_print_one(shell: Shell) -> None:
    done = shell.run("--fleet", shell.fleet(node("n1", LARGE, 8)))
    assert done.exit_code == 2
    assert "kubectl get gpuclasses,nodes,pods -A -o yaml" in done.output


def test_facts_that_are_none_are_refused(shell: Shell) -> None:
    path = shell.folder / "other.json"
    path.write_text('{"name": "package"}')
    done = shell.run("--facts", str(path), facts=False)
    assert done.exit_code == 2
    assert "neither facts nor a model's config.json" in done.output


def test_facts_of_several_sources_have_to_say_whose_they_are(shell: Shell) -> None:
    two = (model("a"), model("b", uri="hf://owner/other"))
    done = shell.run(models=two)
    assert done.exit_code == 2
    assert "--facts NAME=" in done.output
    config = shell.folder / "config.json"
    named = shell.run("--facts", f"a={config}", "--facts", f"chat/b={config}", models=two, facts=False)
    assert named.exit_code == 0, named.output


def test_models_come_from_standard_input_too() -> None:
    done = CliRunner(catch_exceptions=False).invoke(
        main, ["explain", "-f", "-"], input=json.dumps(model(uri="pvc://claim"))
    )
    assert done.exit_code == 1
    assert "chat/llama" in done.output


def test_of_many_models_each_has_one_line_with_where_it_runs_or_why_not(shell: Shell) -> None:
    many = tuple(model(f"m{number:02}") for number in range(12))
    done = shell.run("--fleet", shell.fleet(gpu_class(LARGE), node("n1", LARGE, 8)), models=many)
    assert done.exit_code == 1
    placed = [line for line in done.output.splitlines() if line.startswith("✓")]
    assert len(placed) == 8
    assert all("h100-80gb" in line and "2.49 USD" in line for line in placed)
    assert sum(line.startswith("✗ chat/m") for line in done.output.splitlines()) == 4
    assert "Cost per hour: 19.92 USD" in done.output
    assert "Not placed: chat/m08, chat/m09, chat/m10, chat/m11" in done.output


def test_prices_in_several_currencies_are_told(shell: Shell) -> None:
    euros = gpu_class(SMALL, hourlyCost={"amount": "0.40", "currency": "EUR"})
    done = shell.run("--fleet", shell.fleet(euros, gpu_class(LARGE)))
    assert "Prices in EUR and USD are compared as numbers" in done.output


def test_a_number_of_gpus_that_no_node_has_and_a_quantization_that_the_gpu_lacks_are_told(shell: Shell) -> None:
    t4 = {"name": "t4-16gb", "product": "Tesla-T4", "memory": "15360Mi", "price": "0.2", "cc": "7.5"}
    where = shell.fleet(gpu_class(LARGE), node("n1", LARGE, 4), gpu_class(t4), node("n2", t4, 8))
    asked = model(variants=[{"class": "h100-80gb", "tensor": 8}, {"class": "t4-16gb", "quantization": "FP8"}])
    found = classes(shell.report("--fleet", where, models=(asked,)))
    assert "`tensor` is 8, and the largest node has 4 GPUs" in found["h100-80gb"]["message"]
    assert "7.5" in found["t4-16gb"]["message"]
