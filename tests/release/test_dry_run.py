"""A release without publishing, and without network: what it makes is installed, run and pushed to a registry here."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shoal_dev.lab import binaries, gobuild
from shoal_dev.release import charts, checksums, krew, plugin, project, python
from tests.support.ociregistry import OciRegistry, serving

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]
ROOT = project.root()
VERSION = project.version(ROOT)
NO_NETWORK = {
    "UV_OFFLINE": "1",
    "GOPROXY": "off",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
}
PROCESSES = {"operator", "gateway", "ledger", "agent", "cache"}
"""Commands of the wheel for the image alone."""


def output(*command: str | Path, **environment: str) -> str:
    """What a program prints in an empty environment: nothing of this checkout's helps it."""
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said_and_made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    if binaries.find() is None:
        pytest.skip("helm is not there: run `shoal lab binaries`")
    dist = tmp_path_factory.mktemp("release") / "dist"
    done = subprocess.run(
        [sys.executable, "-m", "shoal_dev.release", "dry-run", "--dist", dist],
        cwd=ROOT, env=os.environ | NO_NETWORK, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, dist


@pytest.fixture(scope="module")
def said(said_and_made: tuple[str, Path]) -> str:
    return said_and_made[0]


@pytest.fixture(scope="module")
def dist(said_and_made: tuple[str, Path]) -> Path:
    return said_and_made[1]


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of the wheel in a new environment."""
    return python.environment(ROOT, tmp_path_factory.mktemp("wheel") / "venv", python.wheel(ROOT, dist))


@pytest.fixture(scope="module")
def krew_root(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the real krew, into which it installed the plugin.

    From the archive here: without `--archive` krew fetches what the manifest names, which is published by a tag alone.
    The checksum is compared in both cases.
    """
    root = tmp_path_factory.mktemp("krew")
    archive = dist / plugin.archive_name(VERSION, project.this_platform())
    krews("install", f"--manifest={dist / krew.FILE}", f"--archive={archive}", root=root)
    return root


@pytest.fixture(scope="module")
def extracted(krew_root: Path) -> Path:
    """The plugin where krew links it."""
    return krew_root / "bin" / "kubectl-shoal"


def krews(*arguments: str, root: Path, succeeds: bool = True) -> str:
    """What the real krew prints, with `root` for its folder."""
    sources = gobuild.needed_sources()
    gobuild.build(sources, (binaries.KREW,), print)
    done = subprocess.run(
        [gobuild.cached(sources, binaries.KREW) / "krew", *arguments], stdin=subprocess.DEVNULL,
        env={"KREW_ROOT": str(root), "HOME": str(root), "PATH": os.defpath} | NO_NETWORK,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def registry() -> Iterator[OciRegistry]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def pushed(dist: Path, registry: OciRegistry, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """References of the pushed charts, and what a stand-in for cosign was called with."""
    folder = tmp_path_factory.mktemp("cosign")
    calls = folder / "calls"
    (folder / "cosign").write_text(f'#!/bin/sh\necho "$*" >> {calls}\n')
    (folder / "cosign").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        references = charts.push(ROOT, dist, f"oci://{registry.host}/charts", plain_http=True, sign=True)
    return references, calls.read_text().splitlines()


def test_all_of_a_release_is_made_and_nothing_else(dist: Path) -> None:
    assert {path.name for path in dist.iterdir()} == {
        f"shoal-{VERSION}-py3-none-any.whl",
        f"shoal-{VERSION}.tar.gz",
        f"shoal_dev-{VERSION}-py3-none-any.whl",
        f"shoal_dev-{VERSION}.tar.gz",
        f"shoal-{VERSION}.tgz",
        f"shoal-crds-{VERSION}.tgz",
        plugin.archive_name(VERSION, project.this_platform()),
        "shoal.yaml",
        f"shoal-{VERSION}.cdx.json",
        "checksums.txt",
        "release-notes.md",
    }


def test_it_says_what_was_not_built_here(said: str) -> None:
    assert "image: not built here" in said
    others = [platform for platform in project.PLATFORMS if platform != project.this_platform()]
    assert re.search(rf"krew: .*not built here: {', '.join(map(str, others))}", said)
    assert "signatures, provenance and publishing: only in the workflow" in said


def test_the_checksums_are_those_of_the_files(dist: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "checksums.txt"], cwd=dist, check=True, timeout=60)
    listed = {line.split()[1] for line in (dist / "checksums.txt").read_text().splitlines()}
    assert listed == {path.name for path in dist.iterdir()} - {"checksums.txt", "release-notes.md"}


def test_two_builds_of_a_commit_are_equal(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = python.build(ROOT, first)
    assert len(made) == 4
    assert [checksums.sha256(path) for path in python.build(ROOT, second)] == [checksums.sha256(path) for path in made]


def test_the_wheel_installs_and_runs(installed: Path) -> None:
    assert output(installed / "shoal", "--version") == f"shoal, version {VERSION}\n"
    shown = output(installed / "shoal", "--help")
    assert {"why", "usage", "keys", *PROCESSES} < set(commands(shown))
    assert "Commands for developers" not in shown
    assert "Usage: kubectl shoal " in output(installed / "kubectl-shoal", "--help")


def test_the_wheel_has_the_ledgers_migrations(installed: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    assert f"the tables in {url} are of this version" in output(
        installed / "shoal", "ledger", "migrate", SHOAL_LEDGER_DATABASE_URL=url
    )


def commands(shown: str) -> list[str]:
    return re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.M)


def test_the_plugin_needs_no_python(extracted: Path, installed: Path) -> None:
    assert output(extracted, "--version") == f"kubectl shoal, version {VERSION}\n"
    people = commands(output(extracted, "--help"))
    of_the_wheel = commands(output(installed / "shoal", "--help"))
    assert people == [name for name in of_the_wheel if name not in PROCESSES]
    assert {"why", "usage", "keys", "cordon"} < set(people)
    for command in people:
        assert output(extracted, command, "--help").startswith(f"Usage: kubectl shoal {command} ")


def test_the_plugin_decides_as_the_wheel_does(extracted: Path, installed: Path, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    text = (ROOT / "examples" / "models.yaml").read_text()
    models.write_text(text.replace("file:///opt/", f"file://{ROOT}/images/shoal/rootfs/opt/"))
    question = ("explain", "-f", models)
    answer = output(extracted, *question)
    assert "fits on 13 of 13 classes" in answer
    assert answer == output(installed / "shoal", *question)


def test_kubectl_runs_what_krew_installed(krew_root: Path) -> None:
    found = binaries.find()
    assert found is not None
    path = f"{krew_root / 'bin'}:{found.components}"
    assert output(found.path("kubectl"), "shoal", "--version", PATH=path) == f"kubectl shoal, version {VERSION}\n"
    listed = output(found.path("kubectl"), "plugin", "list", PATH=path)
    assert listed.splitlines()[1:] == ["", f"{krew_root / 'bin' / 'kubectl-shoal'}"]
    store = krew_root / "store" / "shoal" / f"v{VERSION}"
    assert (store / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_krew_refuses_another_archive(dist: Path, tmp_path: Path) -> None:
    archive = dist / plugin.archive_name(VERSION, project.this_platform())
    forged = tmp_path / archive.name
    forged.write_bytes(archive.read_bytes() + b"\0")
    said = krews("install", f"--manifest={dist / krew.FILE}", f"--archive={forged}", root=tmp_path, succeeds=False)
    assert "checksum does not match" in said
    assert not (tmp_path / "bin" / "kubectl-shoal").exists()


def test_the_manifest_names_the_archive_of_the_releases_page(dist: Path) -> None:
    (row,) = yaml.safe_load((dist / krew.FILE).read_text())["spec"]["platforms"]
    name = plugin.archive_name(VERSION, project.this_platform())
    assert row["uri"] == f"{project.REPOSITORY}/releases/download/v{VERSION}/{name}"


def test_the_sbom_lists_what_an_installation_has(dist: Path, installed: Path) -> None:
    sbom = json.loads((dist / f"shoal-{VERSION}.cdx.json").read_text())
    assert (sbom["metadata"]["component"]["name"], sbom["metadata"]["component"]["version"]) == ("shoal", VERSION)
    listed = {(part["name"], part["version"]) for part in sbom["components"]}
    script = "import importlib.metadata as m; print(*{f'{d.name}=={d.version}' for d in m.distributions()})"
    found = output(installed / "python", "-c", script).split()
    there = {
        (re.sub(r"[-_.]+", "-", name).lower(), version) for name, _, version in (one.partition("==") for one in found)
    }
    assert there - listed == {("shoal", VERSION)}
    assert not {"pytest", "shoal-dev", "pyinstaller"} & {name for name, _ in listed}
    assert all(part["purl"].startswith("pkg:pypi/") for part in sbom["components"])


def test_the_notes_are_of_this_version(dist: Path) -> None:
    text = (dist / "release-notes.md").read_text()
    assert f"--version {VERSION}" in text
    assert "### Added" in text


def test_charts_are_signed_as_the_registry_stored_them(
    pushed: tuple[list[str], list[str]], registry: OciRegistry
) -> None:
    references, calls = pushed
    assert [reference.partition("@")[0] for reference in references] == [
        f"{registry.host}/charts/shoal-crds",
        f"{registry.host}/charts/shoal",
    ]
    assert calls == [f"sign --yes {reference}" for reference in references]
    for reference in references:
        repository, _, digest = reference.removeprefix(f"{registry.host}/").partition("@")
        assert registry.manifests[repository, digest] == registry.manifests[repository, VERSION]


@pytest.mark.usefixtures("pushed")
@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_the_commands_of_a_page_take_the_pushed_charts(page: str, registry: OciRegistry, tmp_path: Path) -> None:
    """`helm install` as a reader types it, as a rendering, and from the registry here in place of the public one."""
    typed = re.findall(r"^helm install (\S+) (oci://\S+) (.*)$", (ROOT / page).read_text(), re.M)
    assert [name for name, _, _ in typed] == list(project.CHARTS)
    found: set[str] = set()
    images: set[str] = set()
    for name, reference, options in typed:
        here = reference.replace(project.REGISTRY, registry.host)
        rest = options.replace("--create-namespace", "").split()
        text = output(charts.helm(), "template", name, here, *rest, "--plain-http", HOME=str(tmp_path))
        objects = [one for one in yaml.safe_load_all(text) if one and "kind" in one]
        found |= {f"{one['kind']}/{one['metadata']['name']}" for one in objects}
        images |= set(re.findall(r"image: \"?(ghcr\.io/[^\s\"]+)", text))
    assert found >= {
        "CustomResourceDefinition/models.shoal.dev",
        "Deployment/shoal-operator",
        "StatefulSet/shoal-gateway",
    }
    assert images == {f"{project.IMAGE}@sha256:{'0' * 64}"}
