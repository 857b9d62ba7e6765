"""When gateways may be sent to the newer revision of an adapter."""

from shoal.core.lora.placement.types import Adapter, Plan, PoolSnapshot, Switch


def may_switch(adapter: Adapter, plan: Plan, snapshot: PoolSnapshot) -> Switch:
    """Yes, when every ready replica on whose floor `next` is has loaded it. Where it is on no floor of a ready replica
    (there is none, or no place is left) its first request loads it, as it does for an adapter on demand."""
    revision = adapter.next
    if revision is None:
        return Switch(now=False)
    missing = tuple(
        r.uid
        for r in snapshot.replicas
        if r.ready
        and not r.draining
        and (r.resident is None or revision.name not in r.resident)
        and any(e.name == revision.name for e in plan.desired.get(r.uid, ()))
    )
    return Switch(now=not missing, missing=missing)
