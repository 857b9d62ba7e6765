"""Protocol between pods and the node cache, over the unix socket in the namespace's folder of the cache.

`POST /v1/fetch` with a `FetchRequest`: answered with JSON lines (`FetchLine`), at least one every `LINE_SECONDS`, until
a line carries `done` or `error`. `GET /v1/hold?model=KEY`: an endless response with an empty line every `HOLD_SECONDS`.
The model is not evicted while the response is open; 404 when the namespace's folder no longer contains the model. There
is no token: the folder is mounted in pods of its namespace only, so the socket identifies the namespace of the caller.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

CACHED_SCHEMES: Final = frozenset({"hf", "s3", "gs", "az", "https"})
"""Sources that are fetched over the network. Other sources are already on a volume or in an image."""
LINE_SECONDS: Final = 1.0
HOLD_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 15.0
"""A client drops a connection on which nothing arrives for this long."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class _Message(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, extra="ignore", frozen=True
    )


class FetchRequest(_Message):
    """A fetch for a stage container, or for an agent that stages a LoRA adapter."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    revision: Annotated[str, StringConstraints(max_length=128)] | None = None
    """Revision that the source was resolved to when its facts were read; None: the current one."""
    manifest: Digest | None = None
    """Manifest of that revision. A source with another manifest is refused."""
    files: tuple[str, ...] = ()
    """Fetches only these files, where they exist; empty: all files that an engine reads. An archive is always fetched
    whole."""
    credentials: dict[str, str] = Field(default={}, repr=False, max_length=64)
    """Content of the Secret in `source.secretRef`, or keys that were issued to the pod's ServiceAccount for one hour.
    They are used for this request only."""
    credentials_given: bool = False
    """Whether the Model names a Secret."""
    credentials_identity: Annotated[str, StringConstraints(max_length=512)] = ""
    """Identity of the ServiceAccount that the keys were issued to, for messages."""


class FetchDone(_Message):
    """The model is complete in the namespace's folder."""

    model: str
    """Key for `GET /v1/hold`."""
    path: str
    """Path relative to the namespace's folder."""
    bytes: int
    fetched_bytes: int
    """Bytes fetched from the source; 0: the node already had all files."""
    revision: str | None = None
    digest: Digest | None = None
    """Digest as defined by `Source.digest`."""


class FetchError(_Message):
    """The fetch failed. The stage container fails with the same reason and message."""

    reason: str
    message: str


class FetchLine(_Message):
    """One line of the response."""

    state: Literal["waiting", "fetching", "verifying", "done", "failed"]
    bytes_done: int = 0
    bytes_total: int | None = None
    done: FetchDone | None = None
    error: FetchError | None = None
