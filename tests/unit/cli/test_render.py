"""`shoal render`: the objects that the operator would make, for people to look at before they apply a Model."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.cli.explain.settings import chart_defaults
from shoal.cli.main import main

CLASS: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "GPUClass",
    "metadata": {"name": "l4"},
    "spec": {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "memoryPerGPU": "23034Mi",
        "hourlyCost": {"amount": "0.43"},
    },
}


def model(name: str = "m", weights: str = "1Gi", **spec: Any) -> dict[str, Any]:
    sizing = {"weightBytes": weights, "kvBytesPerToken": 1024}
    source = {"uri": "pvc://claim/model", "secretRef": {"name": "token"}}
    engine = {"contextLength": 2048}
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name, "namespace": "chat"},
        "spec": {"source": source, "sizing": sizing, "engine": engine} | spec,
    }


def render(tmp_path: Path, *objects: dict[str, Any], args: tuple[str, ...] = ()) -> Result:
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return CliRunner(catch_exceptions=False).invoke(main, ["render", "-f", str(path), *args])


def printed(done: Result) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_the_children_of_a_model_are_printed_with_its_replicas(tmp_path: Path) -> None:
    done = render(tmp_path, CLASS, model(scaling={"minReplicas": 3}))
    assert done.exit_code == 0, done.output
    found = {one["kind"]: one for one in printed(done)}
    assert set(found) == {"Job", "PodDisruptionBudget", "NetworkPolicy", "Deployment"}
    deployment = found["Deployment"]
    assert deployment["spec"]["replicas"] == 3
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]
    assert {one["metadata"]["namespace"] for one in found.values()} == {"chat"}


@pytest.mark.parametrize(("replicas", "stay"), [(1, 0), (3, 2)])
def test_the_budget_is_that_of_the_printed_replicas(tmp_path: Path, replicas: int, stay: int) -> None:
    done = render(tmp_path, CLASS, model(scaling={"minReplicas": replicas}))
    by_kind = {child["kind"]: child["spec"] for child in printed(done)}
    assert by_kind["Deployment"]["replicas"] == replicas
    assert by_kind["PodDisruptionBudget"]["minAvailable"] == stay
    assert "a new Model begins with 0" in done.stdout


def test_for_keda_the_scaled_objects_are_printed_and_shoal_asks_for_nothing(tmp_path: Path) -> None:
    done = render(tmp_path, CLASS, model(scaling={"driver": "KEDA", "minReplicas": 3, "maxReplicas": 6}))
    assert done.exit_code == 0, done.output
    found = {one["kind"]: one for one in printed(done)}
    assert found["Deployment"]["spec"]["replicas"] == 0, "KEDA writes them"
    scaled = found["ScaledObject"]
    assert scaled["metadata"]["name"] == found["Deployment"]["metadata"]["name"]
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (3, 6)
    assert scaled["spec"]["cooldownPeriod"] == 0
    assert "fallback" not in scaled["spec"]
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "external-push"
    assert trigger["authenticationRef"]["name"] == found["TriggerAuthentication"]["metadata"]["name"]


def test_no_secret_is_printed_and_what_is_replaced_is_said(tmp_path: Path) -> None:
    done = render(tmp_path, CLASS, model())
    assert "Secret" not in {one["kind"] for one in printed(done)}
    assert done.stdout.startswith("# What only a cluster knows is replaced:")
    assert "&id" not in done.stdout, "no anchors: they are for machines"


def test_models_of_one_source_share_the_job_that_reads_it(tmp_path: Path) -> None:
    done = render(tmp_path, CLASS, model("a"), model("b"))
    kinds = [one["kind"] for one in printed(done)]
    assert kinds.count("Job") == 1
    assert kinds.count("Deployment") == 2


def test_a_uid_that_is_known_is_kept(tmp_path: Path) -> None:
    known = model()
    known["metadata"]["uid"] = "5a5a"
    owners = {one["metadata"]["ownerReferences"][0]["uid"] for one in printed(render(tmp_path, CLASS, known))}
    assert owners == {"5a5a"}


def test_a_model_without_a_place_says_why_and_ends_with_1(tmp_path: Path) -> None:
    done = render(tmp_path, CLASS, model("fits"), model("large", weights="900Gi"))
    assert done.exit_code == 1
    assert "chat/large: no place for all of its replicas: fits on no GPU class: l4: " in done.stderr
    assert [o["metadata"]["name"] for o in printed(done) if o["kind"] == "Deployment"] == ["fits-l4"]


def test_without_classes_they_are_asked_for(tmp_path: Path) -> None:
    done = render(tmp_path, model())
    assert done.exit_code == 2
    assert "GPUClasses are required: use --fleet FILE" in done.output


def test_the_operators_own_configuration_shapes_the_pods(tmp_path: Path) -> None:
    config = chart_defaults().model_dump(mode="json", by_alias=True)
    config["agent"]["image"] = "registry.example.com/shoal:1"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"kind": "ConfigMap", "data": {"config.yaml": yaml.safe_dump(config)}}))
    done = render(tmp_path, CLASS, model(), args=("--config", str(path)))
    assert "image: registry.example.com/shoal:1" in done.stdout


def test_with_the_node_cache_the_namespaces_share_in_it_is_printed_once(tmp_path: Path) -> None:
    config = chart_defaults().model_dump(mode="json", by_alias=True)
    config["cache"]["enabled"] = True
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    source: dict[str, Any] = {"uri": "hf://owner/model"}
    seen = {"artifact": {"source": "hf://owner/model", "kv": {"kind": "Unknown"}}}
    both = [model(name, source=source) | {"status": seen} for name in ("a", "b")]
    done = render(tmp_path, CLASS, *both, args=("--config", str(path)))
    kinds = [one["kind"] for one in printed(done)]
    assert kinds.count("PersistentVolume") == kinds.count("PersistentVolumeClaim") == 1
    (volume,) = [one for one in printed(done) if one["kind"] == "PersistentVolume"]
    assert volume["spec"]["mountOptions"] == ["ro"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engine: {}", "not the operator's configuration, which is in the ConfigMap shoal-operator"),
        ("kind: ConfigMap\ndata: {}", "this ConfigMap has no key config.yaml"),
        ("- 1", "must hold one mapping"),
    ],
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    done = render(tmp_path, CLASS, model(), args=("--config", str(path)))
    assert done.exit_code == 2
    assert told in done.output


def test_where_proxies_carry_requests_the_inference_pool_is_printed_with_the_service_that_it_names(
    tmp_path: Path,
) -> None:
    config = chart_defaults().model_dump(mode="json", by_alias=True)
    config["extProc"] = {"enabled": True, "proxyNamespaces": ["ingress"]}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    done = render(tmp_path, CLASS, model(), args=("--config", str(path)))
    found = {one["kind"]: one for one in printed(done)}
    picker = found["InferencePool"]["spec"]["endpointPickerRef"]
    assert (picker["kind"], picker["name"]) == ("Service", found["Service"]["metadata"]["name"])
