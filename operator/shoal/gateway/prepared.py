"""What is known of a request once its body was checked, without the body itself."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from shoal.api.replica import MOST_PROMPTS
from shoal.core.advice.marks import Marks
from shoal.core.fields.table import GENERATING
from shoal.core.nativeapi import NativeApi
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.routes import TargetRef
from shoal.engine.wires import wire_of
from shoal.gateway.dialects import Dialect

COMPLETIONS: Final = "/v1/completions"
_NOTHING: Final[Mapping[str, bytes | None]] = MappingProxyType({})


class Prepared(NamedTuple):
    """The request's properties without its body; small, because the request may have to wait."""

    path: str
    """Of the engine."""
    model_name: str
    """The body's `model` field."""
    stream: bool
    wants_usage: bool
    wants_continuous: bool
    model: ServedModel
    answer_bound: int | None
    """Longest answer in tokens that the client allows."""
    choices: int
    priority: int
    """The tenant's weight in the hold queue."""
    prompts: int = 1
    """Number of prompts; each gets `choices` answers."""
    prompt: Prompt | None = None
    """What the choice of a replica goes by; None: there is no choice, or no prompt."""
    dialect: Dialect | None = None
    """The client speaks another API, into which the answer is translated."""
    native: NativeApi | None = None
    """The client speaks another API that the external target serves itself; `path` is then the client's."""
    content_type: str = "application/json"
    """Of the engine's body."""
    top_n: int | None = None
    """Documents that the client wants of a ranked list; None: all."""
    documents: bool = True
    """The ranked list has the texts."""
    texts: int = 0
    """Texts that each have a result in the answer: documents, items, inputs of an embedding or a classification."""
    plain: bool = False
    """A transcript is wanted as a text alone."""
    added: Mapping[str, bytes | None] = _NOTHING
    """What the body has in addition for engines of a type (`Wire.added`)."""
    salted: bool = False
    """Only engines that read the body's `cache_salt` get it (`Wire.salted`)."""
    media: bool = False
    """It has images or sounds: only engines that read them get it (`Replica.reads_media`)."""
    target: TargetRef | None = None
    """The target that a route chose; None: the body names the model or adapter itself."""
    marks: Marks | None = None
    """Of the prompt, for advice (core/advice/marks.py); None: the prompt is not understood, or none are kept."""

    def suits(self, replica: Replica) -> bool:
        """Whether the replica's engine does what the request asks for, as far as is known."""
        wire = wire_of(replica.engine)
        if wire is None or self.path not in wire.paths or self.added.get(wire.type, b"") is None:
            return False
        if self.salted and self.path not in wire.salted:
            return False
        return replica.reads_media or not self.media

    @property
    def meaning(self) -> str | TargetRef:
        """What stands for the model or adapter, when it is looked up again after a wait. A route is not asked again:
        the request is one for its target."""
        return self.model_name if self.target is None else self.target

    @property
    def head(self) -> int | None:
        """Hash of the prompt's head (core/routing/affinity.py)."""
        return None if self.prompt is None else self.prompt.head

    @property
    def can_cancel(self) -> bool:
        """Whether the engine knows the request by ids that the gateway set. Where nothing is
        generated it has none, and for multiple answers to a prompt SGLang generates its own."""
        return self.choices == 1 and self.prompts <= MOST_PROMPTS and self.path in GENERATING
