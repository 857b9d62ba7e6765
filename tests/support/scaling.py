"""Models at a moment, for tests of the decider; and a decider that is asked as the operator asks it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.scaling import (
    Demand,
    Load,
    ModelSnapshot,
    Policy,
    Replica,
    ScalingDecision,
    ScalingMemory,
    ScalingVariant,
    SignalSource,
    decide,
)

KV_TOKENS = 100_000
CLASS = "l40s-48gb"


def load(**fields: Any) -> Load:
    """An engine that has nothing to do, but for `fields`."""
    idle: dict[str, Any] = {
        "engine_boot": "engine-1",
        "phase": "ready",
        "running": 0,
        "max_running": 256,
        "waiting": 0,
        "waiting_tokens": 0,
        "kv_tokens_used": 0,
        "kv_tokens_total": KV_TOKENS,
        "prompt_tokens_total": 0,
        "generation_tokens_total": 0,
    }
    return Load(**{**idle, **fields})


def replica(number: int = 0, said: Load | None = None, **fields: Any) -> Replica:
    """A ready one; `said=None` with `dark=True`: stale."""
    dark = fields.pop("dark", False)
    plain: dict[str, Any] = {
        "uid": f"uid-{number}",
        "pod": f"pod-{number}",
        "gpu_class": CLASS,
        "ready": True,
        "was_ready": True,
        "deleting": False,
        "lost": False,
        "created": -1000.0,
        "load": None if dark else said or load(),
    }
    return Replica(**{**plain, **fields})


def pending(number: int = 0, **fields: Any) -> Replica:
    """One that has not been ready yet."""
    plain: dict[str, Any] = {"ready": False, "was_ready": False, "created": 0.0, "dark": True}
    return replica(number, **{**plain, **fields})


def source(name: str = "gateway-0", boot: str = "boot-1", *, dark: bool = False, **fields: Any) -> SignalSource:
    """A gateway that has nothing, but for `fields`."""
    nothing: dict[str, Any] = {"arrivals": 0, "in_flight": 0, "held": 0, "held_tokens": 0, "oldest_seconds": 0.0}
    return SignalSource(name, boot, None if dark else Demand(**{**nothing, **fields}))


def variant(gpu_class: str = CLASS, replicas: int = 0, room: int | None = 100, **fields: Any) -> ScalingVariant:
    plain: dict[str, Any] = {"kv_tokens": KV_TOKENS, "cold_start_seconds": 60.0}
    return ScalingVariant(gpu_class, replicas, room, **{**plain, **fields})


def snapshot(
    *replicas: Replica, sources: Sequence[SignalSource] | None = (), policy: Policy | None = None, **fields: Any
) -> ModelSnapshot:
    """A Model with one gateway that has nothing, unless `sources` says otherwise; variants as the replicas stand."""
    standing = [r for r in replicas if not r.deleting and not r.lost]
    plain: dict[str, Any] = {
        "policy": policy or Policy(),
        "wanted": len(standing),
        "replicas": replicas,
        "sources": (source(),) if sources == () else None if sources is None else tuple(sources),
        "variants": (variant(replicas=len(standing)),),
        "rolling": False,
        "term_began": 0.0,
    }
    return ModelSnapshot(**{**plain, **fields})


@dataclass
class Term:
    """One leader's term over a Model: each decision gets the memory of the one before."""

    memory: ScalingMemory | None = None
    now: float = 0.0
    decision: ScalingDecision | None = None

    def at(self, now: float, seen: ModelSnapshot) -> ScalingDecision:
        """The decision at `now`; looked at on the way there whenever the one before asked for it, and carried out."""
        while self.memory is not None and self.memory.due is not None and self.memory.due < now:
            decision = self._decide(max(self.memory.due, self.now), seen)
            seen = replace(seen, wanted=decision.wanted)
        return self._decide(now, seen)

    def _decide(self, now: float, seen: ModelSnapshot) -> ScalingDecision:
        self.decision, self.memory = decide(seen, self.memory, now)
        self.now = now
        return self.decision
