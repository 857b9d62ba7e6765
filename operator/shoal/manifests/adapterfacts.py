"""The Job that reads the metadata of a batch of a pool's adapters, with the pool's credentials."""

from typing import Final

from shoal.api import names
from shoal.api.adapterfacts import BATCH_ENV, AdapterBatch
from shoal.api.config import OperatorConfig
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import API_VERSION, JsonObject
from shoal.core.artifacts import CONTAINER
from shoal.core.lora.format.facts import job_name
from shoal.manifests import source
from shoal.manifests.parts import LOCKED_DOWN, TMP, env_value, mount, optional, security
from shoal.manifests.pool import credential_mounts, credential_volumes

DEADLINE_SECONDS: Final = 900
"""Deadline of the Job, also when its pod cannot be scheduled."""


def adapter_facts_job(pool: LoRAPool, batch: AdapterBatch, config: OperatorConfig, *, keep_seconds: int) -> JsonObject:
    """The Job for these adapters. `keep_seconds`: its TTL after it has finished.

    There is only one attempt: temporary errors are reported in the answer, and a batch without an answer is read again
    in smaller batches.
    """
    reads = [one.key for one in batch.adapters]
    labels = {
        names.LABEL_NAME: "shoal-adapter-facts",
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_COMPONENT: names.COMPONENT_ADAPTER_FACTS,
        names.LABEL_MODEL: pool.spec.model_ref.name,
        names.LABEL_POOL: pool.metadata.name,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(pool.key, reads),
            "namespace": pool.metadata.namespace,
            "labels": labels,
            "annotations": {names.ANNOTATION_READS: " ".join(reads)},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "LoRAPool",
                    "name": pool.metadata.name,
                    "uid": pool.metadata.uid,
                    "controller": True,
                }
            ],
        },
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": keep_seconds,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 5,
                    "securityContext": security(config),
                    **optional("imagePullSecrets", [{"name": name} for name in config.pods.image_pull_secrets]),
                    "containers": [_container(pool, batch, config)],
                    "volumes": [
                        {"name": "home", "emptyDir": {}},
                        {"name": "tmp", "emptyDir": {}},
                        *credential_volumes(pool),
                        *source.certificate_volumes(config),
                    ],
                },
            },
        },
    }


def _container(pool: LoRAPool, batch: AdapterBatch, config: OperatorConfig) -> JsonObject:
    memory = config.agent.facts_memory
    return {
        "name": CONTAINER,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "command": ["shoal", "agent", "facts", "--adapters"],
        "env": [env_value(BATCH_ENV, batch.model_dump_json(exclude_none=True)), *source.network(config)],
        "resources": {"requests": {"cpu": config.agent.cpu, "memory": memory}, "limits": {"memory": memory}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [
            mount("home", names.HOME_DIR),
            mount("tmp", TMP),
            *credential_mounts(pool),
            *source.certificates(config),
        ],
    }
