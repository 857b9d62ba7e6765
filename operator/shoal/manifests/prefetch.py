"""The Job that asks the cache of one node for a Model's weights: the stage container of an engine pod, without GPUs."""

from typing import Final

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import children
from shoal.manifests import cache, source
from shoal.manifests.parts import LOCKED_DOWN, RESTRICTED, TMP, mount, optional, pull_secrets, security
from shoal.manifests.shape import metadata

CONTAINER: Final = names.COMPONENT_PREFETCH
AGAIN_SECONDS: Final = 3600
"""TTL of a Job that has ended: the next one asks the cache again, so that it does not evict the weights."""
DEADLINE_SECONDS: Final = 6 * 3600
ATTEMPTS: Final = 3


def prefetch_job(
    model: Model, facts: ArtifactFacts, gpu_class: GPUClass, node: str, config: OperatorConfig
) -> JsonObject:
    """The Job for the weights that the Model is pinned to, on one node."""
    found = metadata(model, children.prefetch_job(model.metadata.uid, node, facts.digest))
    labels = found["labels"] | {names.LABEL_NAME: "shoal-prefetch", names.LABEL_COMPONENT: names.COMPONENT_PREFETCH}
    own = model.spec.pod
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": found | {"labels": labels, "annotations": {names.ANNOTATION_NODE: node}},
        "spec": {
            "backoffLimit": ATTEMPTS - 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": AGAIN_SECONDS,
            "template": {
                "metadata": {"labels": labels | source.identity_labels(model)},
                "spec": {
                    "restartPolicy": "Never",
                    **optional("serviceAccountName", own.service_account_name),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 5,
                    "securityContext": security(config),
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {
                                "nodeSelectorTerms": [{"matchFields": [field]}]
                            }
                        }
                    },
                    **optional(
                        "tolerations",
                        [
                            each.model_dump(mode="json", by_alias=True, exclude_none=True)
                            for each in gpu_class.spec.tolerations
                        ],
                    ),
                    **optional("imagePullSecrets", pull_secrets(model, config)),
                    "containers": [_container(model, facts, config)],
                    "volumes": [
                        *({"name": name, "emptyDir": {}} for name in ("models", "run", "home", "tmp")),
                        *source.volumes(model, config),
                        cache.pod_volume(config.cache),
                    ],
                },
            },
        },
    }


def _container(model: Model, facts: ArtifactFacts, config: OperatorConfig) -> JsonObject:
    memory = config.agent.facts_memory
    return {
        "name": CONTAINER,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "command": ["shoal", "agent", "stage"],
        "env": [*source.environment(model, config, facts), cache.STAGE_ENV],
        "resources": {"requests": {"cpu": config.agent.cpu, "memory": memory}, "limits": {"memory": memory}},
        "securityContext": LOCKED_DOWN if config.pods.read_only_root else RESTRICTED,
        "volumeMounts": [
            mount("models", names.MODELS_DIR),
            mount("run", names.RUN_DIR),
            mount("home", names.HOME_DIR),
            mount("tmp", TMP),
            *source.mounts(model, config),
            cache.POD_MOUNT,
        ],
    }
