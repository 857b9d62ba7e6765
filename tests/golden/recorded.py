"""Compares what is computed with what was recorded. `SHOAL_GOLDEN=write` records it anew: then the difference in git is
what a reviewer reads.
"""
# The metrics pages are not recorded here: `shoal generate --check` compares docs/reference/metrics.md byte by byte.

import difflib
import os
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).parent / "data"
_SHOWN_LINES: Final = 60


def compare(name: str, text: str) -> None:
    """Fails with the first lines that differ from the file `name`."""
    file = DATA / name
    if os.environ.get("SHOAL_GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    recorded = file.read_text()
    if text != recorded:
        difference = difflib.unified_diff(recorded.splitlines(), text.splitlines(), "recorded", "now", lineterm="", n=1)
        shown = "\n".join([line for line, _ in zip(difference, range(_SHOWN_LINES), strict=False)])
        raise AssertionError(f"{name} is not as it was recorded:\n{shown}")
