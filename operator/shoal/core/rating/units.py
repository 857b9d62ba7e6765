"""Units beside tokens that a price list may price: the one table of them.

Counts are whole numbers. Audio is counted in milliseconds and priced by the second, so that no length is rounded.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Unit:
    """A kind of unit. Everything that rates, sums or prints units goes through `UNITS`."""

    count: str
    """Its count in `BilledCounts` and `HourlySums`, and its price per count in `Rate`."""
    price: str
    """Its field in a price list: the price of a million of them."""
    meter: str
    """Its name in FOCUS."""
    per: int
    """How many counts one of them has."""


UNITS: Final = (
    Unit("documents", "documents", "Documents", 1),
    Unit("images", "images", "Images", 1),
    Unit("audio_ms", "audioSeconds", "Audio Seconds", 1000),
)


def quantity(unit: Unit, count: int) -> str:
    """The count in units, without rounding: 3200 milliseconds of audio are 3.2 seconds."""
    whole, rest = divmod(count, unit.per)
    fraction = str(rest).rjust(len(str(unit.per)) - 1, "0").rstrip("0")
    return f"{whole}.{fraction}" if fraction else str(whole)
