"""How many of a Model's replicas a voluntary disruption, such as the drain of a node, must leave available. Pure."""

from collections.abc import Collection, Iterable, Mapping

from shoal.core.facts import Pod


def min_available(former: int | None, ready: int, desired: int) -> int:
    """`minAvailable` of the Model's PodDisruptionBudget: all replicas that have become ready, less one.

    `former` is the value that stands in the cluster (None: there is no budget yet), `ready` the replicas that are ready
    now, `desired` the replicas that are wanted.

    A replica that has not become ready yet does not count: `maxUnavailable: 1` counts it as unavailable, and so forbids
    every eviction while a Model scales up, also from a node that is about to be taken away. A replica that was evicted
    goes on to count until another one is ready, so the next eviction waits for that one.
    """
    counted = ready if former is None else max(former + 1, ready)
    return max(0, min(counted, desired) - 1)


def waits_for_another(
    pods: Iterable[Pod],
    wanted: Mapping[str, int],
    *,
    backoffs: Collection[str] = (),
    refused: Collection[str] = (),
    interruptible: Collection[str] = (),
) -> bool:
    """Whether the only replica that serves is not evicted before another one is ready, which is on its way. Else all
    requests would wait for the start of that one.

    `pods`: of the Model; `wanted`: class -> replicas. By class: `backoffs`, where replicas do not start; `refused`,
    where the API server refuses pods. On `interruptible` classes the machine is taken away at a given time, ready or
    not: the sooner the replica drains, the more answers end whole.
    """
    alive = [pod for pod in pods if not pod.deleting and not pod.finished]
    serving = [pod for pod in alive if pod.ready]
    if len(serving) != 1 or serving[0].gpu_class in interruptible or sum(wanted.values()) < 2:
        return False
    for gpu_class, replicas in wanted.items():
        if gpu_class in backoffs:
            continue
        here = [pod for pod in alive if pod.gpu_class == gpu_class]
        if any(not pod.ready and not pod.gated for pod in here):
            return True
        if replicas > len(here) and gpu_class not in refused:
            return True  # its pod is made now
    return False
