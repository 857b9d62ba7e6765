"""What the pages tell a user to type, read against what would take it: the command line, the charts, the release.

`test_lab_guide.py` runs some of it. What needs the published files, a registry or a real cluster is only read here."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_dev.release import krew, plugin, project
from tests.firstday.pages import ROOT, commands, entered, lines, pages
from tests.support.charts import helm, rendered
from tests.support.commandline import parse

CHARTS = {name: ROOT / "charts" / name for name in project.CHARTS}
OF_HELM = {"--wait", "--create-namespace", "--reset-then-reuse-values"}
"""Options that say how, and not what."""
KINDS = {"deployment": "Deployment", "statefulset": "StatefulSet", "svc": "Service"}
RAW = re.compile(rf"{re.escape(project.REPOSITORY)}/raw/v([^/]+)/(\S+)")


def quoted(program: str) -> list[tuple[str, str]]:
    return [(page, command) for page in pages() for command in entered(page, program)]


def test_every_page_is_read() -> None:
    assert {page for page, _ in quoted("kubectl shoal")} >= {"README.md", "docs/cli.md", "docs/lab.md", "docs/why.md"}
    assert len(quoted("helm")) > 10


@pytest.mark.parametrize(("page", "command"), [*quoted("kubectl shoal"), *quoted("shoal")])
def test_the_command_line_takes_what_a_page_shows(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"[\w./-]+\.yaml", command):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if "..." not in command:
        parse(command.removeprefix("kubectl ").removeprefix("shoal"))


@pytest.mark.parametrize(
    ("page", "command"), [each for each in quoted("helm") if shlex.split(each[1])[1] in ("install", "upgrade")]
)
def test_the_charts_take_what_a_page_shows(page: str, command: str, tmp_path: Path) -> None:
    """The values of a command, rendered. Files that the reader has are empty."""
    _, _, name, chart, *options = shlex.split(command)
    assert chart in (f"{project.CHART_REGISTRY}/{name}", f"charts/{name}", "...")
    given: list[str] = []
    for option in options:
        if option in OF_HELM:
            continue
        key, _, file = option.rpartition("=")
        if given[-1:] == ["--set-file"] and not (ROOT / file).is_file():
            (tmp_path / "file").write_text("")
            option = f"{key}={tmp_path / 'file'}"
        elif given[-1:] == ["--set-file"]:
            option = f"{key}={ROOT / file}"
        given.append(option)
    done = helm("template", name, str(CHARTS[name]), *given)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("heading", ["## On your GPU cluster"])
def test_the_first_block_of_the_readme_installs_what_a_release_has(heading: str) -> None:
    """In this order: kinds, Shoal, the plugin by its manifest, and a file of the tag."""
    first, *_ = commands("README.md", heading)
    crds, shoal, install, fetch, apply = lines(first)
    version = project.version(ROOT)
    assert [shlex.split(line)[2] for line in (crds, shoal)] == list(project.CHARTS)
    assert shlex.split(install) == [
        *("kubectl", "krew", "install", "--manifest-url"),
        f"{project.REPOSITORY}/releases/download/v{version}/{krew.FILE}",
    ]
    found = RAW.search(fetch)
    assert found is not None
    assert found[1] == version
    file = ROOT / found[2]
    assert file.is_file(), "no file of the tag"
    assert shlex.split(apply) == ["kubectl", "apply", "-f", file.name], "curl -O keeps the name"


def test_every_object_that_a_page_names_is_one_of_the_chart() -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered({})}
    missing: list[str] = []
    for page, command in quoted("kubectl"):
        for kind, name in re.findall(r"\b(deployment|statefulset|svc)/(shoal-[a-z-]+)", command):
            if (KINDS[kind], name) not in there:
                missing.append(f"{page}: {command}")
    assert missing == []


def test_krew_takes_the_manifest() -> None:
    """The rules of krew's own validation, of which one that is broken ends `kubectl krew install`."""
    found: dict[str, Any] = krew.manifest("1.2.3", dict.fromkeys(project.PLATFORMS, "0" * 64))
    assert (found["apiVersion"], found["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    name, spec = found["metadata"]["name"], found["spec"]
    assert re.fullmatch(r"[\w-]+", name)
    assert f"{name}.yaml" == krew.FILE, "the file has the plugin's name"
    assert re.fullmatch(r"v\d+\.\d+\.\d+(-[0-9A-Za-z.]+)?", spec["version"])
    assert spec["shortDescription"]
    assert "\n" not in spec["shortDescription"]
    assert len(spec["platforms"]) == len(project.PLATFORMS)
    for platform in spec["platforms"]:
        assert platform.keys() == {"selector", "uri", "sha256", "bin"}, "without `files`, all of the archive is taken"
        assert platform["selector"]["matchLabels"].keys() == {"os", "arch"}
        assert re.fullmatch("[0-9a-f]{64}", platform["sha256"])
        assert platform["uri"].endswith((".tar.gz", ".zip"))
        assert platform["bin"] == plugin.PROGRAM
        assert not platform["bin"].startswith(("/", "..")), "inside the archive"
    assert yaml.safe_load(yaml.safe_dump(found)) == found
