"""A ledger as gateways know it: a price list, and the month's totals."""

from shoal.api.ledger import Prices, Rate
from shoal.core.quota.month import MonthTotal
from shoal.core.rating.price import RateTable


def flat(model: str, price: int) -> Rate:
    """Each token of the Model costs `price`, in 10^-12 of the currency."""
    return Rate(model=model, input=price, cached=price, output=price)


class PriceList:
    """A ledger with these prices."""

    def __init__(self, *rates: Rate, currency: str = "USD") -> None:
        self.live = True
        self.totals: dict[str, MonthTotal] = {}
        self.rate_table: RateTable | None = None
        self.put(*rates, currency=currency)

    def put(self, *rates: Rate, currency: str = "USD") -> None:
        self.rate_table = RateTable.of(Prices(list="p", currency=currency, rates=rates))

    def total(self, tenant: str) -> MonthTotal | None:
        return self.totals.get(tenant)
