"""The wires by type of engine: the only place that knows which ones there are."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shoal.core.enginedifferences import EngineDifferences
from shoal.core.fields.table import TABLE
from shoal.engine.sglang.wire import WIRE as SGLANG
from shoal.engine.vllm.wire import WIRE as VLLM
from shoal.engine.wire import Wire

DEFAULT: Final = SGLANG.type
"""Type of the engines in pods that say nothing: those of versions of Shoal that knew one engine."""
_WIRES: Final[Mapping[str, Wire]] = MappingProxyType({wire.type: wire for wire in (SGLANG, VLLM)})
SPECIAL: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {path: frozenset(name for wire in _WIRES.values() for name in wire.special.get(path, ())) for path in TABLE}
)
"""By endpoint: the fields that some wire needs to see. Which engine answers a request is known when it is sent."""
_NOTHING: Final[Mapping[str, bytes | None]] = MappingProxyType({})


def wire_of(engine_type: str) -> Wire | None:
    """The wire to engines of a type; None: this gateway does not know the type."""
    return _WIRES.get(engine_type)


def differences_of(engine_type: str) -> EngineDifferences:
    """Where a Model of this type does less than the tables say."""
    wire = _WIRES.get(engine_type)
    return _WIRES[DEFAULT].differences if wire is None else wire.differences


def added_of(endpoint: str, fields: Mapping[str, Any]) -> Mapping[str, bytes | None]:
    """What `Wire.added` says of a checked body, by type of engine; a type that is missing adds nothing."""
    if SPECIAL[endpoint].isdisjoint(fields):
        return _NOTHING
    found = ((wire, wire.added(endpoint, fields)) for wire in _WIRES.values() if endpoint in wire.special)
    return {wire.type: added for wire, added in found if added != b""}
