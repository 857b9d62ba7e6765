"""KEDA's objects of a Model: a ScaledObject per variant, and the CA of the operator's certificate."""

import hashlib
from typing import Final

from shoal.api import names
from shoal.api.config import KEDA
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import children
from shoal.core.keda import Bounds
from shoal.manifests.shape import metadata

FRESH_SECONDS: Final = 300
"""initialCooldownPeriod: KEDA treats a ScaledObject that was never active as idle, and would scale to zero at once."""
CA_KEY: Final = "ca.crt"
CA_DIGEST: Final = "caSHA256"
"""Key of the trigger's metadata, which KEDA passes through. Another CA makes another ScaledObject, and only then does
KEDA reopen its streams. Otherwise its streams keep the old CA and stop receiving pushes when their connection ends."""


def address(config: KEDA, namespace: str) -> str:
    """Address of the operator's external scaler for KEDA. `namespace`: Shoal's own."""
    return config.address or f"{names.SCALER_SERVICE}.{namespace}.svc:{names.SCALER_PORT}"


def spelling(address: str, reconnects: int) -> str:
    """The same address in two spellings, alternating: with and without the name of gRPC's own resolver. KEDA has one
    connection per spelling, so the other spelling replaces a hanging connection."""
    return (
        f"dns:///{address}" if reconnects % 2 and not address.startswith(("dns:", "unix:", "passthrough:")) else address
    )


def scaled_object(
    model: Model, gpu_class: str, limits: Bounds, config: KEDA, namespace: str, *, ca: str | None, reconnects: int = 0
) -> JsonObject:
    """The ScaledObject of one variant, named like its Deployment. `ca`: PEM of the CA that KEDA must trust, through
    `authentication`; "": a CA that KEDA trusts already; None: the installation's own, which is unknown here.
    `reconnects`: how often KEDA was moved to a new connection.

    No fallback: on an error KEDA and the HPA keep the current replicas, while a fallback would wake Models at zero. No
    cooldown, stabilization or step limit: the answered number already includes them.
    """
    name = children.deployment(model.metadata.name, gpu_class)
    rules: JsonObject = {"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "tolerance": "0"}
    said = {"scalerAddress": spelling(address(config, namespace), reconnects)} | (
        {"enableTLS": "true"} if config.tls else {}
    )
    if ca:
        said[CA_DIGEST] = hashlib.sha256(ca.encode()).hexdigest()[:16]
    trigger: JsonObject = {"type": "external-push", "metadata": said}
    if ca != "":
        trigger["authenticationRef"] = {"name": children.scaler_auth(model.metadata.name)}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(model, name, **{names.LABEL_GPU_CLASS: gpu_class}),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "pollingInterval": config.polling_seconds,
            "cooldownPeriod": 0,
            "initialCooldownPeriod": FRESH_SECONDS,
            "minReplicaCount": limits.minimum,
            "maxReplicaCount": limits.maximum,
            "advanced": {
                "restoreToOriginalReplicaCount": False,
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": rules
                        | {"policies": [{"type": "Pods", "value": max(limits.maximum, 1000), "periodSeconds": 1}]},
                        "scaleDown": rules | {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 1}]},
                    }
                },
            },
            "triggers": [trigger],
        },
    }


def certificate(model: Model, ca: str) -> JsonObject:
    """The CA of the external scaler as PEM, in the Model's namespace, the only one where KEDA reads it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, children.scaler_auth(model.metadata.name)),
        "data": {CA_KEY: ca},
    }


def authentication(model: Model) -> JsonObject:
    """The TriggerAuthentication that refers to that CA."""
    name = children.scaler_auth(model.metadata.name)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "TriggerAuthentication",
        "metadata": metadata(model, name),
        "spec": {"configMapTargetRef": [{"parameter": "caCert", "name": name, "key": CA_KEY}]},
    }
