"""What differs between engines in one request and its answer.

A gateway chooses the wire per attempt, by the replica: during a rollout from one engine to the other a Model has
replicas of both. It prepares one body per request, in SGLang's words and with `model` as its first member; a wire makes
the engine's body of it by a few edits of bytes, without decoding it again. `wires.py` has the wires by type of engine.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

from shoal.core.enginedifferences import EngineDifferences

Elsewhere = Literal["adapter", "unavailable", "lost", "unsupported", "wrong_model", "endpoint"]
"""Why a request should be sent to another replica: this one does not have the adapter; does not take requests; died
under it; does not know a field of it; answered with another model than the one asked for; does not serve the
endpoint."""
NO_ENDPOINT: Final = "endpoint"
"""The engine does not serve the endpoint, and neither does another one of its type and version."""


class SpeculatedAnswers(NamedTuple):
    """The answers that an engine with speculation is asked for in one request."""

    prompts: int
    choices: int
    """Answers to each prompt."""


class AcceptedDrafts(NamedTuple):
    """What an answer said of guessed tokens."""

    rest: bytes
    """The answer or event without it; empty: the event had nothing else."""
    tokens: int | None
    """Guessed tokens that were accepted, of all answers together; None: of some of them it is unknown."""


ReadAcceptedDrafts = Callable[[bytes], AcceptedDrafts | None]
"""Reads an event without usage, or a whole answer. None: it says nothing of guessed tokens."""


class EngineCall(NamedTuple):
    """One attempt to send a request to an engine."""

    endpoint: str
    """Path that the gateway names the endpoint by."""
    model: str
    """The engine's name of the base model."""
    adapter: str | None
    """The engine's name of the adapter; None: the base model answers."""
    id: str
    """The request's id."""
    number: int
    """1 for the first attempt."""
    added: bytes = b""
    """Members of the body in this engine's own words (`Wire.added`)."""
    speculated: SpeculatedAnswers | None = None
    """The Model sets `spec.engine.speculation`; None: it does not."""


class NotHere(Exception):
    """Another replica may answer the request; the client got nothing yet."""

    def __init__(self, reason: Elsewhere) -> None:
        super().__init__(reason)
        self.reason: Elsewhere = reason


class AnswerGarbled(Exception):
    """An answer that is none of this endpoint."""


class Rewriter(Protocol):
    """Restores in an answer what the client knows: its own name of the model, and the request's id."""

    @property
    def same(self) -> bool:
        """Nothing has to be changed."""
        ...

    def rewrite(self, data: bytes) -> bytes:
        """An event, or a whole answer. Raises NotHere where the first one names another model than the one asked
        for."""
        ...

    def rewrite_any(self, data: bytes) -> bytes:
        """A whole answer without text of the client or of the model, whose name of the model may be any."""
        ...


class Ranking(NamedTuple):
    """What the client wants of a ranked list."""

    model_name: str
    top_n: int | None
    """None: all."""
    documents: bool
    """With the texts."""
    pairs: int
    """Texts that were sent, each with the query."""

    def complete(self, indices: Iterable[object]) -> None:
        """Raises AnswerGarbled where the answer does not have one result for each pair."""
        check_results(indices, self.pairs)


def check_results(indices: Iterable[object], texts: int) -> None:
    """Raises AnswerGarbled where the indices of an answer's results are not those of all texts, each once: clients
    pair results with texts by them, and all texts are billed."""
    found = list(indices)
    numbers = [index for index in found if type(index) is int]
    if len(numbers) != len(found) or sorted(numbers) != list(range(texts)):
        raise AnswerGarbled("The engine's answer does not have one result for each text that was sent.")


class Wire(Protocol):
    """How one kind of engine is asked, and what its answers mean."""

    @property
    def type(self) -> str:
        """`Model.spec.engine.type`."""
        ...

    @property
    def provider(self) -> str:
        """`gen_ai.provider.name` in traces."""
        ...

    @property
    def ready_path(self) -> str:
        """Answers 200 to a GET while the engine serves."""
        ...

    @property
    def aborts(self) -> bool:
        """Whether the engine ends a request by its id, and then answers with what it counted."""
        ...

    @property
    def paths(self) -> Mapping[str, str]:
        """Path in the engine, by endpoint; an endpoint without one is not served."""
        ...

    @property
    def salted(self) -> frozenset[str]:
        """Endpoints on which a `cache_salt` separates the prompts of tenants in the engine's cache."""
        ...

    @property
    def differences(self) -> EngineDifferences:
        """Where a Model of this engine does less than the field table and the capabilities say."""
        ...

    @property
    def special(self) -> Mapping[str, frozenset[str]]:
        """By endpoint: the fields that `added` reads."""
        ...

    @property
    def reshaped(self) -> frozenset[str]:
        """Endpoints whose whole answers `reshape` changes."""
        ...

    def added(self, endpoint: str, fields: Mapping[str, Any]) -> bytes | None:
        """What a checked body's fields are called in this engine, as members of an object; None: the engine cannot do
        what they ask for. Called once per request."""
        ...

    def path(self, call: EngineCall) -> str:
        """Path in the engine for one attempt: that of `paths`, or another one that does the same."""
        ...

    def encode(self, body: bytes, call: EngineCall) -> bytes:
        """The engine's body. Called for each attempt."""
        ...

    def sent_id(self, call: EngineCall) -> bytes | None:
        """The id by which the engine knows the attempt and which its answer has, if it is not the request's own."""
        ...

    def rewriter(self, call: EngineCall, model_name: str) -> Rewriter:
        """For the answer to one attempt; `model_name` is the client's name of the model."""
        ...

    def accepted_drafts(self, call: EngineCall) -> ReadAcceptedDrafts | None:
        """How the answer to one attempt says which guessed tokens were accepted; None: `encode` did not ask for it."""
        ...

    def elsewhere(self, status: int, error: bytes, adapter: bool) -> str | None:
        """What an error of the engine says besides being one: a reason of `Elsewhere`, or None: it is the client's.
        `adapter`: the request is for one."""
        ...

    def plain_error(self, error: bytes) -> bytes:
        """An error that is the client's, without the engine's own way of writing."""
        ...

    def reshape(self, call: EngineCall, answer: object, ranking: Ranking) -> tuple[dict[str, Any], int | None]:
        """A decoded answer of an endpoint in `reshaped` as the client gets it, and the prompt tokens that it counts
        (None: it counts none). Raises AnswerGarbled."""
        ...


Accepts = Callable[[Any], bool]
"""Whether an engine does what a value of a field asks for."""
