"""Reading an engine's metrics page: the few families that Shoal needs, out of some eighty with histograms."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.api.meta import MOST_COUNT


class MetricLine(NamedTuple):
    """One line of a metrics page."""

    name: str
    labels: str
    """As written, without the braces."""
    value: float


def samples(body: bytes, families: Sequence[str]) -> Iterator[MetricLine]:
    """The lines of these families, in order; a line without a number is passed over.

    By hand: a full parser takes many times as long, every few seconds, in every pod.
    """
    wanted = tuple(families)
    for line in body.decode(errors="replace").splitlines():
        if not line.startswith(wanted):
            continue
        family, _, rest = line.partition("{")
        labels, _, text = rest.rpartition("}") if rest else ("", "", line.partition(" ")[2])
        name = family.split()[0]
        if name not in wanted:
            continue
        try:
            value = float(text.split()[0])
        except (ValueError, IndexError):
            continue
        yield MetricLine(name, labels, value)


def label(labels: str, name: str) -> str | None:
    """The value of a label whose values have no quotes in them; None: there is none."""
    _, found, rest = f",{labels}".partition(f',{name}="')
    return rest.partition('"')[0] if found else None


def whole(value: float | None) -> int | None:
    """A count; None: there is none, or it is no number that a count can be, and that the replica's stream takes."""
    return int(value) if value is not None and 0 <= value <= MOST_COUNT else None
