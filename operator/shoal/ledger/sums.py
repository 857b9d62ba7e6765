"""Computes how a request changes the sums of its hour: pure functions from rows to differences."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shoal.core.fields.table import TRANSCRIBE
from shoal.metering.record import StoredRow

HOUR_MS: Final = 3_600_000


class HourKey(NamedTuple):
    """Primary key of `schema.hours`, in order. '' means none."""

    hour: int
    tenant: str
    external_id: str
    key_name: str
    plan: str
    model: str
    adapter: str
    gpu_class: str
    billed: bool


class HourlySums(NamedTuple):
    """The numbers of `schema.hours`, in order."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    unknown_cached_input: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    unknown_requests: int = 0
    estimated_input: int = 0
    documents: int = 0
    images: int = 0
    audio_ms: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0
    accepted_tokens: int = 0


class GatewayKey(NamedTuple):
    """Primary key of `schema.gateways`, in order."""

    gateway: str
    tenant: str


class GatewaySums(NamedTuple):
    """The numbers of `schema.gateways`, in order."""

    requests: int = 0
    tokens: int = 0
    spent: int = 0


Cost = Callable[[HourKey, HourlySums], int]
"""Computes the cost of the sums of one hour, in 10^-12 of the currency."""


def free(key: HourKey, sums: HourlySums) -> int:
    """Costs nothing; used without prices."""
    del key, sums
    return 0


@dataclass(slots=True)
class Changes:
    """Changes of the sums by a transaction."""

    cost: Cost = free
    hours: dict[HourKey, HourlySums] = field(default_factory=dict[HourKey, HourlySums])
    gateways: dict[GatewayKey, GatewaySums] = field(default_factory=dict[GatewayKey, GatewaySums])
    gateways_seen: set[str] = field(default_factory=set[str])
    """Boot ids of gateways that sent records."""

    def __bool__(self) -> bool:
        return bool(self.hours or self.gateways_seen)

    def add(self, row: StoredRow, sign: int = 1) -> None:
        """Adds an ended row; `sign` -1 subtracts it."""
        hour = row.admitted_at - row.admitted_at % HOUR_MS
        billed = row.attempt == 0 and row.count_source != "estimated"
        sums = sums_of(row)
        key = HourKey(
            hour,
            row.tenant,
            row.external_id or "",
            row.key_name,
            row.plan or "",
            row.model,
            row.adapter or "",
            row.gpu_class or "",
            billed,
        )
        self.hours[key] = HourlySums(*_plus(self.hours.get(key, HourlySums()), sums, sign))
        if billed and row.gateway:
            at = GatewayKey(row.gateway, row.tenant)
            own = (sums.requests, sums.input_tokens + sums.output_tokens, self.cost(key, sums))
            self.gateways[at] = GatewaySums(*_plus(self.gateways.get(at, GatewaySums()), own, sign))


def sums_of(row: StoredRow) -> HourlySums:
    """Sums of one row. Unknown counts add nothing to the tokens, and are counted as unknown, except of transcriptions,
    which have seconds in their place. Units that no engine read
    add nothing: they are in the row of a refused request too."""
    given, cached = row.input_tokens, row.cached_tokens
    unknown = given is None and (row.audio_ms is None or row.endpoint != TRANSCRIBE)
    read = row.count_source != "none"
    return HourlySums(
        requests=1 if row.attempt == 0 else 0,
        input_tokens=given or 0,
        # An engine that reports more cached than input tokens would make the uncached part negative.
        cached_tokens=min(cached or 0, given or 0),
        unknown_cached_input=(given or 0) if cached is None else 0,
        output_tokens=row.output_tokens or 0,
        reasoning_tokens=row.reasoning_tokens or 0,
        unknown_requests=1 if unknown and row.attempts > 0 and row.outcome != "rejected" else 0,
        estimated_input=(given or 0) if row.count_source == "estimated" else 0,
        documents=(row.documents or 0) if read else 0,
        images=(row.images or 0) if read else 0,
        audio_ms=(row.audio_ms or 0) if read else 0,
        image_tokens=row.image_tokens or 0,
        audio_tokens=row.audio_tokens or 0,
        accepted_tokens=row.accepted_tokens or 0,
    )


def settle(old: StoredRow | None, new: StoredRow) -> StoredRow | None:
    """The row to keep after `new` arrived; None: keep the old row."""
    if old is None:
        return new
    if new.step <= old.step:
        return None
    # The hour of a request is that of its first row, and must not change with later rows.
    return new._replace(admitted_at=old.admitted_at)


def _plus(old: Iterable[int], new: Iterable[int], sign: int) -> Iterable[int]:
    return (a + sign * b for a, b in zip(old, new, strict=True))
