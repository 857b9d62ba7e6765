"""Kubernetes Quantities, exactly: money and memory are never floats."""

import re
from decimal import Decimal
from typing import Final

_SUFFIXES: Final[dict[str, Decimal]] = {
    "": Decimal(1),
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}
_QUANTITY: Final = re.compile(
    # Two digits of an exponent are enough for everything that Kubernetes has room for.
    r"^([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([numkMGTPE]|[KMGTPE]i)?$"
)
MOST: Final = 2**63 - 1
"""As in Kubernetes, whatever the unit."""
_LONGEST: Final = 64
_GI: Final = 2**30
_MI: Final = 2**20


def parse(quantity: str | int | float) -> Decimal:
    """The number that a Quantity stands for. Raises ValueError, also for one that Kubernetes has no room for: what is
    computed from it must not grow with an exponent."""
    text = str(quantity).strip()
    match = _QUANTITY.match(text) if len(text) <= _LONGEST else None
    if match is None:
        told = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        raise ValueError(f"{told!r} is not a quantity: write a number with a unit such as 500m, 80Gi or 2.5")
    found = Decimal(match[1]) * _SUFFIXES[match[2] or ""]
    if abs(found) > MOST:
        raise ValueError(f"{text!r} is too large for a quantity: the most is {MOST}")
    return found


def count(quantity: str | int) -> int:
    """A Quantity of whole things, such as GPUs; a fraction counts as the next lower number. Raises ValueError."""
    return int(parse(quantity))


def money(amount: Decimal) -> str:
    """An amount without exponent and without trailing zeros."""
    return f"{amount.normalize():f}" if amount else "0"


def cpu(amount: Decimal) -> str:
    """As the API server writes CPUs: whole cores, or millicores."""
    return str(int(amount)) if amount == int(amount) else f"{int(amount * 1000)}m"


def memory(amount: Decimal) -> str:
    """As the API server writes memory: the largest binary unit that leaves a whole number, at most Gi."""
    size = int(amount)
    if size and size % _GI == 0:
        return f"{size // _GI}Gi"
    return f"{size // _MI}Mi" if size and size % _MI == 0 else str(size)
