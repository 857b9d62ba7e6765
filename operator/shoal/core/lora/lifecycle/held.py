"""Where one adapter is loaded, from the replicas' reports and the plan."""

from dataclasses import dataclass

from shoal.api import reasons
from shoal.core.lora.placement.types import AdapterPlacement
from shoal.core.status.adapterstatus import Held
from shoal.core.status.observed import ModelProblem


@dataclass(frozen=True, slots=True)
class HeldState:
    """What the ready replicas report of one adapter."""

    loaded: int = 0
    """Replicas that have loaded the current revision."""
    failure: ModelProblem | None = None
    """Why a replica could not load it; of several replicas, the first by pod name."""
    next_loaded: int = 0
    next_failure: ModelProblem | None = None


def held(state: HeldState | None, verdict: AdapterPlacement | None, *, replicas: int, stale: int) -> Held:
    """For the status. A failure of the next revision counts while no replica has loaded it."""
    state = state or HeldState()
    no_room = None
    if verdict is not None and verdict.reason is not None:
        no_room = ModelProblem(verdict.reason or reasons.NO_ROOM, verdict.message)
    return Held(
        replicas=replicas,
        stale=stale,
        loaded=state.loaded,
        failure=state.failure,
        next_failure=None if state.next_loaded else state.next_failure,
        no_room=no_room,
    )
