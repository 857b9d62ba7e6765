"""Names of the objects that Shoal makes for a Model: deterministic, so that a restart finds what it made."""

import hashlib
from typing import Final

LONGEST: Final = 52
"""A Deployment's name; its ReplicaSet adds 11 characters, and pods are best named within one DNS label."""


def bounded(name: str, longest: int = LONGEST) -> str:
    """The name itself, or as much of it as fits with a hash of the whole."""
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: longest - 9].rstrip('-.')}-{digest}"


def deployment(model: str, gpu_class: str) -> str:
    return bounded(f"{model}-{gpu_class}".replace(".", "-"))


def keys_secret(model: str, fingerprint: str, suffix: str = "") -> str:
    """Of the keys of a Model's pods. `suffix`: that of the engine kind (`PodSide.keys_suffix`)."""
    return f"{bounded(model)}-keys-{fingerprint}{suffix}"


def certificate_secret(model: str) -> str:
    """Of the certificate that a Model's pods show."""
    return f"{bounded(model)}-tls"


def facts_job(uri: str, digest: str | None, secret: str | None, service_account: str | None = None) -> str:
    """Of the Job that reads the metadata of a source: Models of one namespace that name the same source share it, if
    they name the same credentials.

    It also tells for which source a Model's facts were read.
    """
    said = "\0".join((uri, digest or "", secret or "", *([service_account] if service_account else [])))
    return f"facts-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def prefetch_job(model_uid: str, node: str, manifest: str | None) -> str:
    """Of the Job that asks a node's cache for weights: another one for other weights."""
    said = "\0".join((model_uid, node, manifest or ""))
    return f"prefetch-{hashlib.sha256(said.encode()).hexdigest()[:20]}"


def claim_template(model: str, gpu_class: str, digest: str) -> str:
    """Of the ResourceClaimTemplate of a variant. `digest`: of its spec, which nobody can change."""
    return f"{deployment(model, gpu_class)}-{digest}"


def policy(model: str) -> str:
    """Of the PodDisruptionBudget and the NetworkPolicy."""
    return f"{bounded(model)}-engine"


def inference_pool(model: str) -> str:
    """Of the InferencePool; routes name it."""
    return bounded(model)


def picker(model: str) -> str:
    """Of the Service that leads to the gateways, and of its EndpointSlice: a DNS label that begins with a letter."""
    return f"picker-{bounded(model.replace('.', '-'))}"


def scaler_auth(model: str) -> str:
    """Of the TriggerAuthentication and the ConfigMap by which KEDA knows the operator's certificate."""
    return f"{bounded(model)}-scaler"
