"""The usage record: one per accepted request, a CloudEvent 1.0 (gateway.md, section 1).

Rows of the spool are (id, kind): `open` at admission, `checkpoint` while it streams, `final` at the end, whatever
happened. Token counts are the engine's own; None is "unknown", which an explicit 0 is not.
"""

import re
from datetime import datetime
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

EVENT_TYPE = "dev.shoal.usage.v1"

RecordKind = Literal["open", "checkpoint", "final", "attempt"]
"""attempt: a try at a replica that computed tokens and whose answer nobody got; never billed to the tenant."""
Outcome = Literal["answered", "rejected", "cancelled", "failed", "refused", "expired", "cut"]
"""answered: the engine's answer went out whole. rejected: the engine's own 4xx went out. cancelled: the client left.
failed: the engine was lost after the first byte. refused: no replica could serve (503 with Retry-After; after
comments of a stream an error event with retry_after). expired: the same, after it had waited as long as it may. cut:
the gateway died; its open row was closed at the next start."""
CountSource = Literal["final", "continuous", "estimated", "none"]
"""Where the counts come from: the engine's closing usage block, its last running usage before a cut, our estimate of a
prompt that an engine took and of which it said nothing, or nowhere (no engine had the request)."""


_POD: Final = re.compile(r"[a-z0-9][-.a-z0-9]{0,252}")


def gateway_boot(pod: str, start: str) -> str:
    """Boot id of a gateway: `<pod>/<start>`, or `start` alone where it does not know its pod. `start` is random per
    start of its process and has no `/`. So each row says which pod wrote it, and the ledger can hold that against the
    pod that sends it (`ledger/ownrows.py`)."""
    return f"{pod}/{start}" if _POD.fullmatch(pod) else start


def pod_and_start(boot: str) -> tuple[str, str]:
    """Of a gateway's boot id; the pod is empty where it says none."""
    pod, _, start = boot.rpartition("/")
    return pod, start


class UsageData(BaseModel):
    """`data` of the event."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, frozen=True)

    request_id: str
    client_request_id: str | None = None
    """The client's own x-request-id, where it sent a usable one."""
    kind: RecordKind
    tenant: str
    external_id: str | None = None
    key_name: str
    plan: str | None = None
    """Of the tenant: which prices count."""
    gateway: str | None = None
    """Boot id of the gateway (`gateway_boot`): the ledger's totals say how much of each gateway's own counters they
    contain."""
    admitted_at: datetime | None = None
    """When the request was accepted; the hour and the month that it is counted in."""
    attempt: int | None = None
    """Only in an attempt row: which try it was, from 1."""
    endpoint: str
    """Path of the API, such as /v1/chat/completions."""
    model: str
    """namespace/name of the Model."""
    adapter: str | None = None
    """namespace/name of the LoRAAdapter that was asked for; None: the Model itself."""
    adapter_revision: str | None = None
    """Digest of the adapter's files that answered, or would have."""
    model_requested: str
    """What the client put in `model`."""
    stream: bool
    outcome: Outcome | None = None
    """Only in a final row."""
    status: int | None = None
    """HTTP status that the client got."""
    input_tokens: int | None = None
    """Includes cached ones."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """Includes reasoning ones."""
    reasoning_tokens: int | None = None
    count_source: CountSource = "none"
    attempts: int = 0
    """Replicas that the request was sent to."""
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
    """A CloudEvent. (source, id) is unique: dedupe by it, in the transaction of the write."""

    model_config = ConfigDict(frozen=True)

    specversion: Literal["1.0"] = "1.0"
    id: str
    """<request id>:<kind> for open and final rows, <request id>:checkpoint:<n> and <request id>:attempt:<n>."""
    source: str
    """Names the installation, never a pod: whoever ships a row again must keep the key. Which pod wrote it is in
    `data.gateway`."""
    type: str = EVENT_TYPE
    subject: str
    """The tenant."""
    time: datetime
    data: UsageData
