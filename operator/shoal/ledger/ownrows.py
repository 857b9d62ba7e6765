"""Checks that a record belongs to its sender. Pure functions.

A record names its gateway by a boot id that begins with the pod's name (`usage.gateway_boot`), and the ledger knows the
pod that sends a batch (`records.Senders`). A pod may send records of any process of this pod: after a restart it sends
the records that its previous process left on the volume. A record of version 0.1 has a boot id without a pod; it is
attributed to the sender.

`source` is not checked. It names the installation, and may have been changed after the record was written. A record
with another source has another key, so it can neither replace nor hide another record.
"""

import re
from typing import Final

from shoal.ledger.parse import Good, Incoming, bad
from shoal.metering.record import pod_and_start

NOT_ITS_OWN: Final = "not the sender's own row"
_SENT: Final = re.compile(r"sent by ([-.a-z0-9]+): (.*)", re.DOTALL)


def bound(record: Incoming, pod: str) -> Incoming:
    """The record, or `Bad` if it does not belong to `pod`."""
    if not isinstance(record, Good):
        return bad(quarantine_reason(record.reason, pod), record.body)
    row = record.row
    said, start = pod_and_start(row.gateway or "")
    if said and said != pod:
        return _foreign(record, pod, f"it says that it is of {said}")
    # Otherwise a sender could reserve the id of another gateway's record and keep that record out.
    begins = f"{row.request}:{record.kind}"
    number = record.id.removeprefix(f"{begins}:")
    numbered = record.kind in ("checkpoint", "attempt") and number.isascii() and number.isdigit()
    if record.id != (f"{begins}:{number}" if numbered else begins):
        return _foreign(record, pod, f"its id is {record.id[:200]}, which is not of request {row.request[:200]}")
    return record._replace(row=row._replace(gateway=f"{pod}/{start}"), sender=pod)


def claimed(record: Good, owner: str | None) -> Incoming:
    """The record, or `Bad` if its verified sender is not `owner`, the gateway (boot id; None: unknown) of the request's
    first row."""
    if record.sender is None or owner is None:
        return record
    pod, start = pod_and_start(owner)
    # A first row without verification, from before an upgrade, has a boot id without a pod, which must then be equal.
    if pod == record.sender if pod else start == pod_and_start(record.row.gateway or "")[1]:
        return record
    return _foreign(record, record.sender, f"its request is of gateway {owner[:200]}")


def quarantine_reason(reason: str, pod: str | None) -> str:
    """Reason for the quarantine, with the sending pod if it was verified."""
    return reason if pod is None else f"sent by {pod}: {reason}"


def sender_of(reason: str) -> tuple[str | None, str]:
    """Splits a `quarantine_reason` into pod and reason."""
    found = _SENT.fullmatch(reason)
    return (None, reason) if found is None else (found[1], found[2])


def _foreign(record: Good, pod: str, why: str) -> Incoming:
    return bad(quarantine_reason(f"{NOT_ITS_OWN}: {why}", pod), record.body)
