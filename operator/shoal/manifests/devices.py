"""The devices of an engine pod: a ResourceClaimTemplate per variant, and what the pod says of it.

The API server lets nobody change a template's spec, so the name has a digest of it: another number of GPUs or another
selector makes another template, and the Deployment rolls. The request is not the extended resource that a DeviceClass
may have: the controller that evicts pods from tainted devices ignores pods without a claim of their own.
"""

import hashlib
from typing import Final

import orjson

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core import children
from shoal.manifests.shape import VariantShape, labels, metadata

CLAIM: Final = "gpus"
"""Name of the claim in the pod, and of the request in the claim."""


def claim_template(shape: VariantShape) -> JsonObject | None:
    """The ResourceClaimTemplate of a variant; None: its class has no devices."""
    spec = _claim(shape)
    if spec is None:
        return None
    of_class = {names.LABEL_GPU_CLASS: shape.gpu_class.metadata.name}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata(shape.model, _name(shape, spec), **of_class),
        "spec": {"metadata": {"labels": labels(shape.model) | of_class}, "spec": spec},
    }


def pod_claims(shape: VariantShape) -> list[JsonObject]:
    """`resourceClaims` of the pod."""
    spec = _claim(shape)
    return [] if spec is None else [{"name": CLAIM, "resourceClaimTemplateName": _name(shape, spec)}]


def container_claims(shape: VariantShape) -> JsonObject:
    """The part of the engine container's `resources`. No other container sees the GPUs."""
    return {} if shape.gpu_class.spec.device is None else {"claims": [{"name": CLAIM}]}


def annotations(shape: VariantShape) -> dict[str, str]:
    """How many devices the pod claims, for those who do not read claims."""
    return {} if shape.gpu_class.spec.device is None else {names.ANNOTATION_DEVICES: str(shape.gpus)}


def _claim(shape: VariantShape) -> JsonObject | None:
    device = shape.gpu_class.spec.device
    if device is None:
        return None
    selectors = [{"cel": {"expression": each.condition.expression}} for each in device.selectors]
    exactly: JsonObject = {
        "deviceClassName": device.device_class_name,
        **({"selectors": selectors} if selectors else {}),
        "allocationMode": "ExactCount",
        "count": shape.gpus,
    }
    return {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}


def _name(shape: VariantShape, spec: JsonObject) -> str:
    digest = hashlib.sha256(orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]
    return children.claim_template(shape.model.metadata.name, shape.gpu_class.metadata.name, digest)
