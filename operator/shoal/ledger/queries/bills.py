"""`GET /v1/bill` and `POST /v1/bill`: a tenant's monthly bill, also at other prices."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Connection, select, text

from shoal.api.billing import (
    BillLine,
    BillStatement,
    CreditEntry,
    PricedUnit,
    PriceText,
    RepriceAnswer,
    UnpricedLine,
    UsagePrices,
)
from shoal.api.ledger import Rate
from shoal.core.rating import money
from shoal.core.rating.bill import Bill, Credit, Usage, bill
from shoal.core.rating.files import PriceList, parse
from shoal.core.rating.problems import PriceProblem as Mistake
from shoal.core.rating.problems import PricesRefused
from shoal.core.rating.schedule import Schedule, always, schedule
from shoal.ledger.queries import creditbook, rated, sums, times
from shoal.ledger.schema import credits
from shoal.ledger.schema import usage as requests
from shoal.net.errors import Problem


@dataclass(frozen=True, slots=True)
class Month:
    """Input of a bill."""

    tenant: str
    month: str
    usage: tuple[Usage, ...]
    credits: tuple[CreditEntry, ...]
    entries: tuple[Credit, ...]
    """The credits as exact amounts."""
    open_requests: int
    ended: bool
    known: bool


def statement(connection: Connection, tenant: str, month: str, prices: Schedule, now: int) -> BillStatement:
    """The bill with the price lists in force."""
    return _statement(_read(connection, tenant, month, [prices], now), prices)


def reprice(
    connection: Connection, tenant: str, month: str, prices: Schedule, other: Schedule, now: int
) -> RepriceAnswer:
    """The bill of the month with both price lists. Nothing is written."""
    found = _read(connection, tenant, month, [prices, other], now)
    current, changed = _made(found, prices), _made(found, other)
    same = current.currency is not None and current.currency == changed.currency
    return RepriceAnswer(
        bill=_statement(found, prices),
        other=_statement(found, other),
        difference=money.cents_text(changed.total_cents - current.total_cents, current.currency or "")
        if same
        else None,
    )


def parse_lists(lists: Iterable[PriceText]) -> Schedule:
    """Price lists in a request; a single one applies to all times. Raises Problem."""
    parsed = list(lists)
    mistakes: list[Mistake] = []
    found: list[PriceList] = []
    for one in parsed:
        try:
            found.append(parse(one.file, one.text))
        except PricesRefused as refused:
            mistakes += refused.problems
    try:
        if mistakes:
            raise PricesRefused(mistakes)
        return always(found[0]) if len(found) == 1 else schedule(found)
    except PricesRefused as refused:
        raise Problem(422, f"the price lists are refused:\n{refused}") from None


def _read(connection: Connection, tenant: str, month: str, lists: list[Schedule], now: int) -> Month:
    span = times.month_span(month)
    entries = creditbook.listed(connection, [tenant], [month])
    exact = [credit for _, _, credit in creditbook.of_months(connection, [month], tenant)]
    cuts = Schedule(tuple(one for prices in lists for one in prices.lists))
    usage = [one for one, _ in rated.usage(connection, span, cuts, tenant=tenant)]
    known = bool(usage or entries) or not sums.unseen(connection, [tenant])
    if not known:
        known = connection.execute(select(credits.c.id).where(credits.c.tenant == tenant).limit(1)).first() is not None
    # Open rows are few and have an index, so filtering them by tenant is cheap.
    open_rows = connection.execute(
        select(requests.c.tenant, requests.c.admitted_at).where(text("NOT ended"), requests.c.attempt == 0)
    )
    return Month(
        tenant=tenant,
        month=month,
        usage=tuple(usage),
        credits=tuple(entries),
        entries=tuple(exact),
        open_requests=sum(1 for name, admitted in open_rows if name == tenant and span.start <= admitted < span.end),
        ended=now >= span.end,
        known=known,
    )


def _made(month: Month, prices: Schedule) -> Bill:
    return bill(month.tenant, month.month, month.usage, prices, month.entries)


def _statement(month: Month, prices: Schedule) -> BillStatement:
    found = _made(month, prices)
    currency = found.currency
    taken = {one.id for one in found.credits}
    return BillStatement(
        tenant=found.tenant,
        month=found.month,
        external_ids=found.external_ids,
        currency=currency,
        lines=tuple(
            BillLine(
                **sums.as_fields(line.counts),
                model=line.model,
                adapter=line.adapter,
                plan=line.plan,
                rate=_prices(line.rate),
                unknown_cached=line.unknown_cached,
                lists=line.lists,
                unpriced_units=tuple(cast("PricedUnit", unit.price) for unit in line.unpriced_units),
                exact=money.exact(line.amount),
                amount=money.cents_text(line.cents, currency or ""),
            )
            for line in found.lines
        ),
        unpriced=tuple(
            UnpricedLine(**sums.as_fields(one.counts), model=one.model, adapter=one.adapter, plan=one.plan)
            for one in found.unpriced
        ),
        credits=tuple(one for one in month.credits if one.id in taken),
        foreign_credits=tuple(one for one in month.credits if one.id not in taken),
        usage=None if currency is None else money.cents_text(found.usage_cents, currency),
        credit=None if currency is None else money.cents_text(found.credit_cents, currency),
        total=None if currency is None else money.cents_text(found.total_cents, currency),
        month_ended=month.ended,
        open_requests=month.open_requests,
        known=month.known,
    )


def _prices(rate: Rate) -> UsagePrices:
    return UsagePrices(
        input=money.price(rate.input),
        cached=money.price(rate.cached),
        output=money.price(rate.output),
        documents=None if rate.documents is None else money.price(rate.documents),
        images=None if rate.images is None else money.price(rate.images),
        audio_seconds=None if rate.audio_ms is None else money.price_of_seconds(rate.audio_ms),
    )
