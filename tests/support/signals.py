"""Signals for an operator in the test's own process: they are what the test says."""

from collections.abc import Callable
from dataclasses import replace

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core.scaling import Demand, Load
from shoal.kube.resources import PODS
from shoal.runtime.operator import OperatorProcess
from tests.support.controlplane import Fleet
from tests.support.operators import NAMESPACE, condition, eventually

QUIET = Load(
    engine_boot="b",
    phase="ready",
    running=0,
    max_running=256,
    waiting=0,
    waiting_tokens=0,
    kv_tokens_used=0,
    kv_tokens_total=12_000,
    prompt_tokens_total=0,
    generation_tokens_total=0,
)
IDLE: dict[str, object] = {
    "phase": "ready",
    "engine_boot": "e1",
    "running": 0,
    "max_running": 256,
    "waiting": 0,
    "waiting_tokens": 0,
    "kv_tokens_used": 0,
    "kv_tokens_total": 12_000,
    "prompt_tokens_total": 0,
    "generation_tokens_total": 0,
}
"""What the agent of a ready replica without requests says."""
NOTHING = Demand(arrivals=0, in_flight=0, held=0, held_tokens=0, oldest_seconds=0.0)


class FakeSignals:
    """Every replica is quiet and every gateway has nothing, until the test says something else. What is in `silent` is
    stale."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        """Pod's uid -> what its agent says."""
        self.demands: dict[str, Demand] = {}
        """Model's uid -> what each gateway has of it."""
        self.silent: set[str] = set()
        """uids of pods whose signals are stale; "*" for all."""
        self.everything = QUIET
        """What an agent says of which the test said nothing."""
        self.heard: list[Callable[[str | None, bool], None]] = []

    def attach(self, operator: OperatorProcess) -> None:
        self.heard.append(operator.signal_changed)

    def tell(self, model_uid: str | None = None, *, urgent: bool = True) -> None:
        """Something changed."""
        for heard in self.heard:
            heard(model_uid, urgent)

    def ask(self, model_uid: str, *, held: int = 1, in_flight: int = 0) -> None:
        """A request arrives at each gateway; so many are held there now."""
        known = self.demands.get(model_uid, NOTHING)
        self.demands[model_uid] = replace(
            known, arrivals=known.arrivals + 1, held=held, held_tokens=100 * held, in_flight=in_flight
        )
        self.tell(model_uid)

    def answered(self, model_uid: str) -> None:
        """Nothing is held or in flight any more."""
        known = self.demands.get(model_uid, NOTHING)
        self.demands[model_uid] = replace(known, held=0, held_tokens=0, in_flight=0)
        self.tell(model_uid)

    # --- what the scaler reads --------------------------------------------------------------------------------------

    def load(self, pod_uid: str) -> Load | None:
        return None if self._is_silent(pod_uid) else self.loads.get(pod_uid, self.everything)

    def demand(self, gateway_uid: str, model_uid: str) -> Demand | None:
        return None if self._is_silent(gateway_uid) else self.demands.get(model_uid, NOTHING)

    def boot(self, gateway_uid: str) -> str | None:
        return None if self._is_silent(gateway_uid) else f"boot of {gateway_uid}"

    def age(self, uid: str) -> float | None:
        return None if self._is_silent(uid) else 0.0

    def tokens_per_second(self, pod_uid: str) -> float | None:
        return None

    def arrivals_per_second(self, model_uid: str) -> float | None:
        return None

    def _is_silent(self, uid: str) -> bool:
        return uid in self.silent or "*" in self.silent


def gateway_pod(name: str = "shoal-gateway-0") -> JsonObject:
    """A gateway as the operator sees it in the API server."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {names.LABEL_COMPONENT: names.COMPONENT_GATEWAY, names.LABEL_PART_OF: "shoal"},
        },
        "spec": {"containers": [{"name": "gateway", "image": "shoal:test"}], "terminationGracePeriodSeconds": 0},
    }


async def ready_gateway(fleet: Fleet) -> JsonObject:
    """A gateway that is Ready: one that never was is no signal source. It goes with the fleet."""
    made = await fleet.client.apply(PODS, gateway_pod(), manager="person")
    return await eventually(
        lambda: fleet.client.get(PODS, made["metadata"]["name"], NAMESPACE),
        lambda pod: condition(pod, "Ready").get("status") == "True",
        what="a gateway",
    )
