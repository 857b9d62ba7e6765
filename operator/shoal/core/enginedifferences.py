"""Where an engine differs from the field table (`fields/`), the capabilities and the facts of weights, all of which
follow SGLang; and which of its arguments decide what a Model can do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from shoal.api.artifact import ArtifactFacts


def _no_switch(args: Sequence[str]) -> bool | None:
    return None


@dataclass(frozen=True, slots=True, eq=False)
class EngineDifferences:
    """What an engine does otherwise than the tables say."""

    fields: Mapping[str, Mapping[str, Callable[[Any], bool]]] = field(default_factory=lambda: MappingProxyType({}))
    """By endpoint and field: whether the engine does what a value asks for. It would ignore any other value, and the
    client would take the answer for what it asked for."""
    pairs_score: bool = False
    """/v1/score of a Model that generates nothing reads query and item as a pair, as a reranker does: only Models that
    rerank serve it."""
    generating: "EngineDifferences | None" = None
    """The same for Models that generate, where that is another; they score by tokens then, also where tenants do
    not share the prefix cache."""
    most_scored_bytes: int | None = None
    """/v1/score by tokens is asked of the engine with the query written out before each item, at most so many bytes;
    None: the engine does that itself."""
    not_transcribed: frozenset[str] = frozenset()
    """Architectures with which it does not transcribe, though SGLang does."""
    reads_images: frozenset[str] = frozenset()
    """Architectures with which it reads images by itself, though SGLang does so only with an argument."""
    media_switch: Callable[[Sequence[str]], bool | None] = _no_switch
    """Whether arguments switch images, sound and video on or off; None: they do neither."""
    embeds_arg: str | None = None
    """Argument of a Model that makes the engine embed instead of generate; None: a Model can give none."""
    no_prefix_cache_arg: str | None = None
    """Argument of a Model that switches the prefix cache off."""
    deterministic_args: tuple[str, ...] = ()
    """Beginnings of arguments that make it give the same answer each time."""
    free_parsers: frozenset[str] = frozenset()
    """Parsers of tool calls with which it makes no grammar of the schemas of tools, unless a call is forced or a tool
    is `strict`."""
    strict_settings: tuple[str, ...] = ()
    """Beginnings of arguments and names of environment variables that can make each tool `strict`."""

    def compiles_tools(self, parser: str | None, settings: Iterable[str]) -> bool:
        """Whether it may make a grammar of the schemas of tools where no call is forced and no tool is `strict`.
        `settings`: its arguments, and the names of its environment variables."""
        strict = any(setting.startswith(self.strict_settings) for setting in settings)
        return strict or parser not in self.free_parsers

    def reads_media(self, facts: ArtifactFacts | None, args: Sequence[str]) -> bool | None:
        """Whether it reads images, sound or video with such weights and arguments. Capabilities and sizing both follow
        this. None: the weights are unknown, and the arguments switch nothing."""
        switched = self.media_switch(args)
        if facts is None:
            return switched
        if switched is None:
            return facts.multimodal or facts.architecture in self.reads_images
        # `multimodal` is False where SGLang reads images only if asked to. The encoder shows that it can.
        return switched and (facts.multimodal or facts.vision_layers is not None)

    @property
    def salts_scores(self) -> bool:
        """Tenants may score by tokens because a `cache_salt` separates them, not because they share the cache."""
        return self.most_scored_bytes is not None


NONE: Final = EngineDifferences()
