"""The condition QuotaWait of a Model: whether a quota holds its replicas back."""

from collections import Counter
from collections.abc import Sequence

from shoal.api import reasons
from shoal.core.facts import Deployment, Pod
from shoal.core.podquota import refusal, waits_for_queue
from shoal.core.status.conditions import ConditionUpdate
from shoal.core.status.diagnosis import diagnose


def quota_wait(pods: Sequence[Pod], deployments: Sequence[Deployment]) -> ConditionUpdate | None:
    """True while Kueue, a ResourceQuota or a LimitRange holds replicas back, or the ResourceClaims of their pods. False
    while pods name a queue: they were admitted, or no Kueue looks at them. None: no quota is known of."""
    alive = [pod for pod in pods if not pod.deleting and not pod.finished]
    gated = [pod for pod in alive if pod.gated and waits_for_queue(pod)]
    said: list[tuple[str, str]] = []
    if gated and (cause := diagnose(gated, deployments)) is not None:
        more = f" ({len(gated)} replicas wait)" if len(gated) > 1 else ""
        said.append((cause.reason, f"{cause.message}{more}"))
    said += [
        (found.reason, f"{deployment.gpu_class}: {found.message}")
        for deployment in deployments
        if deployment.refused and _lacks(deployment, alive) and (found := refusal(deployment.refused)) is not None
    ]
    claims = Counter(
        (found.reason, f"{pod.gpu_class}: {found.message}")
        for pod in alive
        if pod.gated and (found := pod.claim_refusal) is not None and found.quota
    )
    said += [(reason, f"{text} ({n} replicas wait)" if n > 1 else text) for (reason, text), n in claims.items()]
    if said:
        # A pod that may not exist comes before one that waits for its turn: Kueue sees only the second.
        refuses = (reasons.RESOURCE_QUOTA, reasons.LIMIT_RANGE)
        said.sort(key=lambda each: each[0] not in refuses)
        text = "; ".join(dict.fromkeys(message for _, message in said))
        return ConditionUpdate(reasons.QUOTA_WAIT, "True", said[0][0], text)
    queues = sorted({pod.queue for pod in alive if pod.queue})
    if not queues:
        return None
    ignored = [pod for pod in alive if pod.queue and not pod.queue_managed]
    if ignored:
        text = (
            f"{len(ignored)} of {len(alive)} pods name queue {queues[0]}, and no Kueue looks at them: no quota applies"
        )
        return ConditionUpdate(reasons.QUOTA_WAIT, "False", reasons.QUEUE_IGNORED, text)
    return ConditionUpdate(reasons.QUOTA_WAIT, "False", reasons.ADMITTED, f"admitted by queue {', '.join(queues)}")


def _lacks(deployment: Deployment, pods: Sequence[Pod]) -> bool:
    """Whether replicas are missing: a Deployment keeps the refusal a moment longer than it is true."""
    ready = sum(pod.ready and pod.gpu_class == deployment.gpu_class for pod in pods)
    return ready < deployment.replicas or deployment.replacing
