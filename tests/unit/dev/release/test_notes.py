"""Release notes are the changelog's section of the version."""

import pytest

from shoal_dev.release import notes, project

CHANGELOG = """# Changelog

## [Unreleased]

- Not yet.

## [1.2.0] - 2027-01-31

The second one.

### Added

- A [page](docs/page.md#part), described
  in two lines, and a [site](https://example.com).
- Another. [Above](#added)

| a | b |
|---|---|
| c | d |

```sh
first \\
  second
```

## [1.1.0]

- The first.
"""


def test_the_notes_are_the_section_of_the_version_and_no_other() -> None:
    text = notes.release_notes(CHANGELOG, "1.2.0")
    assert "The second one." in text
    assert "Not yet." not in text
    assert "The first." not in text


def test_links_lead_into_the_tag_and_lines_are_whole() -> None:
    text = notes.release_notes(CHANGELOG, "1.2.0")
    page = f"[page]({project.REPOSITORY}/blob/v1.2.0/docs/page.md#part)"
    assert f"- A {page}, described in two lines, and a [site](https://example.com).\n- Another." in text
    assert "[Above](#added)" in text
    assert "| a | b |\n|---|---|\n| c | d |\n" in text
    assert "```sh\nfirst \\\n  second\n```" in text


def test_the_notes_begin_with_the_commands_of_this_version() -> None:
    lines = notes.release_notes(CHANGELOG, "1.2.0").splitlines()
    assert lines[0] == "```sh"
    assert lines[1] == "helm install shoal-crds oci://ghcr.io/shoal-dev/charts/shoal-crds --version 1.2.0"
    assert "/releases/download/v1.2.0/" in lines[3]


def test_dates_are_read() -> None:
    sections = notes.sections(CHANGELOG)
    assert list(sections) == ["Unreleased", "1.2.0", "1.1.0"]
    assert [section.dated for section in sections.values()] == [False, True, False]


def test_a_version_without_changes_has_no_notes() -> None:
    with pytest.raises(project.ReleaseError, match=r"CHANGELOG.md says nothing of 1\.3\.0"):
        notes.release_notes(CHANGELOG, "1.3.0")


def test_the_projects_own_changelog_has_notes_for_its_version() -> None:
    root = project.root()
    text = notes.release_notes((root / "CHANGELOG.md").read_text(), project.version(root))
    assert "### Added" in text
    assert "](docs/" not in text
