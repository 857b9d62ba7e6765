"""Kubernetes quantities, as far as a node computes with them."""

import math
from fractions import Fraction

_SUFFIXES = {
    "m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "P": Fraction(10**15), "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30),
    "Ti": Fraction(2**40), "Pi": Fraction(2**50),
}  # fmt: skip


def parse(text: str) -> Fraction:
    """`1500m`, `16Gi`, `1e3`. Raises ValueError."""
    number = text.rstrip("kmKMGTPi")
    suffix = text[len(number) :]
    if suffix not in _SUFFIXES:
        raise ValueError(f"not a quantity: {text}")
    return Fraction(number) * _SUFFIXES[suffix]


def ceiling(text: str, divisor: str = "1") -> int:
    """Whole units of `divisor`, rounded up. Raises ValueError."""
    unit = parse(divisor)
    return math.ceil(parse(text) / (unit or 1))
