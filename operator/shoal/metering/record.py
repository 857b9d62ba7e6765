"""The usage record, a CloudEvent 1.0, one per accepted request: the single definition of its fields.

`UsageData` has each field with its type and meaning. `StoredRow` names the fields that the ledger keeps in columns: the
parser (`ledger/parse.py`) and the table (`ledger/schema.py`) are derived from it. A new field needs a line in each
class and a line in `meter.py` that measures it; a new column also needs a migration.

A request's rows in the spool have an id and a kind: `open` at admission, `checkpoint` while it streams, `final` at the
end, whatever happened. Token counts are the engine's own; None means unknown, unlike an explicit 0.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

EVENT_TYPE = "dev.shoal.usage.v1"

RecordKind = Literal["open", "checkpoint", "final", "attempt"]
"""attempt: a failed attempt that computed tokens and whose answer was not delivered; never billed to the tenant."""
Outcome = Literal["answered", "rejected", "cancelled", "failed", "refused", "expired", "cut"]
"""answered: the whole answer of the engine was sent. rejected: the engine's own 4xx was sent. cancelled: the client
left. failed: the engine was lost after the first byte. refused: no replica could serve the request (503 with
Retry-After, or an error event with retry_after if comments of the stream were already sent). expired: the same as
refused, after the longest time that a request may wait. cut: the gateway died; its open row was closed at the next
start."""
AudioSource = Literal["measured", "engine"]
"""Where the length of audio comes from: measured in the file by the gateway, exact to a millisecond; or the engine's
whole seconds, rounded up."""
CountSource = Literal["final", "continuous", "estimated", "none"]
"""Where the counts come from: the engine's closing usage block, its last running usage before a cut, Shoal's estimate
of a prompt that an engine took without reporting usage, or none (no engine had the request)."""


_POD: Final = re.compile(r"[a-z0-9][-.a-z0-9]{0,252}")


def gateway_boot(pod: str, start: str) -> str:
    """Boot id of a gateway: `<pod>/<start>`, or `start` alone if the pod is unknown. `start` is random per start of the
    process and contains no `/`. So each row names the pod that wrote it, and the ledger can compare that with the pod
    that sends it (`ledger/ownrows.py`)."""
    return f"{pod}/{start}" if _POD.fullmatch(pod) else start


def pod_and_start(boot: str) -> tuple[str, str]:
    """The pod and the start in a gateway's boot id; the pod is empty if the id has none."""
    pod, _, start = boot.rpartition("/")
    return pod, start


class UsageData(BaseModel):
    """`data` of the event."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, frozen=True)

    request_id: str
    client_request_id: str | None = None
    """The client's own x-request-id, if it sent a usable one."""
    kind: RecordKind
    tenant: str
    external_id: str | None = None
    key_name: str
    plan: str | None = None
    """The tenant's plan, which selects the prices."""
    gateway: str | None = None
    """Boot id of the gateway (`gateway_boot`): the ledger's totals state how much of each gateway's own counters they
    contain."""
    admitted_at: datetime | None = None
    """When the request was accepted; it determines the hour and the month in which the request is counted."""
    attempt: int | None = None
    """Only in an attempt row: number of the attempt, from 1."""
    endpoint: str
    """Path of the API, such as /v1/chat/completions."""
    model: str
    """namespace/name of the Model."""
    adapter: str | None = None
    """namespace/name of the LoRAAdapter that was asked for; None: the Model itself."""
    adapter_revision: str | None = None
    """Digest of the adapter's files that served the request, or would have served it."""
    model_requested: str
    """Value of `model` in the client's request."""
    route: str | None = None
    """namespace/name of the ModelRoute that chose the model or adapter; None: the request named it."""
    mirror_of: str | None = None
    """Only in an attempt row: id of the request of which this was a copy for a route's mirror."""
    stream: bool
    outcome: Outcome | None = None
    """Only in a final row."""
    status: int | None = None
    """HTTP status that the client got."""
    input_tokens: int | None = None
    """Includes cached tokens."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """Includes reasoning tokens."""
    reasoning_tokens: int | None = None
    image_tokens: int | None = None
    """Part of the input tokens, as the following. None: the engine does not tell."""
    audio_tokens: int | None = None
    accepted_tokens: int | None = None
    """Part of the output tokens: tokens of drafts that the model accepted (speculative decoding)."""
    documents: int | None = None
    """Texts that the client wanted read together with its query, each a sequence of its own: the documents of
    /v1/rerank, the items of /v1/score. None on other endpoints."""
    images: int | None = None
    """Images in the request. None: no image."""
    audio_ms: int | None = None
    """Length of the audio to be transcribed, or of all sounds in a chat, in milliseconds. None: there is none, or the
    length of one is not known."""
    audio_source: AudioSource | None = None
    count_source: CountSource = "none"
    attempts: int = 0
    """Number of replicas that the request was sent to."""
    hold_ms: float | None = None
    """Time that the request waited in the gateway for a replica; None: it did not."""
    replica: str | None = None
    """namespace/pod that answered."""
    node: str | None = None
    gpu_class: str | None = None
    engine_boot: str | None = None
    ttft_ms: float | None = None
    """From acceptance to the first body byte of the answer."""
    duration_ms: float | None = None


class UsageRecord(BaseModel):
    """A CloudEvent. (source, id) is unique: the ledger deduplicates by it, in the transaction of the write."""

    model_config = ConfigDict(frozen=True)

    specversion: Literal["1.0"] = "1.0"
    id: str
    """<request id>:<kind> for open and final rows, <request id>:checkpoint:<n> and <request id>:attempt:<n>."""
    source: str
    """Names the installation, never a pod: a row that is shipped again must keep its key. The pod that wrote the row is
    in `data.gateway`."""
    type: str = EVENT_TYPE
    subject: str
    """The tenant."""
    time: datetime
    data: UsageData


@dataclass(frozen=True, slots=True)
class Stored:
    """Properties of a column in addition to its Python type."""

    small: bool = False
    """An int of 32 bits suffices."""
    comment: str | None = None


class StoredRow(NamedTuple):
    """A row of the ledger's table `usage`, in the order of its columns. The fields after `admitted_at` are copied from
    `UsageData`, under the same names."""

    source: str
    request: str
    attempt: Annotated[int, Stored(small=True, comment="0: the request itself; else the try that is not billed")]
    step: Annotated[int, Stored(comment="how far it is; only a higher one replaces it (parse.py)")]
    ended: Annotated[bool, Stored(comment="false: open, with the counts of its last checkpoint")]
    received_at: Annotated[int, Stored(comment="when something was heard of it last")]
    admitted_at: int
    tenant: str
    external_id: str | None
    key_name: str
    plan: str | None
    gateway: str | None
    model: str
    adapter: str | None
    adapter_revision: str | None
    model_requested: str
    endpoint: str
    stream: bool
    outcome: str | None
    status: Annotated[int | None, Stored(small=True)]
    count_source: str
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    gpu_class: str | None
    node: str | None
    replica: str | None
    engine_boot: str | None
    ttft_ms: float | None
    hold_ms: float | None
    duration_ms: float | None
    attempts: Annotated[int, Stored(small=True, comment="replicas that the request was sent to")]
    documents: Annotated[int | None, Stored(comment="of /v1/rerank; items of /v1/score")]
    images: int | None
    audio_ms: Annotated[int | None, Stored(comment="length of the audio")]
    audio_source: str | None
    image_tokens: Annotated[int | None, Stored(comment="of input_tokens")]
    audio_tokens: Annotated[int | None, Stored(comment="of input_tokens")]
    accepted_tokens: Annotated[int | None, Stored(comment="of output_tokens: of drafts")]
    route: Annotated[str | None, Stored(comment="namespace/name of the ModelRoute that chose the model")]


_COPIED: Final = StoredRow._fields[StoredRow._fields.index("admitted_at") + 1 :]
_copied: Final = attrgetter(*_COPIED)


def stored(
    record: UsageRecord, *, attempt: int, step: int, ended: bool, received_at: int, admitted_at: int
) -> StoredRow:
    """Builds the row of a record. Times are milliseconds since 1970 (UTC)."""
    copied: tuple[Any, ...] = _copied(record.data)
    return StoredRow(record.source, record.data.request_id, attempt, step, ended, received_at, admitted_at, *copied)


class RecordColumn(NamedTuple):
    """A column of the table `usage`, without any database's terms."""

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    nullable: bool
    stored: Stored


def columns() -> Iterator[RecordColumn]:
    """The columns of `StoredRow`, in order."""
    for name, hint in get_type_hints(StoredRow, include_extras=True).items():
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        plain = get_args(hint)[0] if marks else hint
        kinds = [kind for kind in get_args(plain) or (plain,) if kind is not NoneType]
        yield RecordColumn(name, kinds[0], NoneType in get_args(plain), marks[0] if marks else Stored())
