"""The commands of a page, as a reader copies them."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_SHELL: Final = re.compile(r"\s(?:\||&&|\|\||>|2>)\s|;\s|\s&$|^until |^\$ ")
"""What stands between the commands of a line."""


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


def pages() -> list[str]:
    """The pages with commands for users."""
    docs = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in docs)]


def entered(page: str, program: str) -> list[str]:
    """The commands of all `sh` blocks of a page that call a program, without what a shell does with their output."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    found = (part.strip() for block in blocks for line in lines(block) for part in re.split(_SHELL, line))
    return [part for part in found if part.startswith(f"{program} ")]


def lines(script: str) -> list[str]:
    """The commands of a block, one a line as a reader enters them: without comments, continued lines as one."""
    whole = script.replace("\\\n", " ")
    found = (re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.splitlines())
    return [line for line in found if line]


def marked(script: str, *marks: tuple[str, str]) -> str:
    """The script, which writes `== MARK SECONDS` when it comes to the line that begins with a text, for each (mark,
    text). Raises LookupError when no line, or more than one, begins so."""
    found = script.splitlines()
    for mark, text in marks:
        there = [i for i, line in enumerate(found) if line.startswith(text)]
        if len(there) != 1:
            raise LookupError(f"{len(there)} lines begin with {text!r}")
        # An answer that is JSON may end without a line break.
        found.insert(there[0], f'printf "\\n== {mark} %s\\n" "$EPOCHREALTIME"')
    return "\n".join(found) + "\n"


def times(output: str) -> dict[str, float]:
    """Mark -> Unix seconds, of what a marked script wrote."""
    return {mark: float(at) for mark, at in re.findall(r"^== (\w+) ([\d.]+)$", output, re.MULTILINE)}
