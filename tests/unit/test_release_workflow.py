"""The release workflow, which nothing here can run: what of it must hold for a release that one can check.

What its steps call is run by tests/release."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from shoal_dev.release import image, project
from shoal_dev.release.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / ".github" / "workflows" / "release.yml"
PERMISSIONS = {
    "check": {"contents": "read"},
    "files": {"contents": "read"},
    "plugin": {"contents": "read"},
    "image": {"contents": "read", "packages": "write", "id-token": "write", "attestations": "write"},
    "charts": {"contents": "read", "packages": "write", "id-token": "write"},
    "pypi": {"id-token": "write"},
    "release": {"contents": "write", "id-token": "write", "attestations": "write"},
}
"""id-token: the job signs, or publishes by its identity. packages: the registry. contents: the release's page."""
PROGRAMS = {"cosign sign", "cosign sign-blob", "docker buildx", "gh release", "uv publish"}
"""What steps run beside make and the project's own commands; `sed` and `echo` are the shell's."""


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load(PATH.read_text())


@pytest.fixture(scope="module")
def jobs(workflow: dict[Any, Any]) -> dict[str, Any]:
    return workflow["jobs"]


def using(job: dict[str, Any], action: str) -> dict[str, Any]:
    (found,) = [step for step in job["steps"] if step.get("uses", "").startswith(f"{action}@")]
    return found


def runs(job: dict[str, Any]) -> Iterator[str]:
    """Every line that a job's shell runs."""
    for step in job["steps"]:
        yield from (line for line in step.get("run", "").splitlines() if line.strip())


def before(jobs: dict[str, Any], name: str) -> set[str]:
    """Jobs that have succeeded when this one starts."""
    direct = set(jobs[name].get("needs", []))
    return direct.union(*(before(jobs, each) for each in direct))


def test_only_a_version_tag_starts_it(workflow: dict[Any, Any]) -> None:
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "a pull request starts nothing that has these rights"


def test_each_job_has_the_rights_that_it_needs_and_no_more(workflow: dict[Any, Any], jobs: dict[str, Any]) -> None:
    assert workflow["permissions"] == {}
    assert {name: job["permissions"] for name, job in jobs.items()} == PERMISSIONS
    for name, job in jobs.items():
        signs = any(line.startswith("cosign sign") or "push-charts" in line for line in runs(job))
        identity = signs or any("--trusted-publishing" in line for line in runs(job))
        assert identity == ("id-token" in PERMISSIONS[name])
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_every_action_is_pinned_by_its_commit() -> None:
    used = re.findall(r"^\s*-? uses: (.*)$", PATH.read_text(), re.M)
    assert len(used) > 10
    commits: dict[str, set[str]] = {}
    for text in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", text), text
        commits.setdefault(text.partition("@")[0], set()).add(text)
    assert [found for found in commits.values() if len(found) > 1] == []


def test_no_step_puts_a_value_of_the_event_into_its_script(jobs: dict[str, Any]) -> None:
    assert [line for job in jobs.values() for line in runs(job) if "${{" in line] == []


def test_every_command_of_a_step_exists(jobs: dict[str, Any]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called: set[str] = set()
    for line in (line for job in jobs.values() for line in runs(job)):
        words = shlex.split(line)
        if words[0] == "make":
            assert set(words[1:]) <= targets
        elif words[:5] == ["uv", "run", "--frozen", "python", "-m"]:
            assert words[5] == "shoal_dev.release"
            command = main.commands[words[6]]
            called.add(words[6])
            given = {word for word in words[7:] if word.startswith("--")}
            options = {name for part in command.params if isinstance(part, click.Option) for name in part.opts}
            assert given <= options, line
        elif words[0] not in ("echo", "[[") and not line.startswith("base="):
            program = " ".join(words[:2]) if "=$(" not in words[0] else "docker buildx"
            assert program in PROGRAMS, line
    # All that a dry run makes, a release makes, but for what is for people.
    assert called == set(main.commands) - {"dry-run", "version"}


def test_nothing_is_published_before_everything_is_checked_and_built(jobs: dict[str, Any]) -> None:
    builds = {"check", "files", "plugin"}
    for name in jobs.keys() - builds:
        assert builds <= before(jobs, name)
    assert before(jobs, "release") == jobs.keys() - {"release"}
    (check,) = [line for line in runs(jobs["check"]) if "shoal_dev.release check" in line]
    assert shlex.split(check)[-2:] == ["--tag", "$GITHUB_REF_NAME"]
    # What cannot be replaced waits for a person, and comes after what can.
    assert jobs["pypi"]["environment"] == "pypi"
    assert before(jobs, "pypi") >= {"image", "charts"}


def test_files_reach_the_release_from_each_job_that_makes_some(jobs: dict[str, Any]) -> None:
    kept = {
        name: step["with"]["name"]
        for name, job in jobs.items()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    }
    assert kept.keys() == {"files", "plugin", "charts"}
    assert all(name.startswith("release-") for name in kept.values())
    taken = using(jobs["release"], "actions/download-artifact")["with"]
    assert (taken["pattern"], taken["merge-multiple"], taken["path"]) == ("release-*", True, "dist")
    # One archive of the plugin per platform that krew's manifest wants.
    runners = jobs["plugin"]["strategy"]["matrix"]["runner"]
    assert len(runners) == len(set(runners)) == len(project.PLATFORMS)


def test_the_image_has_an_sbom_and_its_provenance_and_a_base_by_digest(jobs: dict[str, Any]) -> None:
    build = using(jobs["image"], "docker/build-push-action")["with"]
    assert build["sbom"] is True
    assert build["provenance"] == "mode=max"
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert build["file"] == image.DOCKERFILE
    given = {line.partition("=")[0]: line.partition("=")[2] for line in build["build-args"].splitlines()}
    assert given == {"VERSION": "${{ env.VERSION }}", "BASE": "${{ env.BASE }}"}
    assert set(given) == set(image.GIVEN)


def test_the_base_of_the_image_is_the_digest_of_the_dockerfiles_base(jobs: dict[str, Any], tmp_path: Path) -> None:
    (script,) = [step["run"] for step in jobs["image"]["steps"] if "imagetools inspect" in step.get("run", "")]
    digest = "sha256:" + "a" * 64
    (tmp_path / "docker").write_text(
        f'#!/bin/sh\n[ "$4" = docker.io/library/python:3.12-slim-bookworm ] && echo {digest}\n'
    )
    (tmp_path / "docker").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "GITHUB_ENV": str(tmp_path / "env"),
        "GITHUB_REF_NAME": "v1.2.3",
    }
    subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", script], cwd=ROOT, env=environment, check=True, timeout=30)
    assert (tmp_path / "env").read_text().splitlines() == [
        f"BASE=docker.io/library/python:3.12-slim-bookworm@{digest}",
        "VERSION=1.2.3",
    ]


def test_image_charts_and_files_are_signed_by_digest_never_by_tag(jobs: dict[str, Any]) -> None:
    digest = "${{ steps.image.outputs.digest }}"
    assert using(jobs["image"], "actions/attest-build-provenance")["with"]["subject-digest"] == digest
    (signing,) = [step for step in jobs["image"]["steps"] if "cosign sign" in step.get("run", "")]
    assert signing["env"] == {"DIGEST": digest}
    assert shlex.split(signing["run"])[-1] == "$REGISTRY/shoal@$DIGEST"
    # The chart names the image by the same digest; what push-charts signs is in tests/release.
    (packing,) = [step for step in jobs["charts"]["steps"] if "release charts" in step.get("run", "")]
    assert jobs["image"]["outputs"]["digest"] == digest
    assert packing["env"] == {"DIGEST": "${{ needs.image.outputs.digest }}"}
    assert shlex.split(packing["run"])[-2:] == ["--image", "$REGISTRY/shoal@$DIGEST"]
    assert using(jobs["release"], "actions/attest-build-provenance")["with"] == {
        "subject-checksums": "dist/checksums.txt"
    }
    order = [line.split()[-1] for line in runs(jobs["release"]) if "checksums" in line]
    assert order == ["checksums", "dist/checksums.txt"]
    for name in ("image", "charts", "release"):
        using(jobs[name], "sigstore/cosign-installer")


def test_the_plugin_does_not_depend_on_the_runners_python(jobs: dict[str, Any]) -> None:
    assert jobs["plugin"]["env"] == {"UV_PYTHON_PREFERENCE": "only-managed", "UV_PYTHON": "3.12"}


def test_image_and_workflow_use_the_same_uv(workflow: dict[Any, Any]) -> None:
    (version,) = re.findall(r"^ARG UV_VERSION=(.*)$", (ROOT / image.DOCKERFILE).read_text(), re.M)
    assert workflow["env"]["UV_VERSION"] == version
