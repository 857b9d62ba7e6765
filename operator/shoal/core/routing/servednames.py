"""Which of its claimed names an object owns, for tenants that may use all claimants: a Model precedes an adapter, an
adapter a route, and of two objects of a kind the older one comes first. For one tenant, a name is resolved among the
objects that it may use (modelindex.py); a status covers all tenants."""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from shoal.api.loraadapter import LoRAAdapter
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute
from shoal.core.claimants import age, why_first
from shoal.core.status.observed import ServedNames

Claimant = Model | LoRAAdapter | ModelRoute
_ORDER: Final = (Model, LoRAAdapter, ModelRoute)


def served_names(own: Claimant, claimants: Iterable[Claimant]) -> ServedNames:
    """`claimants` may include the object itself, and objects that claim none of its names."""
    others = [o for o in claimants if o.metadata.uid != own.metadata.uid and o.metadata.deletion_timestamp is None]
    owned: list[str] = []
    lost: list[tuple[str, str]] = []
    for name in (*own.claimed_names, own.key):
        first = min([own, *(r for r in others if name == r.key or name in r.claimed_names)], key=_precedence)
        if first is not own:
            lost.append((name, _described(first, own)))
        elif name != own.key:
            owned.append(name)
    return ServedNames(tuple(owned), tuple(lost))


def describe_lost(key: str, served: ServedNames) -> str:
    """The sentence about the names that `namespace/name` claims and does not own, and about those that still mean
    it."""
    text = "for tenants that may use both, " + "; ".join(
        f"served name '{name}' belongs to {who}" for name, who in served.lost
    )
    if all(name != key for name, _ in served.lost):
        return f"{text}; '{key}' always means this one"
    # Objects of two kinds may have the same name.
    if served.owned:
        return f"{text}; only {', '.join(served.owned)} means this one"
    return f"{text}; nothing means this one: delete it, and create it under another name"


def _described(first: Claimant, own: Claimant) -> str:
    """The owner of a name that `own` claims too, and why it comes first if that is no matter of their kinds."""
    who = f"{first.kind_name} {first.key}"
    if first.kind_name != own.kind_name:
        return who
    return why_first(first, own, who)


def _precedence(one: Claimant) -> tuple[int, datetime, str]:
    return (_ORDER.index(type(one)), *age(one))
