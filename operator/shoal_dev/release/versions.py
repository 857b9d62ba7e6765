"""One version in every file that names it, and what a tag needs beyond that."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_dev.release import notes, project

_SEMVER: Final = r"\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?"
_VERSION: Final = re.compile(rf"(?<![\d.]){_SEMVER}(?![\d.]*\d)")
"""A version in a command or an address."""
_FIELDS: Final = (
    ("pyproject.toml", re.compile(r'^version = "(.*)"$', re.MULTILINE)),
    ("operator/shoal_dev/pyproject.toml", re.compile(r'^version = "(.*)"$', re.MULTILINE)),
    ("uv.lock", re.compile(r'^name = "shoal(?:-dev)?"\nversion = "(.*)"$', re.MULTILINE)),
    *(
        (f"charts/{chart}/Chart.yaml", re.compile(r"^(?:appV|v)ersion: (.*)$", re.MULTILINE))
        for chart in project.CHARTS
    ),
)
"""File, and what finds each field with Shoal's version in it."""
_PUBLISHED: Final = re.compile(
    rf"{re.escape(project.REGISTRY)}/|\bshoal(?:\[\w+\])?==|{re.escape(project.REPOSITORY)}/(?:releases/download|raw|blob)/"
)
"""What a line contains that names something published."""
UNRELEASED_NOTE: Final = "is not released yet"
"""Pages say so of a version whose commands have nothing to take yet."""
NOTED: Final = ("README.md", "docs/install.md")
"""Those pages."""


@dataclass(frozen=True, slots=True)
class Mention:
    """One place that names Shoal's version."""

    file: str
    line: int
    start: int
    """Offset in the file's text; `end` is exclusive."""
    end: int
    version: str


@dataclass(frozen=True, slots=True)
class Unversioned:
    """A line that names something published and no version of it."""

    file: str
    line: int


def pages(root: Path) -> list[Path]:
    """Pages with commands for users. docs/reference is made from the code and names defaults, not releases."""
    return [root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("charts/*/README.md"))]


def fields(root: Path) -> Iterator[Mention]:
    for file, pattern in _FIELDS:
        text = (root / file).read_text(encoding="utf-8")
        for found in pattern.finditer(text):
            yield _mention(file, text, found.start(1), found.end(1))


def on_pages(root: Path) -> Iterator[Mention | Unversioned]:
    """Every line that names something published."""
    for page in pages(root):
        file, text = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        start = 0
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if _PUBLISHED.search(line):
                found = list(_VERSION.finditer(line))
                yield from (_mention(file, text, start + one.start(), start + one.end()) for one in found)
                if not found:
                    yield Unversioned(file, number)
            start += len(line)


def _mention(file: str, text: str, start: int, end: int) -> Mention:
    return Mention(file, text.count("\n", 0, start) + 1, start, end, text[start:end])


def disagreements(root: Path) -> list[str]:
    """Places that do not name the version of pyproject.toml."""
    wanted = project.version(root)
    problems: list[str] = []
    if not re.fullmatch(_SEMVER, wanted):
        problems.append(f"pyproject.toml: {wanted} is no version that helm takes: use 1.2.3 or 1.2.3-rc.1")
    for found in (*fields(root), *on_pages(root)):
        if isinstance(found, Unversioned):
            problems.append(f"{found.file}:{found.line}: names something published without its version")
        elif found.version != wanted:
            problems.append(f"{found.file}:{found.line}: {found.version} is not {wanted}, pyproject.toml's version")
    return problems


def open_for_tag(root: Path) -> list[str]:
    """What must change before this version can get its tag; a checkout between releases has such things."""
    wanted = project.version(root)
    sections = notes.sections((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    problems: list[str] = []
    if (section := sections.get(wanted)) is None:
        problems.append(f"CHANGELOG.md has no section [{wanted}]")
    elif not section.dated:
        problems.append(f"CHANGELOG.md: [{wanted}] has no date, but {section.when!r}")
    if (unreleased := sections.get(notes.UNRELEASED)) is not None and unreleased.text:
        problems.append(f"CHANGELOG.md: [{notes.UNRELEASED}] has entries: move them to [{wanted}]")
    problems += [
        f"{page} says that {wanted} {UNRELEASED_NOTE}"
        for page in NOTED
        if UNRELEASED_NOTE in (root / page).read_text(encoding="utf-8")
    ]
    return problems


def tag_problems(root: Path, tag: str) -> list[str]:
    """Why `tag` cannot be released from this checkout; empty: it can."""
    wanted = project.version(root)
    other = [] if tag == f"v{wanted}" else [f"the tag {tag} is not v{wanted}, pyproject.toml's version"]
    return [*other, *disagreements(root), *open_for_tag(root)]


def write(root: Path, version: str) -> list[str]:
    """Writes `version` wherever the version stands; returns the changed files.

    Raises:
        project.ReleaseError: `version` is not of the form 1.2.3 or 1.2.3-rc.1.
    """
    if not re.fullmatch(_SEMVER, version):
        raise project.ReleaseError(f"{version} is not of the form 1.2.3 or 1.2.3-rc.1")
    changed: dict[str, list[Mention]] = {}
    for found in (*fields(root), *on_pages(root)):
        if isinstance(found, Mention) and found.version != version:
            changed.setdefault(found.file, []).append(found)
    for file, mentions in changed.items():
        path = root / file
        path.write_text(_replaced(path.read_text(encoding="utf-8"), mentions, version), encoding="utf-8")
    return sorted(changed)


def _replaced(text: str, mentions: Sequence[Mention], version: str) -> str:
    for mention in sorted(mentions, key=lambda one: one.start, reverse=True):
        text = text[: mention.start] + version + text[mention.end :]
    return text
