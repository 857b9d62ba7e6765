"""Who asks for which served names: Models and adapters are rivals."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shoal.api.loraadapter import LoRAAdapter
from shoal.api.model import Model
from shoal.controllers.world import World
from shoal.core.servednames import Claimant
from shoal.kube.projections import Custom

_Claiming = Custom[Model] | Custom[LoRAAdapter]


def claims_changed(before: _Claiming | None, after: _Claiming | None) -> set[str]:
    """Names that somebody else may have won or lost by this change; also `namespace/name`."""
    was, now = _claims(before), _claims(after)
    return set() if was == now else {*was.names, *now.names}


class _Claims(NamedTuple):
    uid: str
    names: tuple[str, ...]


def _claims(custom: _Claiming | None) -> _Claims:
    if custom is None or custom.object is None or custom.metadata.deletion_timestamp is not None:
        return _Claims("", ())
    return _Claims(custom.metadata.uid, (custom.object.key, *custom.object.claimed_names))


def claimants(world: World, own: Claimant) -> list[Claimant]:
    """All that ask for one of its names; itself among them."""
    found = [(*_models(world, [name]), *_adapters(world, [name])) for name in (own.key, *own.claimed_names)]
    return [custom.object for customs in found for custom in customs if custom.object is not None]


def models_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the Models that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _models(world, names)}


def adapters_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the adapters that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _adapters(world, names)}


def _models(world: World, names: Iterable[str]) -> Iterator[Custom[Model]]:
    for name in names:
        if "/" not in name:
            yield from world.models.by("claim", name)
        elif (custom := world.models.get(name)) is not None:
            yield custom


def _adapters(world: World, names: Iterable[str]) -> Iterator[Custom[LoRAAdapter]]:
    for name in names:
        if "/" not in name:
            yield from world.adapters.by("claim", name)
        elif (custom := world.adapters.get(name)) is not None:
            yield custom
