"""The routes of all queries, with the roles that may call them."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from pydantic import ValidationError
from starlette.responses import Response

from shoal.api import names
from shoal.api.billing import Credits, NewCredit, PricesInForce, RepriceRequest
from shoal.api.replica import Message
from shoal.core.rating.focus import VERSION, Account
from shoal.ledger.prices import PriceFolder
from shoal.ledger.queries import bills, creditbook, dimensions, focus, margins, sums, times
from shoal.ledger.service import LedgerService, answer_csv
from shoal.ledger.store import LedgerStore
from shoal.net.errors import Problem
from shoal.net.rights import PERSON
from shoal.net.shell import BodyStream, ShellRequest, Write, answer_json

M = TypeVar("M", bound=Message)

FOCUS_DAYS: Final = 400
"""Longest period of one export."""
_LONGEST_USER: Final = 253


class QueryAPI:
    """`installation` is the billing account of exports; `keep_days` is how long hourly sums are kept (None: for ever);
    `credited` is called after a new credit; `clock` returns seconds since 1970."""

    def __init__(
        self,
        store: LedgerStore,
        prices: PriceFolder,
        installation: str,
        *,
        keep_days: int | None = None,
        credited: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._prices = prices
        self._installation = installation
        self._keep_days = keep_days
        self._credited = credited
        self._clock = clock

    def add(self, service: LedgerService) -> None:
        """Adds the routes to the ledger's API."""
        service.route("GET", names.USAGE_PATH, self.usage, ("billing", "gateway"))
        service.route("GET", names.BILL_PATH, self.bill, ("billing",))
        service.route("POST", names.BILL_PATH, self.bill_again, ("billing",))
        service.route("GET", names.CREDITS_PATH, self.credits, ("billing",))
        service.route("POST", names.CREDITS_PATH, self.new_credit, ("billing",))
        service.route("GET", names.MARGIN_PATH, self.margin, ("billing",))
        service.route("GET", names.PRICES_PATH, self.prices, ("billing",))
        service.route("GET", names.FOCUS_PATH, self.focus, ("billing",))

    async def usage(self, request: ShellRequest) -> Response:
        """Sums of counted tokens."""
        asked = sums.parse_query(request, self._now())
        form = _form(request)
        page = await self._store.read(lambda connection: sums.answer(connection, asked))
        if form == "csv":
            found = answer_csv(*sums.table(page), name="usage.csv")
            if page.next is not None:
                found.headers["x-shoal-next"] = page.next
            return found
        body = page.model_dump(mode="json", by_alias=True, exclude={"rows"}) | {"rows": sums.plain(page)}
        return answer_json(body)

    async def bill(self, request: ShellRequest) -> Response:
        """A tenant's bill of a month."""
        dimensions.only_these(request, ("tenant", "month"))
        tenant, month = _tenant(request.one("tenant")), self._kept(request.one("month"))
        prices, now = self._prices.schedule, self._now()
        found = await self._store.read(lambda c: bills.statement(c, tenant, month, prices, now))
        return _json(found.model_copy(update={"refused": self._prices.refused}))

    async def bill_again(self, request: ShellRequest) -> Response:
        """A tenant's bill of a month, and the same bill at other prices; nothing is stored."""
        asked = _body(request, RepriceRequest)
        self._kept(asked.month)
        other = bills.parse_lists(asked.prices)
        prices, now = self._prices.schedule, self._now()

        found = await self._store.read(
            lambda connection: bills.reprice(connection, asked.tenant, asked.month, prices, other, now)
        )
        current = found.bill.model_copy(update={"refused": self._prices.refused})
        return _json(found.model_copy(update={"bill": current}))

    async def credits(self, request: ShellRequest) -> Response:
        """Lists credits."""
        dimensions.only_these(request, ("tenant", "month"))
        tenants, months = request.parameters.get("tenant", ()), request.parameters.get("month", ())
        for month in months:
            times.month(month)
        found = await self._store.read(lambda connection: creditbook.listed(connection, tenants, months))
        return _json(Credits(credits=tuple(found)))

    async def new_credit(self, request: ShellRequest) -> Response:
        """Stores a credit; the answer follows the commit."""
        new = _proven(_body(request, NewCredit), request)
        currency, now = self._prices.schedule.currency, self._now()
        entry, made = await self._store.write(lambda connection: creditbook.add(connection, new, currency, now))
        if made:
            self._credited()
        return _json(entry, 201 if made else 200)

    async def margin(self, request: ShellRequest) -> Response:
        """Revenue and cost of GPU classes."""
        dimensions.only_these(request, ("from", "to", "by", "output"))
        span, by = times.span(request, self._now()), dimensions.by(request, margins.BY)
        by = by if "by" in request.parameters else ("class",)
        prices, form = self._prices.schedule, _form(request)
        found = await self._store.read(lambda connection: margins.answer(connection, span, by, prices))
        if form == "json":
            return _json(found.model_copy(update={"refused": self._prices.refused}))
        fixed = ["tokens", "unpricedTokens", "revenue", "gpuHours", "cost", "costCurrency", "margin", "marginPercent"]
        rows = [row.model_dump(mode="json", by_alias=True) for row in found.rows]
        return answer_csv([*by, *fixed], [[row[name] for name in (*by, *fixed)] for row in rows], name="margin.csv")

    async def prices(self, request: ShellRequest) -> Response:
        """Which price lists are in force, and why those in the folder are not."""
        dimensions.only_these(request, ())
        found, current = self._prices.schedule, self._prices.current()
        return _json(
            PricesInForce(
                lists=tuple(one.prices.list for one in found.lists),
                current=None if current is None else current.list,
                currency=found.currency,
                refused=self._prices.refused,
            )
        )

    async def focus(self, request: ShellRequest) -> Response:
        """Exports FOCUS rows as CSV."""
        dimensions.only_these(request, ("from", "to", "tenant", "grain", "issuer", "header"))
        span = times.span(request, self._now(), longest_days=FOCUS_DAYS)
        tenant, grain = request.one("tenant"), request.one("grain", "day")
        if grain not in ("hour", "day"):
            raise Problem(400, "grain is hour or day")
        account = Account(self._installation, request.one("issuer") or self._installation)
        header = request.one("header", "true") != "false"
        prices = self._prices.schedule

        async def days(write: Write) -> None:
            first = header
            for day in span.days():
                rows = await self._store.read(
                    lambda connection, day=day: focus.day_rows(
                        connection, day, prices, account, tenant=tenant, hourly=grain == "hour"
                    )
                )
                for piece in focus.lines(rows, header=first):
                    await write(piece)
                first = False

        name = f'attachment; filename="focus-{VERSION}.csv"'
        return BodyStream(days, {"content-type": "text/csv; charset=utf-8", "content-disposition": name})

    def _kept(self, given: str | None) -> str:
        """Checks the month of a bill: without its oldest hourly sums, the bill would be wrong. Raises Problem."""
        month = times.month(given)
        if self._keep_days is not None:
            oldest = self._now() - self._keep_days * times.DAY_MS
            if times.month_span(month).start < oldest:
                gone = f"hourly sums of before {times.text(oldest)} are deleted"
                raise Problem(410, f"{gone}: a bill for {month} would be incomplete")
        return month

    def _now(self) -> int:
        return round(self._clock() * 1000)


def _tenant(value: str | None) -> str:
    if not value:
        raise Problem(400, "tenant is missing: name the tenant to bill")
    return value


def _form(request: ShellRequest) -> str:
    form = request.one("output", "json") or ""
    if form not in ("json", "csv"):
        raise Problem(400, f"output={form[:20]}: json or csv")
    return form


def _body(request: ShellRequest, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(request.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Problem(400, f"the body: {where or 'it'}: {first['msg']}") from None


def _proven(new: NewCredit, request: ShellRequest) -> NewCredit:
    """With whose token it was made, beside what the caller says of itself."""
    if request.caller.role != PERSON.role:
        return new
    proven = f"({request.caller.name})"[:_LONGEST_USER]
    said = new.made_by[: max(0, _LONGEST_USER - len(proven) - 1)]
    return new.model_copy(update={"made_by": f"{said} {proven}".strip()})


def _json(message: Message, status: int = 200) -> Response:
    return Response(message.model_dump_json(by_alias=True), status, media_type="application/json")
