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


def keys_secret(model: str, fingerprint: str) -> str:
    return f"{bounded(model)}-keys-{fingerprint}"


def policy(model: str) -> str:
    """Of the PodDisruptionBudget and the NetworkPolicy."""
    return f"{bounded(model)}-engine"
