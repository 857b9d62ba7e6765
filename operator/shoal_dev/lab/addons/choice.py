"""Which add-ons there are, and what is not to be had."""

from collections.abc import Sequence
from typing import Final, Literal, get_args

from shoal_dev.lab.errors import LabError

AddOn = Literal["keda", "prometheus"]
KNOWN: Final[tuple[AddOn, ...]] = get_args(AddOn)
_GRAFANA: Final = (
    "--with grafana: no package registry that the lab uses (Debian, PyPI, npm, Go) has a Grafana that runs; its Go "
    "module comes without the web pages. Point a Grafana of your own at the lab's Prometheus (--with prometheus) and "
    "import the boards of charts/shoal/dashboards"
)


def parse(text: str) -> tuple[AddOn, ...]:
    """From a comma list, in the order of KNOWN; empty: none. Raises LabError."""
    return check([part.strip() for part in text.split(",") if part.strip()])


def check(wanted: Sequence[str]) -> tuple[AddOn, ...]:
    """The same from names. Raises LabError."""
    if "grafana" in wanted:
        raise LabError(_GRAFANA)
    if unknown := [name for name in wanted if name not in KNOWN]:
        raise LabError(f"--with {','.join(unknown)}: the lab has {', '.join(KNOWN)}")
    return tuple(name for name in KNOWN if name in wanted)
