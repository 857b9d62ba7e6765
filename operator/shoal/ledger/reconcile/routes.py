"""GET /v1/unattributed: tokens that engines counted beyond billed usage, for operators of the fleet."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection
from starlette.responses import Response

from shoal.api import names
from shoal.api.reconciliation import UNATTRIBUTED_BY, UnattributedPage, UnattributedRow
from shoal.core.reconcile import Compared
from shoal.ledger.queries import dimensions, times
from shoal.ledger.reconcile.compare import MOST_ROWS, Key, TooMany, by_engine, by_sums, total
from shoal.ledger.reconcile.watch import EngineCoverage
from shoal.ledger.service import LedgerService, answer_csv
from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest, answer_json

T = TypeVar("T")

_NAMED: Final = 100
"""Most stale pods that an answer names."""
_OF_ENGINES: Final = ("replica", "lastReport")
"""Fields that only rows by engine have."""
_TIME_TEXTS: Final = {"hour": times.text, "day": times.day_of, "month": times.month_of}


class CoverageSource(Protocol):
    """The part of `ledger.store.LedgerStore` that is needed here."""

    async def read(self, work: Callable[[Connection], T]) -> T: ...


class Routes:
    """`coverage` returns the coverage of the engines' counters; `now` returns milliseconds since 1970."""

    def __init__(self, store: CoverageSource, coverage: Callable[[], EngineCoverage], now: Callable[[], int]) -> None:
        self._store = store
        self._coverage = coverage
        self._now = now

    def add(self, service: LedgerService) -> None:
        service.route("GET", names.UNATTRIBUTED_PATH, self.unattributed, ("billing",))

    async def unattributed(self, request: ShellRequest) -> Response:
        """Parameters: `from` and `to` (default: this month), `by` (default: model), `model`, `output` (json or csv)."""
        dimensions.only_these(request, ("from", "to", "by", "model", "output"))
        span = times.span(request, self._now())
        by = dimensions.by(request, UNATTRIBUTED_BY) or ("model",)
        if "engine" in by and (timed := [name for name in dimensions.TIMES if name in by]):
            raise Problem(400, f"by=engine is over the whole life of an engine: leave {timed[0]} out")
        output = request.one("output", "json")
        if output not in ("json", "csv"):
            raise Problem(400, f"output={str(output)[:40]}: json or csv")
        models = tuple(request.parameters.get("model", ()))

        def work(connection: Connection) -> Mapping[Key, Compared]:
            return by_engine(connection, span, models) if "engine" in by else by_sums(connection, span, by, models)

        try:
            found = await self._store.read(work)
        except TooMany:
            raise Problem(400, f"that is more than {MOST_ROWS} rows: ask for less time, or for fewer `by`") from None
        rows = [_row(key, found[key], by) for key in sorted(found, key=_order)]
        if output == "csv":
            header = _fields(by)
            return answer_csv(header, [[row[name] for name in header] for row in rows], "unattributed.csv")
        coverage = self._coverage()
        page = UnattributedPage.model_validate(
            {
                "from": times.text(span.start),
                "to": times.text(span.end),
                "by": by,
                "total": _row(Key(), total(found.values()), ()),
                "watching": coverage.watching,
                "live": coverage.live,
                "stale": coverage.stale[:_NAMED],
            }
        )
        return answer_json(page.model_dump(mode="json") | {"rows": rows})


def _fields(by: Sequence[str]) -> list[str]:
    """Names of a row's fields, as in JSON: fields that were not requested are absent."""
    asked = {*by, *_OF_ENGINES, "model", "class"} if "engine" in by else {*by}
    absent = {*UNATTRIBUTED_BY, *_OF_ENGINES} - asked
    names_of = (field.serialization_alias or name for name, field in UnattributedRow.model_fields.items())
    return [name for name in names_of if name not in absent]


def _row(key: Key, compared: Compared, by: Sequence[str]) -> dict[str, Any]:
    left, engine = compared.unattributed, compared.engine
    fields: dict[str, object] = {"model": key.model, "class": key.gpu_class or None}
    if key.at is not None:
        name = next(name for name in dimensions.TIMES if name in by)
        fields[name] = _TIME_TEXTS[name](key.at)
    fields |= {"engine": key.engine, "replica": key.replica}
    if key.last_report is not None:
        fields["last_report"] = times.text(key.last_report)
    fields |= {
        "engine_input": None if engine is None else engine.input,
        "engine_output": None if engine is None else engine.output,
        "billed_input": compared.billed.input,
        "billed_output": compared.billed.output,
        "not_billed_input": compared.not_billed.input,
        "not_billed_output": compared.not_billed.output,
        "estimated_input": compared.estimated_input,
        "unattributed_input": None if left is None else left.input,
        "unattributed_output": None if left is None else left.output,
        "share": compared.share,
    }
    row = UnattributedRow.model_validate(fields).model_dump(mode="json")
    return {name: row[name] for name in _fields(by)}


def _order(key: Key) -> tuple[int, str, str, str]:
    return key.at or 0, key.model or "", key.gpu_class or "", key.engine or ""
