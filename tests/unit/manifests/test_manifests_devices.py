"""Engine pods whose GPUs are devices: a claim in place of an extended resource."""

from typing import Any

from shoal.api import names
from shoal.api.gpuclass import GPUClass, devices_of
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.kube.projections import engine_requests
from shoal.manifests import model as manifests
from shoal.manifests.devices import claim_template
from shoal.manifests.shape import VariantShape
from tests.support.operators import CONFIG

L4 = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA L4"'


def shape(*expressions: str, gpus: int = 1, name: str = "chat", **spec: Any) -> VariantShape:
    device = {"deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": e}} for e in expressions]}
    gpu_class = GPUClass.model_validate({"metadata": {"name": "l4"}, "spec": {"device": device, **spec}})
    metadata = {"name": name, "namespace": "ns", "uid": "u-1", "generation": 1}
    model = Model.model_validate({"metadata": metadata, "spec": {"source": {"uri": "hf://org/model"}}})
    return VariantShape(model, gpu_class, gpus, "0.5.23", CONFIG, "abcd1234")


def template(given: VariantShape) -> JsonObject:
    return manifests.deployment(given, surge=False)["spec"]["template"]


def test_the_engine_claims_its_devices_and_no_other_container_does() -> None:
    made = template(shape(L4, gpus=2))
    claims = claim_template(shape(L4, gpus=2))
    assert claims is not None
    spec = made["spec"]
    assert spec["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": claims["metadata"]["name"]}]
    asked = {c["name"]: c["resources"] for c in spec["initContainers"] + spec["containers"]}
    assert {name for name, of in asked.items() if "claims" in of} == {names.CONTAINER_ENGINE}
    assert asked[names.CONTAINER_ENGINE]["claims"] == [{"name": "gpus"}]
    named = {resource for of in asked.values() for part in ("requests", "limits") for resource in of.get(part, {})}
    assert not any("/" in resource for resource in named), "no extended resource beside the claim"
    [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    only = {"key": "quarantine.shoal.dev/l4", "operator": "DoesNotExist"}
    assert term == {"matchExpressions": [only]}, "the claim chooses among the nodes whose GPUs are in use"
    assert engine_requests(made["metadata"], spec) == {devices_of("l4"): 2}


def test_the_template_is_the_models_and_asks_for_exactly_so_many_devices() -> None:
    found = claim_template(shape(L4, gpus=2))
    assert found is not None
    assert found["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert found["metadata"]["namespace"] == "ns"
    assert found["spec"]["spec"] == {
        "devices": {
            "requests": [
                {
                    "name": "gpus",
                    "exactly": {
                        "deviceClassName": "gpu.nvidia.com",
                        "selectors": [{"cel": {"expression": L4}}],
                        "allocationMode": "ExactCount",
                        "count": 2,
                    },
                }
            ]
        }
    }
    assert found["spec"]["metadata"]["labels"][names.LABEL_GPU_CLASS] == "l4"


def test_another_claim_is_another_template_and_a_rollout() -> None:
    made = [shape(L4), shape(L4, gpus=2), shape(), shape(L4, name="x" * 60)]
    called = [str((claim_template(each) or {})["metadata"]["name"]) for each in made]
    assert len(set(called)) == len(called)
    assert all(len(name) <= 63 for name in called)
    assert template(made[0]) != template(made[2])
    assert template(shape(L4)) == template(shape(L4))


def test_a_class_of_a_device_plugin_has_no_claims() -> None:
    plain = shape(L4)
    spec = {"nodeSelector": {"a": "b"}, "memoryPerGPU": "24Gi"}
    gpu_class = GPUClass.model_validate({"metadata": {"name": "l4"}, "spec": spec})
    given = VariantShape(plain.model, gpu_class, 1, plain.version, plain.config, plain.install_key)
    assert claim_template(given) is None
    made = template(given)
    assert "resourceClaims" not in made["spec"]
    assert names.ANNOTATION_DEVICES not in made["metadata"]["annotations"]


def test_a_number_of_devices_that_is_none_is_not_believed() -> None:
    for text in ("0", "-1", "1e3", "10000", "many"):
        metadata = {"labels": {names.LABEL_GPU_CLASS: "l4"}, "annotations": {names.ANNOTATION_DEVICES: text}}
        assert engine_requests(metadata, {}) == {}
