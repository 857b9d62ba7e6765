"""What a pod and the node cache say to each other, over the unix socket in the namespace's folder of the cache.

`POST /v1/fetch` with a `FetchRequest`: JSON lines of `FetchLine` until one carries `done` or `error`, at least one line
in `LINE_SECONDS`. `GET /v1/hold?model=KEY`: an endless answer with an empty line every `HOLD_SECONDS`; while it is
open, the model is not evicted (404: the namespace's folder does not have it any more). No token: the folder is mounted
in pods of its namespace only, so the socket itself says who asks.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

CACHED_SCHEMES: Final = frozenset({"hf", "s3", "gs", "az", "https"})
"""Sources that are fetched over a network. Others lie on a volume or in an image already."""
LINE_SECONDS: Final = 1.0
HOLD_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 15.0
"""A client that hears nothing for so long takes the connection for dead."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class _Message(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, extra="ignore", frozen=True
    )


class FetchRequest(_Message):
    """What a stage container wants, or an agent of a LoRA adapter."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    revision: Annotated[str, StringConstraints(max_length=128)] | None = None
    """What the source was resolved to when its facts were read; None: what it is now."""
    manifest: Digest | None = None
    """The manifest that it had then: another one is refused."""
    files: tuple[str, ...] = ()
    """Only these of its files, as far as it has them; none named: all that an engine reads. An archive is fetched
    whole."""
    credentials: dict[str, str] = Field(default={}, repr=False, max_length=64)
    """The content of the Secret of `source.secretRef`, of the pod's own namespace, or keys that its ServiceAccount was
    given for an hour. Used for this request only."""
    credentials_given: bool = False
    """Whether the Model names a Secret."""
    credentials_identity: Annotated[str, StringConstraints(max_length=512)] = ""
    """Whose the keys are, for messages, where they are a ServiceAccount's."""


class FetchDone(_Message):
    """The model lies in the namespace's folder."""

    model: str
    """Key by which the model is held."""
    path: str
    """Below the namespace's folder."""
    bytes: int
    fetched_bytes: int
    """What this took from the source; 0: everything was on the node."""
    revision: str | None = None
    digest: Digest | None = None
    """As `Source.digest` defines it."""


class FetchError(_Message):
    """It failed; the stage container fails with the same words."""

    reason: str
    message: str


class FetchLine(_Message):
    """One line of the answer."""

    state: Literal["waiting", "fetching", "verifying", "done", "failed"]
    bytes_done: int = 0
    bytes_total: int | None = None
    done: FetchDone | None = None
    error: FetchError | None = None
