"""Whether a row is the sender's own: pure.

A row names its gateway by a boot id that begins with the pod (`usage.gateway_boot`), and the ledger knows from which
pod a batch comes (`senders.py`). So a pod may send what names itself, whichever of its processes wrote it: after a
restart on its volume it ships what its predecessor left. A row of before says a bare boot id; it becomes the sender's.

`source` is not bound. It names the installation and may have been another one when the row was written; a row with
another source has another key, so it can neither replace nor hide anybody else's.
"""

import re
from typing import Final

from shoal.ledger.parse import Good, Incoming, bad
from shoal.metering.record import pod_and_start

NOT_ITS_OWN: Final = "not the sender's own row"
_SENT: Final = re.compile(r"sent by ([-.a-z0-9]+): (.*)", re.DOTALL)


def bound(record: Incoming, pod: str) -> Incoming:
    """The record as one that `pod` sent: `Bad` where it is not that pod's own."""
    if not isinstance(record, Good):
        return bad(quarantine_reason(record.reason, pod), record.body)
    row = record.row
    said, start = pod_and_start(row.gateway or "")
    if said and said != pod:
        return _foreign(record, pod, f"it says that it is of {said}")
    # Whoever had the id of another gateway's row first would keep that one out.
    begins = f"{row.request}:{record.kind}"
    number = record.id.removeprefix(f"{begins}:")
    numbered = record.kind in ("checkpoint", "attempt") and number.isascii() and number.isdigit()
    if record.id != (f"{begins}:{number}" if numbered else begins):
        return _foreign(record, pod, f"its id is {record.id[:200]}, which is not of request {row.request[:200]}")
    return record._replace(row=row._replace(gateway=f"{pod}/{start}"), sender=pod)


def claimed(record: Good, owner: str | None) -> Incoming:
    """The record as one of a request whose first row came from the gateway `owner` (a boot id; None: none is known):
    `Bad` where a proven sender is another one."""
    if record.sender is None or owner is None:
        return record
    pod, start = pod_and_start(owner)
    # A first row that came without a proof, before an upgrade, names a bare boot id: then that must be the same.
    if pod == record.sender if pod else start == pod_and_start(record.row.gateway or "")[1]:
        return record
    return _foreign(record, record.sender, f"its request is of gateway {owner[:200]}")


def quarantine_reason(reason: str, pod: str | None) -> str:
    """Why a record is kept aside, with the pod that sent it, where that is proven."""
    return reason if pod is None else f"sent by {pod}: {reason}"


def sender_of(reason: str) -> tuple[str | None, str]:
    """The two of `aside_reason`."""
    found = _SENT.fullmatch(reason)
    return (None, reason) if found is None else (found[1], found[2])


def _foreign(record: Good, pod: str, why: str) -> Incoming:
    return bad(quarantine_reason(f"{NOT_ITS_OWN}: {why}", pod), record.body)
