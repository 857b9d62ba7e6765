"""What a Model can do, from its architecture and its engine's arguments; endpoints for anything else are refused.

SGLang decides by the architecture whether an engine generates; an argument makes it embed instead. A request for the
other kind is at best an error. At worst it ends the engine: a chat does so where the engine does not generate.
"""

from collections.abc import Sequence
from typing import Final, Literal

from shoal.api.artifact import ArtifactFacts
from shoal.core.architectures import names
from shoal.core.enginedifferences import EngineDifferences

Capability = Literal["generate", "embed", "rerank", "score", "classify", "transcribe"]
_UNKNOWN: Final[frozenset[Capability]] = frozenset({"generate", "embed"})
"""Of a Model without facts, or with a body of layers for which SGLang decides by further values of the config
(Gemma3TextModel): the engine judges."""

_SCORE: Final[frozenset[Capability]] = frozenset({"score"})
_TRANSCRIBE: Final[frozenset[Capability]] = frozenset({"transcribe"})


def only_embeds(facts: ArtifactFacts | None, extra_args: Sequence[str], differences: EngineDifferences) -> bool:
    """Whether the engine computes embeddings, scores or labels, and generates nothing."""
    return differences.embeds_arg in extra_args or (facts is not None and facts.task == "Embed")


def takes_no_salt(facts: ArtifactFacts | None, extra_args: Sequence[str], differences: EngineDifferences) -> bool:
    """Whether nothing that the engine is for takes a `cache_salt`, which separates prompts in its cache."""
    hears = facts is not None and facts.architecture in names.TRANSCRIBES_ONLY
    return hears or only_embeds(facts, extra_args, differences)


def capabilities(
    facts: ArtifactFacts | None,
    extra_args: Sequence[str],
    *,
    shares_prefixes: bool,
    differences: EngineDifferences,
) -> frozenset[Capability]:
    """What the engine of a Model does. `shares_prefixes`: its tenants share the prefix cache."""
    found = _abilities(facts, extra_args, differences, shares_prefixes=shares_prefixes)
    if facts is not None and facts.architecture in differences.not_transcribed:
        found -= _TRANSCRIBE
    if differences.generating is not None and generates_only(found):
        return found | _SCORE
    if not differences.pairs_score:
        return found
    return found | _SCORE if "rerank" in found else found - _SCORE


def may_read_media(facts: ArtifactFacts) -> bool:
    """Whether some engine reads images, sound or video with such weights, by itself or by an argument."""
    encodes = facts.multimodal or facts.vision_layers is not None
    return encodes or facts.architecture in names.IMAGES_IF_ASKED


def generates_only(found: frozenset[Capability]) -> bool:
    """Whether the Model is known to generate; of one without facts the engine judges whether it embeds."""
    return "generate" in found and "embed" not in found


def _abilities(
    facts: ArtifactFacts | None, extra_args: Sequence[str], differences: EngineDifferences, *, shares_prefixes: bool
) -> frozenset[Capability]:
    """What SGLang does with such a model.

    Scoring and transcribing by a Model that generates go through the prefix cache, and SGLang takes no `cache_salt`
    with them. So they are served only where tenants share the cache or there is none: else one tenant would find
    another's prompts or audio.
    """
    if facts is None or facts.architecture is None:
        return frozenset({"embed"}) if only_embeds(facts, extra_args, differences) else _UNKNOWN
    name = facts.architecture
    if name in names.CLASSIFIES:
        return _with_labels(facts.labels, encoder=name in names.ENCODERS)
    if name in names.REWARDS:
        return frozenset({"score"})
    if only_embeds(facts, extra_args, differences):
        return frozenset({"embed"})
    if name in names.TRANSCRIBES_ONLY:
        return frozenset({"transcribe"})
    if name.endswith("Model"):
        return _UNKNOWN
    if not (shares_prefixes or differences.no_prefix_cache_arg in extra_args):
        return frozenset({"generate"})
    hears = name in names.TRANSCRIBES and differences.reads_media(facts, extra_args)
    return frozenset({"generate", "score", "transcribe"} if hears else {"generate", "score"})


def _with_labels(labels: int | None, *, encoder: bool) -> frozenset[Capability]:
    """An encoder reads query and document as a pair, which /v1/score would join to one text."""
    found: set[Capability] = set() if encoder else {"score"}
    if labels is None or labels == 1:
        found.add("rerank")
    if labels is None or labels > 1:
        found.add("classify")
    return frozenset(found)
