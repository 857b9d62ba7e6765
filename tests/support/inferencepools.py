"""The kind InferencePool of the Gateway API's Inference Extension, as far as Shoal writes it."""

from typing import Final

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.resources import INFERENCEPOOLS
from tests.support.controlplane import CRDS
from tests.support.kedastandin import crd
from tests.support.operators import eventually

_TEXT: Final = {"type": "string"}
_PORT: Final = {"type": "object", "required": ["number"], "properties": {"number": {"type": "integer"}}}
_PICKER: Final = {
    "group": _TEXT,
    "kind": _TEXT,
    "name": _TEXT,
    "port": _PORT,
    "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"]},
}
_SPEC: Final[JsonObject] = {
    "type": "object",
    "required": ["endpointPickerRef", "selector", "targetPorts"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": _TEXT}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
        "endpointPickerRef": {"type": "object", "required": ["name"], "properties": _PICKER},
    },
}
"""As in v1.3.0 of the Inference Extension, without its patterns."""


def inference_pool_crd() -> JsonObject:
    made = crd(INFERENCEPOOLS, _SPEC)
    # The API server asks it of groups below k8s.io.
    made["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, in a test"}
    return made


async def install_inference_pools(client: KubeClient) -> None:
    """Returns when the API server has the kind."""
    await client.apply(CRDS, inference_pool_crd(), manager="test")
    await eventually(
        lambda: client.discover(INFERENCEPOOLS.group, INFERENCEPOOLS.version),
        lambda found: INFERENCEPOOLS.plural in found,
    )
