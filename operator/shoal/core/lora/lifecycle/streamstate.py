"""What an agent's stream says of its adapters."""

from shoal.api import reasons
from shoal.api.replica import AdapterState
from shoal.core.lora.lifecycle.registry import Failure, Registry, RegistryEntry


def keys(registry: Registry) -> dict[str, object]:
    """Keys of `ReplicaKeys` by attribute name."""
    return {
        "adapters": states(registry),
        "adapter_slots": registry.slots,
        "adapter_slots_leased": len(registry.leases),
        "adapters_waiting": sum(ask.admitted is None and not ask.slow for ask in registry.waiters),
        "adapter_loads_total": registry.loads,
        "adapter_evictions_total": registry.evictions,
    }


def states(registry: Registry) -> dict[str, AdapterState] | None:
    """By engine name; None until what belongs here was tried."""
    if not registry.reportable:
        return None
    said = {name: _state(entry, registry.failures.get(name)) for name, entry in registry.entries.items()}
    for name, failure in registry.failures.items():
        said.setdefault(name, _failed(failure))
    for name in registry.unplaced:
        said.setdefault(
            name,
            AdapterState(
                state="failed",
                reason=reasons.NO_ROOM,
                message=f"all {registry.places} places hold adapters that are pinned or in use",
            ),
        )
    return said


def _state(entry: RegistryEntry, failure: Failure | None) -> AdapterState:
    match entry.state:
        case "staging" | "loading" | "loaded" | "retiring":
            return AdapterState(state=entry.state)
        case "staged":
            return AdapterState(state="loading")
        case "unloading":
            return AdapterState(state="retiring")
        case "load_unknown" | "unload_pending":
            return _failed(failure) if failure else AdapterState(state="retiring")


def _failed(failure: Failure) -> AdapterState:
    return AdapterState(state="failed", reason=failure.reason, message=failure.message)
