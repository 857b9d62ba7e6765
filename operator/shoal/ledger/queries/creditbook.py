"""Credits: created once, never changed."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, select
from sqlalchemy.dialects import postgresql, sqlite

from shoal.api.billing import CreditEntry, NewCredit
from shoal.core.rating import money
from shoal.core.rating.bill import Credit
from shoal.ledger.queries import times
from shoal.ledger.schema import credits
from shoal.net.errors import Problem

MOST: Final = 10_000
"""Credits per answer at most."""


def add(connection: Connection, new: NewCredit, currency: str | None, now: int) -> tuple[CreditEntry, bool]:
    """Stores a credit; returns it, and whether it is new: the same id with the same content is stored once.

    `currency` is that of the price lists; None: there are none. Raises Problem.
    """
    times.month(new.month)
    code = new.currency or currency
    if code is None:
        raise Problem(400, "there is no price list: set the currency of the credit")
    if currency is not None and code != currency:
        raise Problem(400, f"the price lists are in {currency}: a credit in {code} could not be deducted from any bill")
    if not (len(code) == 3 and code.isascii() and code.isupper()):
        raise Problem(400, f"currency {code[:10]!r} is not an ISO 4217 code, such as EUR")
    try:
        amount = money.parse(new.amount, code)
    except ValueError as error:
        raise Problem(400, f"amount: {error}") from None
    if not amount:
        raise Problem(400, "amount: must not be zero")
    values = {
        "id": new.id,
        "tenant": new.tenant,
        "month": new.month,
        "amount": amount,
        "currency": code,
        "note": new.note,
        "made_at": now,
        "made_by": new.made_by,
    }
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(credits)
    once = insert.values(values).on_conflict_do_nothing(index_elements=[credits.c.id]).returning(credits.c.id)
    made = connection.execute(once).first() is not None
    kept = connection.execute(select(credits).where(credits.c.id == new.id)).one()
    same = all(getattr(kept, name) == values[name] for name in ("tenant", "month", "amount", "currency", "note"))
    if not same:
        raise Problem(409, f"there is another credit with the id {new.id}: give this one an id of its own")
    return entry(kept), made


def listed(connection: Connection, tenants: Sequence[str], months: Sequence[str]) -> list[CreditEntry]:
    """Credits of these tenants and months (empty: all), the latest first."""
    query = select(credits).order_by(credits.c.made_at.desc(), credits.c.id).limit(MOST)
    if tenants:
        query = query.where(credits.c.tenant.in_(tenants))
    if months:
        query = query.where(credits.c.month.in_(months))
    return [entry(row) for row in connection.execute(query)]


def of_months(
    connection: Connection, months: Sequence[str], tenant: str | None = None
) -> list[tuple[str, str, Credit]]:
    """Tenant, month and credit of each credit in these months."""
    query = select(credits).where(credits.c.month.in_(months)).order_by(credits.c.tenant, credits.c.id)
    if tenant is not None:
        query = query.where(credits.c.tenant == tenant)
    return [
        (row.tenant, row.month, Credit(row.id, int(row.amount), row.currency, row.note))
        for row in connection.execute(query)
    ]


def entry(row: Row[Any]) -> CreditEntry:
    """A row of the table."""
    return CreditEntry(
        id=row.id,
        tenant=row.tenant,
        month=row.month,
        amount=money.text(int(row.amount), row.currency),
        currency=row.currency,
        note=row.note,
        made_at=times.text(int(row.made_at)),
        made_by=row.made_by,
    )
