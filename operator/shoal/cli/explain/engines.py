"""The same Model on the other engines: what fits where, which engine fits better, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Model, ModelStatus
from shoal.cli.explain.onengine import NOWHERE, OnEngine, PlacementInputs, on_engine
from shoal.core.candidates import Considered
from shoal.core.routing.resolve import Trait, served_model
from shoal.core.sizing import Sized
from shoal.engine.kinds import KINDS, kind_of
from shoal.engine.port import EngineKind
from shoal.engine.wires import differences_of

_GI = 2**30
_READS: Final[Mapping[Trait, str]] = {"vision": "read images", "audio": "read sound"}
"""The other traits follow from parsers, which are named for one engine: none is moved to another."""


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """A Model as another engine would serve it, without the arguments that are its own engine's."""

    engine: str
    considered: Considered
    """Nowhere, if the engine would refuse the Model or its pool."""
    summary: str
    """Which of the two engines fits better and why, for a person."""


def others(
    own: OnEngine, facts: ArtifactFacts | str, inputs: PlacementInputs, used: Sequence[str]
) -> tuple[OtherEngine, ...]:
    """The Model on every engine but its own, also where its own engine refuses it. `used`: the classes that have its
    replicas, by which the engines are compared first."""
    moved = (
        on_engine(_moved(own.model, kind), facts, inputs)
        for kind in KINDS.values()
        if kind.type != own.model.spec.engine.type
    )
    known = None if isinstance(facts, str) else facts
    return tuple(found for other in moved if (found := _other(own, other, known, used)) is not None)


def _moved(model: Model, kind: EngineKind) -> Model:
    """The Model with this type of engine, and without what is its own engine's: version, image, names, arguments."""
    without: dict[str, object] = {"version": None, "image": None, "extra_args": ()}
    without |= {"tool_call_parser": None, "reasoning_parser": None}
    engine = model.spec.engine.model_copy(update={"type": kind.type, **without})
    return model.model_copy(update={"spec": model.spec.model_copy(update={"engine": engine})})


def _other(own: OnEngine, other: OnEngine, facts: ArtifactFacts | None, used: Sequence[str]) -> OtherEngine | None:
    """None: the other engine refuses the Model for no other reason than its own."""
    name, pool, found = other.model.spec.engine.type, other.pool, other.considered
    if other.problems:
        more = [problem for problem in other.problems if problem not in own.problems]
        return OtherEngine(name, NOWHERE, f"{name} instead: would be refused ({more[0]})") if more else None
    if own.pool.used and pool.refused:
        return OtherEngine(name, NOWHERE, f"{name} instead: would not serve {pool.name} ({pool.refused})")
    without = ", without the Model's extraArgs" if own.model.spec.engine.extra_args else ""
    said = _taken(other) if own.problems else _summary(own, other, used)
    notes = _notes(own.model, other.model, facts) if found.sized else ()
    return OtherEngine(name, found, "; ".join([f"{name} instead{without}: {said}", *notes]))


def _notes(own: Model, other: Model, facts: ArtifactFacts | None) -> Iterator[str]:
    """What else differs on the other engine."""
    before, after = _abilities(own, facts), _abilities(other, facts)
    more, less = " and ".join(sorted(after - before)), " and ".join(sorted(before - after))
    changes = [*([f"also {more}"] if more else []), *([f"not {less}"] if less else [])]
    if changes:
        yield f"there the Model would {', and '.join(changes)}"
    if kind_of(other).pod.needs_mtls and not kind_of(own).pod.needs_mtls:
        yield f"{other.spec.engine.type} needs mutual TLS"


def _abilities(model: Model, facts: ArtifactFacts | None) -> frozenset[str]:
    """What gateways would let it do, with such facts."""
    status = (model.status or ModelStatus()).model_copy(update={"artifact": facts})
    known = model.model_copy(update={"status": status})
    served = served_model(known, differences_of(model.spec.engine.type))
    return frozenset({*served.capabilities, *(does for trait, does in _READS.items() if trait in served.traits)})


def _taken(other: OnEngine) -> str:
    """What the other engine holds of a Model that its own engine refuses."""
    pool, sized = other.pool, other.considered.sized
    left_out = f" without {pool.name}" + (f" ({pool.refused})" if pool.refused else "")
    with_pool = "" if not pool.name else f" with {pool.name}" if pool.used else left_out
    fits = f"would take it{with_pool}, fits on {len(sized)} classes"
    if not sized:
        return fits + _nowhere(other.considered)
    name, first = next(iter(sized.items()))
    held, rest = f"{_tokens(first)} KV tokens on {name}", f"{_rest(first)} of a GPU"
    return f"{fits}; {held}; besides weights, adapters and KV cache it takes {rest}"


def _nowhere(considered: Considered) -> str:
    reasons = sorted({r.why for r in considered.rejected})
    return f" ({reasons[0]})" if reasons else ""


def _summary(of_own: OnEngine, of_other: OnEngine, used: Sequence[str]) -> str:
    own_name, own = of_own.model.spec.engine.type, of_own.considered
    other_name, other = of_other.model.spec.engine.type, of_other.considered
    first = [name for name in used if name in own.sized]
    names = [*first, *own.sized, *(name for name in other.sized if name not in own.sized)]
    more = of_other.pool.used is not None and of_own.pool.used is None
    pool, without = (f" with {of_other.pool.name}", " without") if more else ("", "")
    counts = f"fits on {len(other.sized)} classes{pool}, {own_name} on {len(own.sized)}{without}"
    if not names:
        return counts + _nowhere(other)
    name = next((n for n in names if n in own.sized and n in other.sized), names[0])
    mine, its = own.sized.get(name), other.sized.get(name)
    if mine is None or its is None:
        better = own_name if its is None else other_name
        return f"{counts}; only {better} fits on {name}"
    shown = f"{_tokens(its)} KV tokens on {name}, {own_name} {_tokens(mine)}"
    verdict = f"only {other_name} serves the pool" if more else _verdict(own_name, mine, other_name, its)
    rest = f"besides weights, adapters and KV cache {other_name} takes {_rest(its)} of a GPU, {own_name} {_rest(mine)}"
    return f"{counts}; {shown}: {verdict}; {rest}"


def _verdict(own_name: str, mine: Sized, other_name: str, its: Sized) -> str:
    if mine.gpus != its.gpus:
        return f"{own_name if mine.gpus < its.gpus else other_name} needs fewer GPUs"
    if mine.kv_tokens is None or its.kv_tokens is None:
        return "not comparable"
    if mine.kv_tokens == its.kv_tokens:
        return "both hold the same"
    more, fewer, name = (mine, its, own_name) if mine.kv_tokens > its.kv_tokens else (its, mine, other_name)
    may_be_less = fewer.at_least and not more.at_least
    return f"{name} holds more" + (", unless the estimates are far too high" if may_be_less else "")


def _tokens(sized: Sized) -> str:
    gpus = f" ({sized.gpus} GPUs)" if sized.gpus > 1 else ""
    return f"{'at least ' if sized.at_least else ''}{sized.kv_tokens or 0:,}{gpus}"


def _rest(sized: Sized) -> str:
    s = sized.breakdown
    estimated = " (of it estimated: " + ", ".join(sized.estimates) + ")" if sized.at_least else ""
    return f"{(s.memory - s.weights - s.adapters - s.kv - s.state) / _GI:.1f} GiB{estimated}"
