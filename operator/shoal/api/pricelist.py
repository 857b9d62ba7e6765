"""Price list files: YAML in Git, mounted into the ledger (docs/billing.md)."""

from datetime import UTC, date, datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from shoal.api.ledger import Rate, UnknownCached

MOST_ROWS: Final = 10_000
DECIMALS: Final = 6
"""Decimals of a price: the smallest price is 0.000001 of the currency per million tokens."""
SECONDS_DECIMALS: Final = 3
"""Decimals of the price of a million seconds: audio is counted in milliseconds, and amounts stay exact."""
_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_OBJECT: Final = rf"^(\*|{_LABEL}/{_NAME})$"
_ANSWERING: Final = rf"^(\*|{_LABEL}/{_NAME}(/{_LABEL})?)$"


def _short(text: object) -> str:
    """A value, cut for a message. A value that is not a scalar is not printed: it may be of any size and depth."""
    return repr(text)[:80] if isinstance(text, str | int | float) else f"a {type(text).__name__}"


def _price(text: Any, decimals: int = DECIMALS, what: str = "tokens") -> int:
    if not isinstance(text, str | int | float):
        raise ValueError(f"{_short(text)} is not a price")
    whole, _, fraction = str(text).partition(".")
    if not (whole.isascii() and whole.isdigit()) or (
        "." in str(text) and not (fraction.isascii() and fraction.isdigit())
    ):
        raise ValueError(
            f'{_short(text)} is not a price: write a decimal number such as "0.25", without sign or exponent'
        )
    if len(whole) > 9:
        raise ValueError(f"{_short(text)} is too large for a price of a million {what}")
    if len(fraction) > decimals:
        raise ValueError(f"{_short(text)} has more than {decimals} decimals")
    return int(whole + fraction.ljust(decimals, "0"))


def _units(text: Any) -> int:
    return _price(text, what="units")


def _seconds(text: Any) -> int:
    return _price(text, SECONDS_DECIMALS, "seconds")


def _moment(text: Any) -> datetime:
    if not isinstance(text, str | datetime | date):
        raise ValueError(f"{_short(text)} is no date")
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"{_short(text)} is no date: write 2026-11-01, or 2026-11-01T06:00:00Z") from None
    try:
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{_short(text)} is out of range") from None
    if found.minute or found.second or found.microsecond:
        raise ValueError(f"{_short(text)} is not on the hour (UTC): usage is summed by the hour")
    return found


Price = Annotated[int, BeforeValidator(_price)]
"""Price in millionths of the currency per million tokens."""
UnitPrice = Annotated[int, BeforeValidator(_units)]
"""Price in millionths of the currency per million units."""
SecondsPrice = Annotated[int, BeforeValidator(_seconds)]
"""Price in thousandths of the currency per million seconds, which is 10^-12 of it per millisecond."""
Moment = Annotated[datetime, BeforeValidator(_moment)]
Served = Annotated[str, StringConstraints(pattern=_OBJECT)]
Answering = Annotated[str, StringConstraints(pattern=_ANSWERING)]


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=False, extra="forbid", frozen=True)


class PriceRow(_Part):
    """Prices of a model or adapter, per million tokens or other units."""

    plan: Annotated[str, StringConstraints(pattern=rf"^{_LABEL}$")] | None = None
    """Plan of the Tenant; absent: every plan without a price of its own, and tenants without a plan."""
    model: Answering
    """namespace/name, or "*"; for an external target of a route namespace/route/name."""
    adapter: Served | None = None
    """namespace/name, or "*" for every adapter; absent: the model without an adapter."""
    input: Price
    """Price of input that was not cached."""
    cached: Price
    """Price of input that the engine had cached."""
    output: Price
    """Price of output, including reasoning."""
    documents: UnitPrice | None = None
    """Price of documents read together with a query, in addition to their tokens; absent: only their tokens have a
    price."""
    images: UnitPrice | None = None
    """Price of images, in addition to their tokens; absent: only their tokens have a price."""
    audio_seconds: SecondsPrice | None = None
    """Price of audio that was transcribed, and of sounds in chats, in addition to their tokens; absent: only the tokens
    of chats have a price, and transcriptions, which have none, are on no bill's total."""

    def rate(self) -> Rate:
        return Rate(
            plan=self.plan,
            model=self.model,
            adapter=self.adapter,
            input=self.input,
            cached=self.cached,
            output=self.output,
            documents=self.documents,
            images=self.images,
            audio_ms=self.audio_seconds,
        )


class PriceFile(_Part):
    """One price list file."""

    name: (
        Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][-_.A-Za-z0-9]*$")] | None
    ) = None
    """Name of the price list, shown on bills. Default: the file's name without .yaml."""
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
    """ISO 4217 code."""
    effective_from: Moment
    """Start of validity: UTC, on the hour."""
    effective_until: Moment | None = None
    """End of validity, exclusive. Default: the start of the next price list."""
    unknown_cached: UnknownCached = "Fresh"
    """Price of input whose number of cached tokens is unknown, as after a cut stream."""
    prices: Annotated[tuple[PriceRow, ...], Field(min_length=1, max_length=MOST_ROWS)]
