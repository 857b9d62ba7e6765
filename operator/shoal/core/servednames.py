"""Which of the names that an object asks for it has: each belongs to its oldest claimant, Model or adapter."""

from collections.abc import Iterable

from shoal.api.loraadapter import LoRAAdapter
from shoal.api.model import Model
from shoal.core.adapters.owner import age
from shoal.core.observed import ServedNames

Claimant = Model | LoRAAdapter


def served_names(own: Claimant, others: Iterable[Claimant]) -> ServedNames:
    """The oldest by creation time, then by uid. `others` may have the object itself, and some that ask for nothing of
    this."""
    rivals = [o for o in others if o.metadata.uid != own.metadata.uid and o.metadata.deletion_timestamp is None]
    owned: list[str] = []
    lost: list[tuple[str, str]] = []
    for name in (*own.claimed_names, own.key):
        first = min([own, *(r for r in rivals if name == r.key or name in r.claimed_names)], key=age)
        if first is not own:
            lost.append((name, f"{first.kind_name} {first.key}"))
        elif name != own.key:
            owned.append(name)
    return ServedNames(tuple(owned), tuple(lost))


def told(key: str, served: ServedNames) -> str:
    """The sentence about the names that `namespace/name` asked for in vain, and what means it all the same."""
    text = "; ".join(f"served name '{name}' belongs to the older {who}" for name, who in served.lost)
    if all(name != key for name, _ in served.lost):
        return f"{text}; '{key}' always means this one"
    # A Model and an adapter may be called alike.
    if served.owned:
        return f"{text}; only {', '.join(served.owned)} means this one"
    return f"{text}; nothing means this one: delete it, and create it under another name"
