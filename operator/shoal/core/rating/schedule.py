"""Which price list is in force when."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from shoal.api.ledger import Prices, Rate
from shoal.core.rating.files import PriceList
from shoal.core.rating.price import RateTable, price_of
from shoal.core.rating.problems import PriceProblem, PricesRefused
from shoal.core.rating.units import UNITS


@dataclass(frozen=True, slots=True)
class InForce:
    """A price list and the time in which it is in force, in milliseconds since 1970."""

    starts: int
    ends: int | None
    """Exclusive; None: open."""
    prices: Prices
    book: RateTable


@dataclass(frozen=True, slots=True)
class Schedule:
    """Price lists, the earliest first, without gaps or overlaps. Before the first there are no prices."""

    lists: tuple[InForce, ...] = ()

    def at(self, moment: int) -> InForce | None:
        """The list in force at a time in milliseconds since 1970; None: there is none."""
        place = bisect_right(self.lists, moment, key=lambda one: one.starts) - 1
        if place < 0:
            return None
        found = self.lists[place]
        return None if found.ends is not None and moment >= found.ends else found

    def changes(self, start: int, end: int) -> list[int]:
        """Times after `start` and before `end` at which prices change."""
        moments = {one.starts for one in self.lists} | {one.ends for one in self.lists if one.ends is not None}
        return sorted(moment for moment in moments if start < moment < end)

    @property
    def currency(self) -> str | None:
        """Currency of all lists; None: there are no lists."""
        return self.lists[0].prices.currency if self.lists else None


def always(parsed: PriceList) -> Schedule:
    """A schedule with this list always in force: the effect of another price list on a month."""
    return Schedule((InForce(-(2**62), None, parsed.prices, RateTable.of(parsed.prices)),))


def schedule(parsed: Iterable[PriceList]) -> Schedule:
    """The lists in order. Raises PricesRefused with all mistakes between them."""
    ordered = _ordered(parsed)
    if problems := list(_between(ordered)):
        raise PricesRefused(problems)
    ends = [one.starts for one in ordered[1:]]
    return Schedule(
        tuple(
            InForce(one.starts, end, one.prices, RateTable.of(one.prices))
            for one, end in zip(ordered, [*ends, ordered[-1].ends if ordered else None], strict=False)
        )
    )


def conflicts(parsed: Iterable[PriceList], *, complete: bool) -> list[PriceProblem]:
    """All mistakes between lists. `complete`: False where further lists have mistakes of their own: one of them may
    fill a gap."""
    return list(_between(_ordered(parsed), complete=complete))


def dropped(lists: Iterable[PriceList]) -> list[PriceProblem]:
    """Prices that the next list no longer has: warnings, since that may be intended. A more general price of the next
    list, such as one for every model, may apply instead."""
    found: list[PriceProblem] = []
    ordered = sorted(lists, key=lambda one: one.starts)
    for earlier, later in pairwise(ordered):
        kept = {(rate.plan, rate.model, rate.adapter) for rate in later.prices.rates}
        rates = RateTable.of(later.prices)
        for rate in earlier.prices.rates:
            if (rate.plan, rate.model, rate.adapter) not in kept:
                what = _names(rate)
                instead = rates.find(rate.plan, rate.model, rate.adapter)
                if instead is None:
                    message = f"no price for {what}, which {earlier.file} has: such usage will not be billed"
                else:
                    message = f"no own price for {what}, which {earlier.file} has: that of {_names(instead)} applies"
                found.append(later.problem(message, "prices"))
            elif units := _without(rates.rates[rate.plan, rate.model, rate.adapter], rate):
                message = f"no price of {units} for {_names(rate)}, which {earlier.file} has: they will not be billed"
                found.append(later.problem(message, "prices"))
    return found


def _without(later: Rate, earlier: Rate) -> str:
    """The units that only the earlier price has."""
    return ", ".join(
        unit.price for unit in UNITS if price_of(earlier, unit) is not None and price_of(later, unit) is None
    )


def _names(rate: Rate) -> str:
    return f"plan {rate.plan or '-'}, model {rate.model}, adapter {rate.adapter or '-'}"


def _ordered(parsed: Iterable[PriceList]) -> list[PriceList]:
    return sorted(parsed, key=lambda one: (one.starts, one.file))


def _between(ordered: list[PriceList], *, complete: bool = True) -> Iterator[PriceProblem]:
    names: dict[str, PriceList] = {}
    for one in ordered:
        if (first := names.setdefault(one.name, one)) is not one:
            yield one.problem(f"the name {one.name} is that of {first.file} too", "name")
        if one.prices.currency != ordered[0].prices.currency:
            yield one.problem(
                f"prices in {one.prices.currency}, but those of {ordered[0].file} are in {ordered[0].prices.currency}: "
                "all price lists of an installation have one currency",
                "currency",
            )
    for earlier, later in pairwise(ordered):
        if later.starts == earlier.starts:
            yield later.problem(f"begins when {earlier.file} does, {_text(later.starts)}", "effectiveFrom")
        elif earlier.ends is not None and earlier.ends > later.starts:
            yield earlier.problem(
                f"overlaps {later.file}: ends {_text(earlier.ends)}, when that counts since {_text(later.starts)}; "
                "without `effectiveUntil` it ends there",
                "effectiveUntil",
            )
        elif earlier.ends is not None and earlier.ends < later.starts:
            unless = "" if complete else ", unless a list with mistakes fills it"
            yield earlier.problem(
                f"leaves a gap{unless}: ends {_text(earlier.ends)}, and {later.file} begins {_text(later.starts)}; "
                "without `effectiveUntil` it lasts until then",
                "effectiveUntil",
            )


def _text(moment: int) -> str:
    return datetime.fromtimestamp(moment / 1000, UTC).isoformat(timespec="minutes").replace("+00:00", "Z")
