"""Price lists of the ledger: whether those in its folder are in force."""

from collections.abc import Iterator
from datetime import datetime

from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers import faults
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread


def check(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether the ledger refuses its price lists; nothing where no ledger runs."""
    name, prices = "price lists", seen.prices
    if prices is None:
        return
    if isinstance(prices, Unread):
        yield unread(name, Layer.CONTROL, prices)
    elif prices.refused:
        row = faults.FAULTS[faults.PRICES_REFUSED]
        stay = f"those accepted before stay in force ({some(prices.lists)})" if prices.lists else "nothing has a price"
        text = f"the ledger refuses the price lists in its folder, and {stay}: {'; '.join(prices.refused)}"
        yield result(name, "error", faults.PRICES_REFUSED, row.layer, text, row.do)
    elif prices.lists:
        yield ok(name, Layer.CONTROL, f"in force: {some(prices.lists)}")
    else:
        yield ok(name, Layer.CONTROL, "none: usage is counted in tokens, without prices")
