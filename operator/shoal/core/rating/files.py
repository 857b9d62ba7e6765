"""Reads one price list, and reports its mistakes by line."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.api.ledger import Prices
from shoal.api.pricelist import MOST_ROWS, PriceFile, PriceRow
from shoal.core.rating.problems import PriceProblem, PricesRefused

Path = tuple[str | int, ...]

LARGEST_BYTES: Final = 1024 * 1024
"""The size limit of a ConfigMap."""
_MOST_NODES: Final = 200_000
"""YAML nodes of a file. With aliases a few lines can expand to more nodes than any memory holds."""
_MOST_REPORTED: Final = 50
"""Mistakes reported of one file."""
_NULL: Final = "tag:yaml.org,2002:null"
_MERGE: Final = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class PriceList:
    """A price list that is valid by itself. Times are milliseconds since 1970, UTC."""

    file: str
    starts: int
    ends: int | None
    """None: it is valid until the next list begins."""
    prices: Prices
    lines: dict[Path, int]
    """Path of a field -> line in the file."""

    @property
    def name(self) -> str:
        return self.prices.list

    def problem(self, message: str, *path: str | int) -> PriceProblem:
        """A problem with the field at `path`, or with the file if it has no such field."""
        return PriceProblem(self.file, _line(self.lines, path), message)


def parse(file: str, text: str) -> PriceList:
    """A price list from the text of a file; `file`: its name for messages. Raises PricesRefused."""
    content, lines = _plain(file, text)
    if not isinstance(content, dict):
        raise PricesRefused(
            [PriceProblem(file, 1, "a price list is a mapping with `currency`, `effectiveFrom` and `prices`")]
        )
    try:
        found = PriceFile.model_validate(content)
    except ValidationError as error:
        # Of rows that are all wrong none is left, which does not make the list an empty one.
        none_right = bool(cast("dict[str, Any]", content).get("prices"))
        details = [
            each for each in error.errors(include_url=False) if not (none_right and each["type"] == "too_short")
        ][:_MOST_REPORTED]
        raise PricesRefused(_problem(file, lines, detail) for detail in details) from None
    if problems := list(_twice(file, lines, found.prices)):
        raise PricesRefused(problems)
    ends = found.effective_until
    parsed = PriceList(
        file=file,
        starts=_ms(found.effective_from.timestamp()),
        ends=None if ends is None else _ms(ends.timestamp()),
        prices=Prices(
            list=found.name or _stem(file),
            currency=found.currency,
            unknown_cached=found.unknown_cached,
            rates=tuple(row.rate() for row in found.prices),
        ),
        lines=lines,
    )
    if parsed.ends is not None and parsed.ends <= parsed.starts:
        raise PricesRefused([parsed.problem("`effectiveUntil` is not after `effectiveFrom`", "effectiveUntil")])
    return parsed


def _twice(file: str, lines: dict[Path, int], rows: tuple[PriceRow, ...]) -> Iterator[PriceProblem]:
    seen: dict[tuple[str | None, str, str | None], int] = {}
    for number, row in enumerate(rows):
        line = lines["prices", number]
        first = seen.setdefault((row.plan, row.model, row.adapter), line)
        if first != line:
            yield PriceProblem(file, line, f"a second price for the plan, model and adapter of line {first}")


def _plain(file: str, text: str) -> tuple[Any, dict[Path, int]]:
    """The content with scalars as they are written, and the line of each node."""
    if len(text) > LARGEST_BYTES:
        raise PricesRefused([PriceProblem(file, 1, f"larger than {LARGEST_BYTES} bytes")])
    lines: dict[Path, int] = {}
    problems: list[PriceProblem] = []
    left = _MOST_NODES

    def value(node: yaml.Node, path: Path) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise yaml.YAMLError(f"more than {_MOST_NODES} values, aliases counted each time")
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, item in node.value:
                line = key.start_mark.line + 1
                name = str(key.value)
                if key.tag == _MERGE:
                    problems.append(PriceProblem(file, line, "merge keys (<<) are not understood here"))
                elif name in found:
                    problems.append(PriceProblem(file, line, f"`{name}` stands here twice"))
                else:
                    lines[*path, name] = line
                    found[name] = value(item, (*path, name))
            return found
        if isinstance(node, yaml.SequenceNode):
            return [value(item, (*path, number)) for number, item in enumerate(node.value)]
        return None if node.tag == _NULL else node.value

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = None if node is None else value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise PricesRefused([PriceProblem(file, line, f"not YAML: {error.problem or error.context}")]) from None
    except yaml.YAMLError as error:
        raise PricesRefused([PriceProblem(file, 1, f"not YAML: {str(error)[:200]}")]) from None
    except RecursionError:
        raise PricesRefused([PriceProblem(file, 1, "not YAML that can be read: it goes too deep")]) from None
    if problems:
        raise PricesRefused(problems[:_MOST_REPORTED])
    return content, lines


def _problem(file: str, lines: dict[Path, int], detail: ErrorDetails) -> PriceProblem:
    path = detail["loc"]
    field = str(path[-1])[:64] if path else ""
    name = ".".join(str(part)[:64] for part in path[:8] if isinstance(part, str))
    given = repr(detail["input"])[:80] if isinstance(detail["input"], str) else _kind(detail["input"])
    kind = detail["type"]
    fields = _fields(PriceRow) if len(path) > 2 else _fields(PriceFile)
    match kind:
        case "missing":
            message = f"`{field}` is missing"
        case "extra_forbidden":
            close = get_close_matches(field, fields, n=1)
            message = f"unknown field `{field}`" + (f": did you mean `{close[0]}`?" if close else "")
        case "value_error":
            message = f"`{name}`: {detail['ctx']['error']}" if "ctx" in detail else f"`{name}`: {detail['msg']}"
        case "too_short":
            message = f"`{name}` is empty: a price list has at least one price"
        case "too_long":
            message = f"`{name}` has more than {MOST_ROWS} prices"
        case "tuple_type":
            message = f"`{name}` is {given}, and must be a list of prices"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = f"`{name}`: {given} is no price: write `model`, `input`, `cached` and `output` of each"
        case "literal_error":
            message = f"`{name}`: {given} is none of {detail.get('ctx', {}).get('expected', '')}"
        case _ if field in ("model", "adapter"):
            message = f'`{name}`: {given} is neither namespace/name nor "*"'
        case _ if field == "plan" and detail["input"] == "*":
            message = "`plan`: leave it out for every plan that has no price of its own"
        case _ if field == "currency":
            message = f"`currency`: {given} is no code of ISO 4217, such as EUR"
        case _ if field in ("plan", "name"):
            message = f"`{name}`: {given} is no name of at most 63 letters, digits and '-'"
        case _:
            message = f"`{name}`: {given}: {detail['msg']}"
    return PriceProblem(file, _line(lines, path), message)


def _kind(value: object) -> str:
    """A value that is no text: it may be of any size and depth."""
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "nothing"


def _fields(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _line(lines: dict[Path, int], path: Path) -> int:
    """The line of a field, or of the nearest parent that exists."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _stem(file: str) -> str:
    name = file.replace("\\", "/").rsplit("/", 1)[-1]
    return name.removesuffix(".yaml").removesuffix(".yml")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
