"""How many of a Model's replicas a voluntary disruption, such as the drain of a node, must leave available. Pure."""


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
