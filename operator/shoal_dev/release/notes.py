"""The release notes, cut from CHANGELOG.md."""

import re
from dataclasses import dataclass
from typing import Final

from shoal_dev.release import project

UNRELEASED: Final = "Unreleased"
_HEADING: Final = re.compile(r"^## \[([^\]]+)\](?: - (.+))?$", re.MULTILINE)
_CONTINUED: Final = re.compile(r"(?<=\S)\n *(?![\s|#>]|[-*+] |\d+\. |$)")
"""The end of a line whose text goes on in the next one."""
_RELATIVE_LINK: Final = re.compile(r"\]\((?!https?://|#)([^)]+)\)")


@dataclass(frozen=True, slots=True)
class ChangeSection:
    """What CHANGELOG.md says of one version."""

    when: str
    """Behind the version in the heading; empty without."""
    text: str
    """Without the heading."""

    @property
    def dated(self) -> bool:
        return re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.when) is not None


def sections(changelog: str) -> dict[str, ChangeSection]:
    """Version -> section, newest first; `Unreleased` is one of them."""
    headings = list(_HEADING.finditer(changelog))
    ends = [heading.start() for heading in headings[1:]] + [len(changelog)]
    return {
        heading[1]: ChangeSection(heading[2] or "", changelog[heading.end() : end].strip())
        for heading, end in zip(headings, ends, strict=True)
    }


def unwrapped(markdown: str) -> str:
    """One line per paragraph and list item: GitHub shows each line break of release notes."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _CONTINUED.sub(" ", part) for part in parts)


def release_notes(changelog: str, version: str) -> str:
    """How to install and verify the release, and what changed. Relative links lead into the tag's files.

    Raises:
        project.ReleaseError: CHANGELOG.md has nothing for this version.
    """
    section = sections(changelog).get(version)
    if section is None or not section.text:
        raise project.ReleaseError(f"CHANGELOG.md says nothing of {version}")
    changes = _RELATIVE_LINK.sub(rf"]({project.REPOSITORY}/blob/v{version}/\1)", unwrapped(section.text))
    commands = "\n".join(
        [
            *(
                f"helm install {chart} {project.CHART_REGISTRY}/{chart} --version {version}"
                + (" --namespace shoal-system --create-namespace" if chart == "shoal" else "")
                for chart in project.CHARTS
            ),
            f"kubectl krew install --manifest-url {project.REPOSITORY}/releases/download/v{version}/shoal.yaml",
        ]
    )
    verify = f"{project.REPOSITORY}/blob/v{version}/docs/releasing.md#verifying-a-release"
    return f"```sh\n{commands}\n```\n\n[How to verify these files]({verify}).\n\n{changes}\n"
