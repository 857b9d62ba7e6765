"""The commands of a page, as a reader copies them."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def commands(page: str, heading: str) -> list[str]:
    """The `sh` blocks below a heading of a page, up to the next heading of its level."""
    text = (ROOT / page).read_text()
    level = heading.partition(" ")[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    if not found:
        raise LookupError(f"{page} has no heading {heading!r}")
    section = re.split(rf"\n{level} ", rest, maxsplit=1)[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    if not blocks:
        raise LookupError(f"{page} has no commands below {heading!r}")
    return blocks
