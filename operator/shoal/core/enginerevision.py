"""What a Model says of the engines that run on one GPU class: with another one, an engine may start that ended before.

What changes how many replicas there may be, where, or how they are reached is no part of it.
"""

from dataclasses import dataclass

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool, LoRAPoolSpec
from shoal.api.model import Engine, ModelSpec, PodTemplate, PrefixCache, Source


@dataclass(frozen=True, slots=True)
class EngineRevision:
    """The parts of a Model that reach its engine and its weights on one class."""

    source: Source
    weights: tuple[str | None, str | None] | None
    """Revision and digest of the source, as its facts have them; None: they are not known."""
    engine: Engine
    quantization: str | None
    """Of the class's variant."""
    tensor: int | None
    """Of the class's variant."""
    prefix_cache: PrefixCache
    pod: PodTemplate
    pool: tuple[str, LoRAPoolSpec] | None
    """See `pool_settings`."""


def engine_revision(
    spec: ModelSpec, gpu_class: str, facts: ArtifactFacts | None, pool: LoRAPool | None
) -> EngineRevision:
    """`facts`: of the source; None: they are not known. `pool`: whose adapters the engines serve."""
    variant = next((v for v in spec.variants if v.gpu_class == gpu_class), None)
    return EngineRevision(
        source=spec.source,
        weights=None if facts is None else (facts.revision, facts.digest),
        engine=spec.engine,
        quantization=variant.quantization if variant is not None else None,
        tensor=variant.tensor if variant is not None else None,
        prefix_cache=spec.prefix_cache,
        pod=spec.pod,
        pool=pool_settings(pool),
    )


def pool_settings(pool: LoRAPool | None) -> tuple[str, LoRAPoolSpec] | None:
    """Name and specification of a pool, as far as they change engine pods. Who may join the pool does not change them,
    nor do names of the base, by which adapters' configs are checked."""
    if pool is None:
        return None
    return pool.metadata.name, pool.spec.model_copy(update={"allowed_namespaces": (), "base_names": ()})
