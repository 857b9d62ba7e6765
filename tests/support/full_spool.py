"""Requests until a spool's room is used up."""

from shoal.metering.spool import SpoolUnavailable, UsageSpool
from tests.support.records import meter


async def fill(spool: UsageSpool, most: int = 200_000) -> int:
    """Keeps requests until the spool is full; returns how many were taken."""
    for n in range(most):
        if spool.error is not None:
            return n
        it = meter(f"fill-{n}")
        it._base["modelRequested"] = "x" * 4_000
        try:
            await spool.commit(it.open_row())
        except SpoolUnavailable:
            return n
        it.outcome = "answered"
        spool.put(it.final_row())
        if n % 20 == 0:
            spool.check()
    raise AssertionError("it never became full")
