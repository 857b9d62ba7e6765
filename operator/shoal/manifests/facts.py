"""The Job that reads a source's metadata: small, on any node, restricted like an engine pod, deleted after its TTL."""

from typing import Final

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core.artifacts import CONTAINER, identity, source_key
from shoal.manifests import source
from shoal.manifests.parts import LOCKED_DOWN, TMP, mount, optional, pull_secrets, security
from shoal.manifests.shape import metadata

ATTEMPTS: Final = 3
"""Pods of one Job, ten and twenty seconds apart, for sources that are briefly unavailable."""
DEADLINE_SECONDS: Final = 900
"""Deadline of all attempts together, also when a pod cannot be scheduled or its volume is not attached."""


def facts_job(model: Model, config: OperatorConfig, *, keep_seconds: int) -> JsonObject:
    """The Job for the Model's source. `keep_seconds`: its TTL after it has finished; a failed read is repeated when the
    Job is gone."""
    name = source_key(model)
    found = metadata(model, name)
    labels = found["labels"] | {names.LABEL_NAME: "shoal-facts", names.LABEL_COMPONENT: names.COMPONENT_FACTS}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": found | {"labels": labels},
        "spec": {
            "backoffLimit": ATTEMPTS - 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": keep_seconds,
            "template": {
                "metadata": {"labels": labels | source.identity_labels(model)},
                "spec": {
                    "restartPolicy": "Never",
                    **optional("serviceAccountName", identity(model)),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 5,
                    "securityContext": security(config),
                    # The volume may be on a node with taints.
                    **optional("tolerations", [{"operator": "Exists"}] if source.in_place(model) else []),
                    **optional("imagePullSecrets", pull_secrets(model, config)),
                    "containers": [_container(model, config)],
                    "volumes": [
                        {"name": "home", "emptyDir": {}},
                        {"name": "tmp", "emptyDir": {}},
                        *source.volumes(model, config),
                    ],
                },
            },
        },
    }


def _container(model: Model, config: OperatorConfig) -> JsonObject:
    memory = config.agent.facts_memory
    return {
        "name": CONTAINER,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "command": ["shoal", "agent", "facts"],
        "env": source.environment(model, config),
        "resources": {"requests": {"cpu": config.agent.cpu, "memory": memory}, "limits": {"memory": memory}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [mount("home", names.HOME_DIR), mount("tmp", TMP), *source.mounts(model, config)],
    }
