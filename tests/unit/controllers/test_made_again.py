"""A Model that is deleted and made again under the same name, while the objects of the one before still stand."""

import asyncio
from typing import Any, cast

import pytest

from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.children.objects import Children, NameTaken
from shoal.controllers.world import World
from shoal.kube.errors import Conflict
from shoal.kube.resources import PDBS
from tests.support.operators import CONFIG, model

MODEL = Model.model_validate(
    model("chat", "ns") | {"metadata": {"name": "chat", "namespace": "ns", "uid": "new", "resourceVersion": "1"}}
)


def budget(**owner: Any) -> JsonObject:
    owners = [{"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "name": "chat", "controller": True} | owner]
    metadata = {"name": "chat", "namespace": "ns", "uid": "b", "resourceVersion": "1", "ownerReferences": owners}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": {}}


class Cluster:
    def __init__(self, found: JsonObject) -> None:
        self.found = found

    async def get_metadata(self, *_: object) -> JsonObject:
        return self.found


def ensure(found: JsonObject, *, watched: bool) -> None:
    """Applies the Model's own budget, where this one stands."""
    world = World(cast("Any", Cluster(found)), CONFIG, "shoal-system", cast("Any", None))
    if watched:
        world.budgets.upsert(found)
    asyncio.run(Children(world).ensure(PDBS, world.budgets, MODEL, budget(uid="new")))


@pytest.mark.parametrize("watched", [True, False])
def test_what_its_predecessor_leaves_is_waited_for(watched: bool) -> None:
    """The garbage collector deletes it in a moment: no person has anything to do."""
    with pytest.raises(Conflict, match="of a former Model of this name"):
        ensure(budget(uid="old"), watched=watched)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("owner", [{"name": "chat-2"}, {"kind": "Deployment", "apiVersion": "apps/v1"}])
def test_what_is_anothers_is_a_name_that_is_taken(owner: dict[str, str], watched: bool) -> None:
    with pytest.raises(NameTaken, match="exists and does not belong to this Model"):
        ensure(budget(uid="old", **owner), watched=watched)
