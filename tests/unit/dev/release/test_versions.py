"""One version everywhere, and what a tag needs."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from shoal_dev.release import krew, project, versions

ROOT = project.root()
VERSION = project.version(ROOT)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that name the version."""
    named = [ROOT / mention.file for mention in versions.fields(ROOT)]
    for path in {*named, *versions.pages(ROOT), ROOT / "CHANGELOG.md"}:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def released(checkout: Path) -> None:
    """As it is when the tag can be set."""
    changelog = checkout / "CHANGELOG.md"
    text = re.sub(r"## \[Unreleased\]\n.*?(?=^## \[)", "", changelog.read_text(), flags=re.M | re.S)
    changelog.write_text(re.sub(rf"^## \[{re.escape(VERSION)}\].*$", f"## [{VERSION}] - 2027-01-31", text, flags=re.M))
    for page in versions.NOTED:
        lines = (checkout / page).read_text().splitlines(keepends=True)
        (checkout / page).write_text("".join(line for line in lines if versions.UNRELEASED_NOTE not in line))


def test_every_file_names_the_same_version() -> None:
    assert versions.disagreements(ROOT) == []
    assert {mention.file for mention in versions.fields(ROOT)} == {
        "pyproject.toml",
        "operator/shoal_dev/pyproject.toml",
        "uv.lock",
        "charts/shoal/Chart.yaml",
        "charts/shoal-crds/Chart.yaml",
    }
    assert len(list(versions.fields(ROOT))) == 1 + 1 + 2 + 2 + 2


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "charts/shoal/README.md"])
def test_a_page_installs_the_published_charts_of_the_charts_version(page: str) -> None:
    commands = re.findall(r"^helm install (\S+) (\S+) --version (\S+)", (ROOT / page).read_text(), re.M)
    for chart in project.CHARTS:
        chart_version = yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())["version"]
        assert (chart, f"oci://ghcr.io/shoal-dev/charts/{chart}", chart_version) in commands


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_a_page_installs_the_published_command_line(page: str) -> None:
    text = (ROOT / page).read_text()
    address = f"{project.REPOSITORY}/releases/download/v{VERSION}/{krew.FILE}"
    assert f"kubectl krew install --manifest-url {address}" in text
    assert f"uv tool install shoal=={VERSION} " in text


@pytest.mark.parametrize("page", versions.NOTED)
def test_a_page_says_whether_its_commands_have_something_to_take(page: str) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    unreleased = f"## [{VERSION}] - not released yet" in changelog
    assert (f"{VERSION} {versions.UNRELEASED_NOTE}" in (ROOT / page).read_text()) == unreleased


def test_readmes_first_command_installs_nothing_that_somebody_else_may_have_named_shoal() -> None:
    """Until the first release the name on PyPI is nobody's."""
    first = re.findall(r"^uv tool install [^#\n]*", (ROOT / "README.md").read_text(), re.M)
    assert [command.strip() for command in first] == ["uv tool install ."]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("charts/shoal/Chart.yaml", f"\nversion: {VERSION}", "\nversion: 9.9.9", "9.9.9 is not"),
        ("charts/shoal-crds/Chart.yaml", f"appVersion: {VERSION}", "appVersion: 9.9.9", "9.9.9 is not"),
        ("uv.lock", f'name = "shoal"\nversion = "{VERSION}"', 'name = "shoal"\nversion = "9.9.9"', "9.9.9 is not"),
        ("README.md", f"charts/shoal --version {VERSION}", "charts/shoal --version 9.9.9", "9.9.9 is not"),
        ("README.md", f"charts/shoal --version {VERSION}", "charts/shoal", "without its version"),
        ("README.md", f"shoal=={VERSION}", "shoal==9.9.9rc1", "9.9.9 is not"),
        ("docs/install.md", f"download/v{VERSION}/", "download/v9.9.9/", "9.9.9 is not"),
        ("docs/gitops.md", f"targetRevision: {VERSION}", "targetRevision: 9.9.9-rc.1", "9.9.9-rc.1 is not"),
    ],
)
def test_another_version_or_none_is_found(checkout: Path, file: str, old: str, new: str, said: str) -> None:
    assert versions.disagreements(checkout) == []
    edit(checkout / file, old, new)
    problems = versions.disagreements(checkout)
    assert problems
    assert all(problem.startswith(f"{file}:") and said in problem for problem in problems)


@pytest.mark.parametrize("number", ["0.2.0", "1.10.0-rc.1"])
def test_a_new_version_is_written_wherever_the_old_one_stands(checkout: Path, number: str) -> None:
    written = versions.write(checkout, number)
    assert {"README.md", "docs/install.md", "uv.lock", "charts/shoal/Chart.yaml", "pyproject.toml"} <= set(written)
    assert project.version(checkout) == number
    assert versions.disagreements(checkout) == []
    assert versions.write(checkout, number) == []
    # Nothing but the version has changed: back again, every file is as it was.
    versions.write(checkout, VERSION)
    assert [file for file in written if (checkout / file).read_text() != (ROOT / file).read_text()] == []


@pytest.mark.parametrize("number", ["v0.2.0", "0.2", "0.2.0rc1", ""])
def test_a_version_that_helm_does_not_take_is_not_written(checkout: Path, number: str) -> None:
    with pytest.raises(project.ReleaseError, match=r"not of the form 1\.2\.3"):
        versions.write(checkout, number)
    assert project.version(checkout) == VERSION


def test_a_released_checkout_can_have_its_tag_and_no_other(checkout: Path) -> None:
    released(checkout)
    assert versions.tag_problems(checkout, f"v{VERSION}") == []
    assert versions.tag_problems(checkout, "v9.9.9") == [f"the tag v9.9.9 is not v{VERSION}, pyproject.toml's version"]
    assert versions.tag_problems(checkout, VERSION) != []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("CHANGELOG.md", f"[{VERSION}] - 2027-01-31", f"[{VERSION}] - soon", "has no date"),
        ("CHANGELOG.md", f"[{VERSION}] - 2027-01-31", "[9.9.9] - 2027-01-31", "has no section"),
        ("CHANGELOG.md", f"## [{VERSION}]", f"## [Unreleased]\n\n- New.\n\n## [{VERSION}]", "has entries"),
        ("README.md", "# Shoal\n", f"# Shoal\n\n{VERSION} is not released yet.\n", "is not released yet"),
        (
            "docs/install.md",
            "# Installing Shoal\n",
            f"# Installing Shoal\n\n{VERSION} is not released yet.\n",
            "is not rel",
        ),
    ],
)
def test_what_stands_in_the_way_of_a_tag_is_named(checkout: Path, file: str, old: str, new: str, said: str) -> None:
    released(checkout)
    edit(checkout / file, old, new)
    (problem,) = versions.tag_problems(checkout, f"v{VERSION}")
    assert problem.startswith(file)
    assert said in problem
