"""A checked request as a gateway sends it to an engine of a kind: at that engine's path, in its words."""

from dataclasses import dataclass, replace
from typing import Any

from shoal.core.fields.kinds import Facts
from shoal.engine.wire import EngineCall, Wire
from shoal.engine.wires import wire_of
from shoal.gateway.body import Parsed, engine_body
from tests.support.behaviour import WORDS
from tests.support.engines import API_KEY, SERVED, Kind


@dataclass(frozen=True, slots=True)
class Sent:
    """One request to an engine."""

    path: str
    body: bytes
    headers: dict[str, str]


def facts_for(kind: Kind, facts: Facts, *, generates: bool = True) -> Facts:
    """The facts of a Model on this engine: its engine may do less than the field table says."""
    differences = _wire(kind).differences
    if generates and differences.generating is not None:
        differences = differences.generating
    return replace(facts, differences=differences)


def sent(kind: Kind, path: str, body: dict[str, Any], rid: str) -> Sent | None:
    """What the engine gets; None: this engine does not do what the body asks for, so it gets nothing."""
    wire = _wire(kind)
    parsed = Parsed(body, SERVED, bool(body.get("stream")), wants_usage=False, wants_continuous=False)
    added = wire.added(path, body) if path in wire.special else b""
    if added is None or path not in wire.paths:
        return None
    call = EngineCall(path, SERVED, None, rid, 1, added)
    raw = wire.encode(engine_body(parsed, path, SERVED, rid), call)
    return Sent(
        wire.path(call),
        raw,
        {"authorization": f"Bearer {API_KEY}", "content-type": "application/json", "x-request-id": rid},
    )


def _wire(kind: Kind) -> Wire:
    wire = wire_of(WORDS[kind].name)
    assert wire is not None
    return wire
