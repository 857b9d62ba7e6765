"""Scheduling preferences of a variant's pods, after the plan's assumptions: small replicas together, so that large
blocks of GPUs stay free; replicas of one Model on different nodes where that costs nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.api import names

HOSTNAME: Final = "kubernetes.io/hostname"
WHOLE_BLOCK: Final = 8
"""GPUs of the usual large node: a replica of this size has the node to itself, so pod affinity is pointless."""
PACK_WEIGHT: Final = 100


@dataclass(frozen=True, slots=True)
class Near:
    """Preferred pod affinity on the node, toward pods of any namespace."""

    labels: Mapping[str, str]
    weight: int


@dataclass(frozen=True, slots=True)
class Apart:
    """Topology spread over nodes, whenUnsatisfiable ScheduleAnyway, among pods of the same namespace."""

    labels: Mapping[str, str]
    max_skew: int


@dataclass(frozen=True, slots=True)
class Steering:
    """Preferences, never requirements: a pod for which they cannot be met still runs."""

    near: Near | None
    apart: Apart
    topology_key: str = HOSTNAME


def steering(*, gpu_class: str, model_uid: str, gpus: int) -> Steering:
    """The preferences of a variant's pods; `gpus` per replica.

    They depend on nothing that changes while the variant exists (free capacity, node sizes): a change of the pod
    template would be a rollout.
    """
    engines = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_GPU_CLASS: gpu_class}
    return Steering(
        near=Near(engines, PACK_WEIGHT) if gpus < WHOLE_BLOCK else None,
        apart=Apart({names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL_UID: model_uid}, max_skew=1),
    )
