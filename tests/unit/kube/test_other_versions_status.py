"""The status of an object that another version of Shoal wrote: before an upgrade is complete, or after a rollback."""

from typing import Any

import pytest

from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model
from shoal.gateway.directory import project_model
from shoal.kube.projections import custom

NEWER: dict[str, Any] = {
    "observedGeneration": 3,
    "servedNames": ["llama"],
    "variants": [{"class": "l4", "desired": 1, "ready": 1, "step": "Dreaming"}],
}
SPEC: dict[str, Any] = {"source": {"uri": "hf://owner/llama"}}


def stored(spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "llama", "namespace": "chat", "uid": "u", "generation": 3}
    return {"metadata": metadata, "spec": spec, "status": status}


def test_a_gateway_serves_a_model_whose_status_has_a_word_that_it_does_not_know() -> None:
    found = project_model(stored(SPEC, NEWER), pytest.fail)
    assert found is not None
    assert found.key == "chat/llama"


def test_the_operator_keeps_what_it_understands_of_a_status() -> None:
    found = custom(Model, stored(SPEC, NEWER))
    assert (found.error, found.status) == ("", NEWER)
    assert found.object is not None
    assert found.object.status is not None
    assert (found.object.status.served_names, found.object.status.variants) == (("llama",), ())
    memory = {"perGPU": "24Gi", "source": "Guessed"}
    nodes = custom(
        GPUClass, stored({"nodeSelector": {"a": "b"}, "memoryPerGPU": "24Gi"}, {"nodes": 2, "memory": memory})
    )
    assert nodes.object is not None
    assert nodes.object.status is not None
    assert (nodes.object.status.nodes, nodes.object.status.memory) == (2, None)


@pytest.mark.parametrize("spec", [{"source": {}}, {**SPEC, "engine": {"type": "Other"}}])
def test_a_specification_that_it_does_not_understand_is_an_error(spec: dict[str, Any]) -> None:
    found = custom(Model, stored(spec, NEWER))
    assert found.object is None
    assert found.error.startswith("spec.")
