"""The same Model on the other engines: what fits where, which engine fits better, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.api.artifact import ArtifactFacts
from shoal.api.gpuclass import GPUClass
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core import candidates
from shoal.core.candidates import Considered, Tune
from shoal.core.sizing import GPU, Sized
from shoal.engine.kinds import KINDS, kind_of
from shoal.engine.port import EngineKind

_GI = 2**30


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """A Model as another engine would serve it, with that engine's default arguments."""

    engine: str
    considered: Considered
    summary: str
    """Which of the two engines fits better and why, for a person."""


def others(
    model: Model,
    facts: ArtifactFacts | None,
    classes: Mapping[str, GPUClass],
    gpus: Mapping[str, GPU],
    pool: LoRAPool | None,
    own: Considered,
    used: Sequence[str],
) -> tuple[OtherEngine, ...]:
    """The Model on every engine but its own. Its `extraArgs` are its own engine's, so they are left out. `used`: the
    classes that have its replicas, by which the engines are compared first."""
    return tuple(
        _other(kind, model, facts, classes, gpus, pool, own, used)
        for kind in KINDS.values()
        if kind.type != model.spec.engine.type
    )


def _other(
    kind: EngineKind,
    model: Model,
    facts: ArtifactFacts | None,
    classes: Mapping[str, GPUClass],
    gpus: Mapping[str, GPU],
    pool: LoRAPool | None,
    own: Considered,
    used: Sequence[str],
) -> OtherEngine:
    found = candidates.consider(model, facts, classes, gpus, _tune(kind, model, facts, pool))
    refused = kind.pod.problems(_moved(model, kind), "", facts)
    if refused:
        return OtherEngine(kind.type, found, f"{kind.type} instead: would be refused ({refused[0]})")
    return OtherEngine(kind.type, found, _summary(kind_of(model).type, own, kind.type, found, used))


def _moved(model: Model, kind: EngineKind) -> Model:
    """The Model with this type of engine, and without names and arguments that are its own engine's."""
    own: dict[str, object] = {"extra_args": (), "tool_call_parser": None, "reasoning_parser": None}
    engine = model.spec.engine.model_copy(update={"type": kind.type, **own})
    return model.model_copy(update={"spec": model.spec.model_copy(update={"engine": engine})})


def _tune(kind: EngineKind, model: Model, facts: ArtifactFacts | None, pool: LoRAPool | None) -> Tune:
    engine = model.spec.engine
    return lambda quantization: kind.pod.tuning((), quantization=quantization, pool=pool, facts=facts, engine=engine)


def _summary(own_name: str, own: Considered, other_name: str, other: Considered, used: Sequence[str]) -> str:
    first = [name for name in used if name in own.sized]
    names = [*first, *own.sized, *(name for name in other.sized if name not in own.sized)]
    counts = f"{other_name} instead: fits on {len(other.sized)} classes, {own_name} on {len(own.sized)}"
    if not names:
        reasons = sorted({r.why for r in other.rejected})
        return counts + (f" ({reasons[0]})" if reasons else "")
    name = next((n for n in names if n in own.sized and n in other.sized), names[0])
    mine, its = own.sized.get(name), other.sized.get(name)
    if mine is None or its is None:
        better = own_name if its is None else other_name
        return f"{counts}; only {better} fits on {name}"
    shown = f"{_tokens(its)} KV tokens on {name}, {own_name} {_tokens(mine)}"
    rest = f"besides weights, adapters and KV cache {other_name} takes {_rest(its)} of a GPU, {own_name} {_rest(mine)}"
    return f"{counts}; {shown}: {_verdict(own_name, mine, other_name, its)}; {rest}"


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
