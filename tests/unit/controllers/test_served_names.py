"""Who has a served name, of Models and adapters together; what the one that lost it is told, and when it is looked at
again."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.api import reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.claims import adapters_claiming, claimants, claims_changed, granted_otherwise, models_claiming
from shoal.controllers.world import World
from shoal.core.lora.lifecycle.revisions import Revisions
from shoal.core.routing.servednames import served_names
from shoal.core.status import adapterstatus, modelstatus
from shoal.core.status.conditions import find
from shoal.core.status.observed import Observed, ServedNames
from tests.support import lora_fleet, operators

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


def dated(body: JsonObject, age: int, version: str = "1") -> JsonObject:
    created = (NOW - timedelta(seconds=age)).isoformat()
    more = {"uid": f"{body['kind']}-{body['metadata']['name']}", "creationTimestamp": created}
    return body | {"metadata": body["metadata"] | more | {"resourceVersion": version}}


def a_model(name: str, age: int, **spec: Any) -> Model:
    return Model.model_validate(dated(operators.model(name, "chat", **spec), age))


def lora(name: str, age: int, **spec: Any) -> LoRAAdapter:
    return LoRAAdapter.model_validate(dated(lora_fleet.adapter("chat", name, **spec), age))


def message(own: Model | LoRAAdapter, served: ServedNames) -> str:
    """Of its condition Accepted."""
    if isinstance(own, Model):
        status: Any = modelstatus.status(Observed(own, (), served, None, (), ()), NOW)
    else:
        status = adapterstatus.status(adapterstatus.Seen(own, served, Revisions()), NOW)
    found = find(status.conditions, reasons.ACCEPTED)
    assert found is not None
    return f"{found.reason}: {found.message}"


def test_an_adapter_is_told_that_a_model_has_its_name_however_young() -> None:
    old, young = lora("support", 9, servedNames=["support", "mine"]), a_model("base", 1, servedNames=["support"])
    served = served_names(old, [young, old])
    assert (served.owned, served.lost) == (("mine",), (("support", "Model chat/base"),))
    assert message(old, served) == (
        "NameClaimed: for tenants that may use both, served name 'support' belongs to Model chat/base; "
        "'chat/support' always means this one"
    )
    assert served_names(young, [young, old]) == ServedNames(("support",), ())


def test_of_two_of_a_kind_the_older_one_has_the_name() -> None:
    for young, old in (
        (lora("tuned", 1, servedNames=["support"]), lora("support", 9)),
        (a_model("tuned", 1, servedNames=["support"]), a_model("support", 9)),
    ):
        served = served_names(young, [young, old])
        assert message(young, served) == (
            "NameClaimed: for tenants that may use both, served name 'support' belongs to the older "
            f"{old.kind_name} chat/support; 'chat/tuned' always means this one"
        )


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([], "nothing means this one: delete it, and create it under another name"),
        (["tuned"], "only tuned means this one"),
    ],
)
def test_an_adapter_that_is_called_like_a_model_has_no_address(names: list[str], what: str) -> None:
    model, adapter = a_model("llama", 1), lora("llama", 9, servedNames=names)
    served = served_names(adapter, [model])
    assert served.lost[-1] == ("chat/llama", "Model chat/llama")
    assert served.owned == tuple(names)
    assert message(adapter, served).endswith(f"'chat/llama' belongs to Model chat/llama; {what}")
    assert served_names(model, [adapter]) == ServedNames(("llama",), ())


def test_one_that_is_being_deleted_has_no_names() -> None:
    old = lora("support", 9)
    going = old.model_copy(update={"metadata": old.metadata.model_copy(update={"deletion_timestamp": NOW})})
    assert served_names(a_model("support", 1), [going]) == ServedNames(("support",), ())


def test_contenders_are_looked_at_again_when_one_of_them_comes_changes_its_names_or_goes() -> None:
    world = World(cast("Any", None), operators.CONFIG, "shoal-system", cast("Any", None))
    woken: list[tuple[set[str], set[str]]] = []

    def changed(_key: str, before: Any, after: Any) -> None:
        names = claims_changed(before, after)
        woken.append((models_claiming(world, names), adapters_claiming(world, names)))

    world.adapters.listeners.append(changed)
    world.models.upsert(dated(operators.model("base", "chat", servedNames=["fine"]), 5))
    world.models.upsert(dated(operators.model("twin", "chat", servedNames=["other"]), 5))
    fine = lora_fleet.adapter("chat", "fine")
    world.adapters.upsert(dated(fine, 9))
    assert woken.pop() == ({"chat/base"}, {"chat/fine"})
    world.adapters.upsert(dated(fine, 9, "2") | {"status": {"rank": 16}})
    assert woken.pop() == (set(), set()), "its status changes no name"
    renamed = lora_fleet.adapter("chat", "fine", servedNames=["other"])
    world.adapters.upsert(dated(renamed, 9, "3"))
    assert woken.pop() == ({"chat/base", "chat/twin"}, {"chat/fine"})
    namesake = dated(lora_fleet.adapter("chat", "twin", servedNames=["x"]), 9)
    world.adapters.upsert(namesake)
    assert woken.pop()[0] == {"chat/twin"}, "called alike"

    fine_now = world.adapters.get("chat/fine")
    assert fine_now is not None
    assert fine_now.object is not None
    assert served_names(fine_now.object, claimants(world, fine_now.object)).lost == (("other", "Model chat/twin"),)
    world.adapters.remove("chat/twin")
    assert woken.pop()[0] == {"chat/twin"}


def a_world() -> World:
    world = World(cast("Any", None), operators.CONFIG, "shoal-system", cast("Any", None))
    world.models.upsert(dated(operators.model("base", "chat"), 5))
    world.pools.upsert(dated(lora_fleet.pool("chat"), 5))
    world.adapters.upsert(dated(lora_fleet.adapter("chat", "support"), 3))
    # Of a namespace of their own: somebody makes everything that claims the name, and it is older.
    world.models.upsert(dated(operators.model("theft", "evil", servedNames=["support"]), 9))
    world.pools.upsert(dated(lora_fleet.pool("evil", model="theft"), 9))
    thief = lora_fleet.adapter("evil", "thief", servedNames=["support", "base"], tenants=["acme", "*"])
    world.adapters.upsert(dated(thief, 9))
    return world


def grant(world: World, version: str, **spec: Any) -> tuple[set[str], set[str]]:
    """The Tenant acme as it is now; which Models and adapters are looked at again."""
    found: list[tuple[frozenset[str], Any, Any]] = []

    def changed(_key: str, before: Any, after: Any) -> None:
        found.extend(one for one in [granted_otherwise(before, after)] if one is not None)

    world.tenants.listeners[:] = [changed]
    body = {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "acme"}, "spec": spec}
    world.tenants.upsert(dated(body, 1, version))
    return {key for modelstatus, _, _ in found for key in modelstatus}, {
        key for _, consent, _ in found for key in consent.touches()
    }


def lost(world: World, kind: str, key: str) -> set[str]:
    custom = (world.models if kind == "model" else world.adapters).get(key)
    assert custom is not None
    assert custom.object is not None
    return {who for _, who in served_names(custom.object, claimants(world, custom.object)).lost}


def test_what_somebody_makes_in_another_namespace_is_no_contender_unless_a_tenant_may_use_both() -> None:
    world = a_world()
    base = {"namespace": "chat", "name": "base"}
    assert grant(world, "2", models=[base]) == ({"chat/base"}, {"chat"})
    assert lost(world, "adapter", "chat/support") == set()
    assert lost(world, "model", "chat/base") == set()
    assert grant(world, "3", models=[base], plan="gold") == (set(), set()), "no grant is another one"
    # Where the tenant itself grants them, they are.
    modelstatus, touched = grant(world, "4", models=[base, {"namespace": "evil", "name": "theft"}])
    assert (modelstatus, touched) == ({"chat/base", "evil/theft"}, {"chat", "evil"})
    assert lost(world, "adapter", "chat/support") == {"Model evil/theft"}
    grant(world, "5", models=[base], adapters=[{"namespace": "evil"}])
    assert lost(world, "adapter", "chat/support") == {"the older LoRAAdapter evil/thief"}
    # Of its own namespace a contender is one in any case: whoever made both is told.
    assert lost(world, "adapter", "evil/thief") == {"Model chat/base", "Model evil/theft"}
    assert lost(world, "model", "chat/base") == set()
