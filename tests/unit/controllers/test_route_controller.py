"""What wakes a ModelRoute, and what its status then says of the cluster as it is."""

import asyncio
from typing import Any, cast

from shoal.api.meta import JsonObject
from shoal.controllers.route import RouteController
from shoal.controllers.world import World
from shoal.core.routing.canary import CanaryHalt
from shoal.core.routing.routes import declared_route
from shoal.kube.events import Event
from shoal.kube.queue import WorkQueue
from tests.support import operators
from tests.support.routes import target
from tests.unit.controllers.test_served_names import dated


class Writes:
    """An API server that takes every status."""

    def __init__(self) -> None:
        self.version = 100

    async def apply_status(self, _resource: Any, body: JsonObject, **_: Any) -> JsonObject:
        self.version += 1
        stored = next(o for o in OBJECTS if o["metadata"]["name"] == body["metadata"]["name"])
        metadata = stored["metadata"] | {"resourceVersion": str(self.version)}
        return stored | {"metadata": metadata, "status": body["status"]}


class Events(list[Event]):
    """A recorder that keeps what it gets."""

    def emit(self, event: Event) -> None:
        self.append(event)


OBJECTS: list[JsonObject] = []


def a_route(name: str, *targets: dict[str, Any], namespace: str = "chat", age: int = 1, **spec: Any) -> JsonObject:
    body = {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "ModelRoute",
        "metadata": {"name": name, "namespace": namespace, "generation": 1},
        "spec": {"rules": [{"name": "default", "targets": list(targets)}], **spec},
    }
    return dated(body, age)


class Rig:
    def __init__(self) -> None:
        OBJECTS.clear()
        self.events, self.halts = Events(), dict[str, CanaryHalt]()
        self.world = World(cast("Any", Writes()), operators.CONFIG, "shoal-system", cast("Any", self.events))
        self.controller = RouteController(self.world, WorkQueue("modelroute", workers=1), lambda: self.halts)
        self.world.routes.listeners.append(self.controller.on_route)
        self.world.models.listeners.append(self.controller.on_model)
        self.world.tenants.listeners.append(self.controller.on_tenant)
        self.woken: list[str] = []
        self.controller.queue.add = self.woken.append  # pyright: ignore[reportAttributeAccessIssue]
        self.version = 1

    def put(self, table: Any, body: JsonObject) -> None:
        self.version += 1
        body = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        if body["kind"] == "ModelRoute":
            OBJECTS.append(body)
        table.upsert(body)

    def told(self, key: str) -> dict[str, tuple[str, str]]:
        asyncio.run(self.controller.reconcile(key))
        custom = self.world.routes.get(key)
        assert custom is not None
        return {c["type"]: (c["status"], c["reason"]) for c in custom.status["conditions"]}


def model(name: str, *, namespace: str = "chat", ready: bool = True, age: int = 5, **spec: Any) -> JsonObject:
    condition = {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": "R",
        "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    return dated(operators.model(name, namespace, **spec), age) | {"status": {"conditions": [condition]}}


def test_a_target_that_comes_changes_and_goes_wakes_the_route():
    rig = Rig()
    rig.put(rig.world.routes, a_route("front", target("a")))
    assert rig.told("chat/front")["Accepted"] == ("False", "TargetNotFound")
    rig.woken.clear()
    rig.put(rig.world.models, model("a", ready=False))
    assert rig.woken == ["chat/front"]
    assert rig.told("chat/front")["Ready"] == ("False", "TargetsNotReady")
    rig.put(rig.world.models, model("a"))
    assert rig.told("chat/front") == {"Accepted": ("True", "Valid"), "Ready": ("True", "TargetsReady")}
    rig.woken.clear()
    rig.put(rig.world.models, model("a"))
    assert rig.woken == [], "nothing that its status says has changed"
    rig.world.models.remove("chat/a")
    assert rig.woken == ["chat/front"]
    assert rig.told("chat/front")["Accepted"] == ("False", "TargetNotFound")


def test_a_route_that_names_a_route_is_circular():
    rig = Rig()
    rig.put(rig.world.routes, a_route("one", target("two")))
    rig.put(rig.world.routes, a_route("two", target("one")))
    assert "chat/one" in rig.woken
    for name in ("one", "two"):
        assert rig.told(f"chat/{name}")["Accepted"] == ("False", "CircularRoute")


def test_a_route_with_the_name_of_its_model_is_not_circular():
    rig = Rig()
    rig.put(rig.world.routes, a_route("llama", target("llama"), servedNames=["front"]))
    assert rig.told("chat/llama")["Accepted"] == ("False", "TargetNotFound"), "it came before its Model"
    rig.put(rig.world.models, model("llama"))
    assert rig.told("chat/llama")["Accepted"] == ("True", "NameClaimed")
    rig.world.models.remove("chat/llama")
    assert rig.told("chat/llama")["Accepted"] == ("False", "TargetNotFound")


def test_a_target_elsewhere_has_to_agree():
    rig = Rig()
    rig.put(rig.world.routes, a_route("front", target("a", namespace="chat"), namespace="door"))
    assert rig.told("door/front")["Accepted"] == ("False", "NotPermitted"), "whether it exists is not told"
    rig.put(rig.world.models, model("a"))
    assert rig.told("door/front")["Accepted"] == ("False", "NotPermitted")
    rig.put(rig.world.models, model("a", routeNamespaces=["door"]))
    assert rig.told("door/front")["Accepted"] == ("True", "Valid")


def test_of_two_routes_with_one_name_the_older_one_has_it_and_the_other_is_told():
    rig = Rig()
    rig.put(rig.world.models, model("a"))
    rig.put(rig.world.routes, a_route("young", target("a"), servedNames=["x"]))
    rig.told("chat/young")
    rig.woken.clear()
    rig.put(rig.world.routes, a_route("old", target("a"), age=9, servedNames=["x", "y"]))
    assert "chat/young" in rig.woken
    assert rig.told("chat/young")["Accepted"] == ("True", "NameClaimed")
    assert rig.told("chat/old")["Accepted"] == ("True", "Valid")
    custom = rig.world.routes.get("chat/old")
    assert custom is not None
    assert custom.status["servedNames"] == ["x", "y"]


def test_a_route_that_is_called_like_a_model_means_nothing():
    rig = Rig()
    rig.put(rig.world.routes, a_route("a", target("b")))
    rig.put(rig.world.models, model("b"))
    assert rig.told("chat/a")["Accepted"] == ("True", "Valid")
    rig.woken.clear()
    rig.put(rig.world.models, model("a"))
    assert rig.woken == ["chat/a"]
    assert rig.told("chat/a")["Accepted"] == ("False", "NameTaken")


def test_a_route_of_another_namespace_is_no_contender_unless_a_tenant_may_use_both():
    rig = Rig()
    rig.put(rig.world.models, model("a", routeNamespaces=["*"]))
    rig.put(rig.world.routes, a_route("front", target("a")))
    there = target("a", namespace="chat")
    rig.put(rig.world.routes, a_route("thief", there, namespace="evil", age=9, servedNames=["front"]))
    assert rig.told("chat/front")["Accepted"] == ("True", "Valid")
    rig.woken.clear()
    both = {"models": [{"namespace": "chat", "name": "a"}], "routes": [{"namespace": "evil"}]}
    tenant = {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "acme"}, "spec": both}
    rig.put(rig.world.tenants, dated(tenant, 1))
    assert set(rig.woken) == {"chat/front", "evil/thief"}
    assert rig.told("chat/front")["Accepted"] == ("True", "NameClaimed")


def test_each_halt_is_one_event_beside_another_problem_and_after_another_halt():
    rig = Rig()
    canary = {"target": target("a"), "percent": 5}
    rules = [{"name": name, "targets": [target("a")], "canary": canary} for name in ("one", "two", "three")]
    rig.put(rig.world.routes, a_route("front", rules=rules))
    rig.told("chat/front")
    custom = rig.world.routes.get("chat/front")
    assert custom is not None
    assert custom.object is not None
    revisions = [rule.canary.revision for rule in declared_route(custom.object).rules if rule.canary]

    def halted(number: int) -> list[tuple[str, str, str]]:
        """The events of one more halt, and of a second look."""
        rig.events.clear()
        rig.halts[revisions[number]] = CanaryHalt("Errors", 3, 5 + number)
        for _ in range(2):
            rig.told("chat/front")
        return [(event.type, event.reason, event.note) for event in rig.events]

    def says(rule: str, of: int) -> list[tuple[str, str, str]]:
        note = f"canary of rule {rule} halted: Model chat/a: 3 of its last {of} requests failed."
        return [("Warning", "CanaryHalted", f"{note} A change of `canary` ends the halt")]

    assert rig.told("chat/front")["Ready"] == ("False", "TargetNotFound")
    assert halted(0) == says("one", 5), "Ready says that there is no such Model"
    rig.put(rig.world.models, model("a"))
    rig.events.clear()
    assert rig.told("chat/front")["Ready"] == ("True", "CanaryHalted")
    assert [event.reason for event in rig.events] == ["CanaryHalted"], "the route is ready again, and not as declared"
    assert halted(1) == says("two", 6), "Ready says already that one is halted"
    rig.halts.clear()
    assert halted(2) == says("three", 7)
