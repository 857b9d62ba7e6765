"""Parts of every pod that is made for a Model."""

from typing import Final

from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model

RESTRICTED: Final[JsonObject] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""securityContext of a container by the restricted Pod Security Standard."""
LOCKED_DOWN: Final[JsonObject] = {**RESTRICTED, "readOnlyRootFilesystem": True}
"""The same with a read-only root file system: every container of Shoal's image, and engines unless it is turned off."""
TMP: Final = "/tmp"  # noqa: S108 - a volume of its own in each pod


def security(config: OperatorConfig) -> JsonObject:
    """securityContext of a pod."""
    if config.pods.run_as_root:
        return {"seccompProfile": {"type": "RuntimeDefault"}}
    user = config.pods.run_as_user
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pull_secrets(model: Model, config: OperatorConfig) -> list[JsonObject]:
    wanted = [*config.pods.image_pull_secrets, *(s.name for s in model.spec.pod.image_pull_secrets)]
    return [{"name": name} for name in dict.fromkeys(wanted)]


def env_value(name: str, content: str) -> JsonObject:
    """An environment variable with a value."""
    return {"name": name, "value": content}


def env_field(name: str, path: str) -> JsonObject:
    """An environment variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def mount(name: str, path: str, *, read_only: bool = False) -> JsonObject:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def optional(name: str, content: object) -> JsonObject:
    """The entry, or nothing if it is empty, as the API server stores it."""
    return {name: content} if content else {}
