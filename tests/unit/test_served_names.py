"""Who has a served name, of Models and adapters together; what the one that lost it is told, and when it is looked at
again."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.api import reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.claims import adapters_claiming, claimants, claims_changed, models_claiming
from shoal.controllers.world import World
from shoal.core import models
from shoal.core.adapters import adapterstatus
from shoal.core.adapters.revisions import Revisions
from shoal.core.conditions import find
from shoal.core.observed import Observed, ServedNames
from shoal.core.servednames import served_names
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
        status: Any = models.status(Observed(own, (), served, None, (), ()), NOW)
    else:
        status = adapterstatus.status(adapterstatus.Seen(own, served, Revisions()), NOW)
    found = find(status.conditions, reasons.ACCEPTED)
    assert found is not None
    return f"{found.reason}: {found.message}"


def test_a_model_is_told_that_an_older_adapter_has_its_name() -> None:
    young, old = a_model("base", 1, servedNames=["support", "mine"]), lora("support", 9)
    served = served_names(young, [young, old])
    assert (served.owned, served.lost) == (("mine",), (("support", "LoRAAdapter chat/support"),))
    assert message(young, served) == (
        "NameClaimed: served name 'support' belongs to the older LoRAAdapter chat/support; "
        "'chat/base' always means this one"
    )
    assert served_names(old, [young, old]) == ServedNames(("support",), ())


def test_an_adapter_is_told_that_an_older_model_has_its_name() -> None:
    young, old = lora("support", 1), a_model("base", 9, servedNames=["support"])
    served = served_names(young, [young, old])
    assert message(young, served) == (
        "NameClaimed: served name 'support' belongs to the older Model chat/base; 'chat/support' always means this one"
    )


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([], "nothing means this one: delete it, and create it under another name"),
        (["tuned"], "only tuned means this one"),
    ],
)
def test_a_model_and_an_adapter_that_are_called_alike_share_no_address(names: list[str], what: str) -> None:
    young, old = a_model("llama", 1, servedNames=names), lora("llama", 9)
    served = served_names(young, [old])
    assert served.lost[-1] == ("chat/llama", "LoRAAdapter chat/llama")
    assert served.owned == tuple(names)
    assert message(young, served).endswith(f"'chat/llama' belongs to the older LoRAAdapter chat/llama; {what}")


def test_one_that_is_being_deleted_has_no_names() -> None:
    old = lora("support", 9)
    going = old.model_copy(update={"metadata": old.metadata.model_copy(update={"deletion_timestamp": NOW})})
    assert served_names(a_model("support", 1), [going]) == ServedNames(("support",), ())


def test_rivals_are_looked_at_again_when_one_of_them_comes_changes_its_names_or_goes() -> None:
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

    twin = world.models.get("chat/twin")
    assert twin is not None
    assert twin.object is not None
    assert served_names(twin.object, claimants(world, twin.object)).lost == (
        ("other", "LoRAAdapter chat/fine"),
        ("chat/twin", "LoRAAdapter chat/twin"),
    )
    world.adapters.remove("chat/twin")
    assert woken.pop()[0] == {"chat/twin"}
