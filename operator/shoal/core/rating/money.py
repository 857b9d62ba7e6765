"""Amounts of money as text, and the only rounding."""

import re
from typing import Final

SCALE: Final = 12
"""Decimals of an amount: amounts are whole numbers of 10^-12 of a currency."""
UNIT: Final = 10**SCALE
_PRICE_DECIMALS: Final = 6
_SECONDS_DECIMALS: Final = 3
_NO_DECIMALS: Final = frozenset(
    (
        "BIF",
        "CLP",
        "DJF",
        "GNF",
        "ISK",
        "JPY",
        "KMF",
        "KRW",
        "PYG",
        "RWF",
        "UGX",
        "UYI",
        "VND",
        "VUV",
        "XAF",
        "XOF",
        "XPF",
    )
)
_THREE_DECIMALS: Final = frozenset(("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"))
"""ISO 4217; all others have two (CLF and UYW, which have four, are units of account)."""
_AMOUNT: Final = re.compile(r"^(-?)([0-9]{1,6})(?:\.([0-9]{1,12}))?$", re.ASCII)


def decimals(currency: str) -> int:
    """Decimals of the smallest unit: 2 for EUR, 0 for JPY."""
    return 0 if currency in _NO_DECIMALS else 3 if currency in _THREE_DECIMALS else 2


def cents(amount: int, currency: str) -> int:
    """An amount in whole smallest units of its currency, rounded half away from zero."""
    unit = 10 ** (SCALE - decimals(currency))
    rounded = (abs(amount) + unit // 2) // unit
    return -rounded if amount < 0 else rounded


def text(amount: int, currency: str) -> str:
    """An amount rounded to the smallest unit, such as 12.30."""
    return cents_text(cents(amount, currency), currency)


def cents_text(count: int, currency: str) -> str:
    """Whole smallest units as text: 1230 of EUR is 12.30."""
    return _decimal(count, decimals(currency), keep=decimals(currency))


def exact(amount: int) -> str:
    """An amount with all decimals, without trailing zeros."""
    return _decimal(amount, SCALE, keep=0)


def price(rate: int) -> str:
    """The price of a million tokens, from millionths of the currency."""
    return _decimal(rate, _PRICE_DECIMALS, keep=2)


def price_of_seconds(rate: int) -> str:
    """The price of a million seconds, from 10^-12 of the currency per millisecond."""
    return _decimal(rate, _SECONDS_DECIMALS, keep=2)


def parse(text: str, currency: str) -> int:
    """An amount from a decimal number below a million, with no more decimals than the currency has.

    Raises ValueError with a message for the user.
    """
    places = decimals(currency)
    match = _AMOUNT.match(text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r} is not an amount: write a decimal number below a million, such as 12.50")
    sign, whole, fraction = match[1], match[2], match[3] or ""
    if len(fraction.rstrip("0")) > places:
        raise ValueError(f"{text} has more decimals than {currency} has ({places})")
    amount = int(whole) * UNIT + int(fraction.ljust(SCALE, "0"))
    return -amount if sign else amount


def _decimal(value: int, places: int, *, keep: int) -> str:
    digits = str(abs(value)).rjust(places + 1, "0")
    whole, fraction = digits[: len(digits) - places], digits[len(digits) - places :]
    fraction = fraction[:keep] + fraction[keep:].rstrip("0")
    return f"{'-' if value < 0 else ''}{whole}{'.' if fraction else ''}{fraction}"
