"""What KEDA is given for a Model: a ScaledObject per variant, and how it knows the operator's certificate."""

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
"""initialCooldownPeriod: KEDA takes a ScaledObject that was never active for idle, and would go to zero at its first
look."""
CA_KEY: Final = "ca.crt"
CA_DIGEST: Final = "caSHA256"
"""In the trigger's metadata, which KEDA hands through: with another CA the ScaledObject is another one, and only then
does KEDA open its streams anew. Without it the CA that they began with stays, and no push arrives after their
connection."""


def address(config: KEDA, namespace: str) -> str:
    """Where KEDA finds the operator's external scaler. `namespace`: Shoal's own."""
    return config.address or f"{names.SCALER_SERVICE}.{namespace}.svc:{names.SCALER_PORT}"


def spelling(address: str, reconnects: int) -> str:
    """The same address in two ways, by turns: without and with the name of gRPC's own resolver. KEDA has a connection
    for each way of writing it, so that the other one leads out of a connection that hangs."""
    return (
        f"dns:///{address}" if reconnects % 2 and not address.startswith(("dns:", "unix:", "passthrough:")) else address
    )


def scaled_object(
    model: Model, gpu_class: str, limits: Bounds, config: KEDA, namespace: str, *, ca: str | None, reconnects: int = 0
) -> JsonObject:
    """Of one variant, named as its Deployment. `ca`: PEM of the CA that KEDA has to trust, by `authentication`; "": one
    that it trusts already; None: its own, which is not known here. `turn`: how often KEDA was led out of a connection.

    No fallback: an error makes KEDA and the HPA keep what there is, and a fallback would wake what stands at zero. No
    cooldown, stabilisation or limit of steps: the number that is answered has all of that behind it.
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
    """The CA of the external scaler, as PEM, in the Model's namespace: KEDA reads it from nowhere else."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, children.scaler_auth(model.metadata.name)),
        "data": {CA_KEY: ca},
    }


def authentication(model: Model) -> JsonObject:
    """How KEDA finds that CA."""
    name = children.scaler_auth(model.metadata.name)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "TriggerAuthentication",
        "metadata": metadata(model, name),
        "spec": {"configMapTargetRef": [{"parameter": "caCert", "name": name, "key": CA_KEY}]},
    }
