"""The signals of replicas and gateways that placing adapters needs."""

from collections.abc import Mapping
from typing import Protocol

from shoal.api.demand import AdapterDemand
from shoal.api.replica import ReplicaKeys


class AdapterSignals(Protocol):
    """None means that the signal is stale, never that there is nothing."""

    def keys(self, pod_uid: str) -> ReplicaKeys | None:
        """What a replica's agent says."""
        ...

    def agent_boot(self, pod_uid: str) -> str | None:
        """Boot id of an agent whose stream is live."""
        ...

    def boot(self, gateway_uid: str) -> str | None:
        """Boot id of a gateway whose stream is live."""
        ...

    def adapter_demand(self, gateway_uid: str) -> Mapping[str, AdapterDemand] | None:
        """What a gateway has of adapters, by uid of the LoRAAdapter."""
        ...


class NoAdapterSignals:
    """No signals: adapters are loaded on demand. For an operator without streams of its own."""

    def keys(self, pod_uid: str) -> ReplicaKeys | None:
        return None

    def agent_boot(self, pod_uid: str) -> str | None:
        return None

    def boot(self, gateway_uid: str) -> str | None:
        return None

    def adapter_demand(self, gateway_uid: str) -> Mapping[str, AdapterDemand] | None:
        return None
