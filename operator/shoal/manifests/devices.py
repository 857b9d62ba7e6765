"""The devices of an engine pod: a ResourceClaimTemplate per variant, and what the pod says of it.

The API server lets nobody change a template's spec, so the name has a digest of it: another number of GPUs or another
selector makes another template, and the Deployment rolls. The request is not the extended resource that a DeviceClass
may have: the controller that evicts pods from tainted devices ignores pods without a claim of their own.
"""

import hashlib
import re
from typing import Final

import orjson

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core import children
from shoal.manifests.shape import VariantShape, labels, metadata

CLAIM: Final = "gpus"
"""Name of the claim in the pod, and of the request in the claim."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9._:-]{1,253}")
"""What a driver says is written into an expression: nothing that could end its text."""
_MOST_SELECTORS: Final = 32
"""Of a request; the API server takes no more."""


def claim_template(shape: VariantShape) -> JsonObject | None:
    """The ResourceClaimTemplate of a variant; None: its class has no devices."""
    spec = _claim(shape)
    if spec is None:
        return None
    name = _name(shape, spec)
    if more := _healthy(shape):
        exactly = spec["devices"]["requests"][0]["exactly"]
        exactly["selectors"] = [*exactly.get("selectors", []), *more][:_MOST_SELECTORS]
    of_class = {names.LABEL_GPU_CLASS: shape.gpu_class.metadata.name}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata(shape.model, name, **of_class),
        "spec": {"metadata": {"labels": labels(shape.model) | of_class}, "spec": spec},
    }


def selectors(template: JsonObject) -> object:
    """Which devices pods of a template claim. The API server lets nobody change it."""
    [request] = template["spec"]["spec"]["devices"]["requests"]
    return request.get("exactly", {}).get("selectors")


def _healthy(shape: VariantShape) -> list[JsonObject]:
    """Leaves devices out that are out of use. The name of the template says nothing of it: a Deployment is not rolled
    because a GPU that none of its pods has is not healthy."""
    status = shape.gpu_class.status
    if status is None:
        return []
    uuids: dict[str, list[str]] = {}
    for each in status.quarantined:
        if each.state == "Quarantined" and each.device and each.uuid and _PLAIN.fullmatch(each.uuid):
            uuids.setdefault(each.device.partition("/")[0], []).append(each.uuid)
    found: list[JsonObject] = []
    for driver, of in sorted(uuids.items()):
        if _PLAIN.fullmatch(driver):
            listed = ", ".join(f'"{uuid}"' for uuid in sorted(of))
            attribute = f'device.attributes["{driver}"].?uuid.orValue("")'
            expression = f'device.driver != "{driver}" || !({attribute} in [{listed}])'
            found.append({"cel": {"expression": expression}})
    return found


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
