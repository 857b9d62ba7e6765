"""The release workflow, which nothing here can run: what of its shape must hold for a release that one can check."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


@pytest.fixture(scope="module")
def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    (job,) = workflow["jobs"].values()
    return job["steps"]


def using(steps: list[dict[str, Any]], action: str) -> dict[str, Any]:
    (found,) = [step for step in steps if step.get("uses", "").startswith(f"{action}@")]
    return found


def test_it_may_write_packages_and_prove_who_it_is_and_no_more(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {
        "contents": "read",
        "packages": "write",
        "id-token": "write",
        "attestations": "write",
    }
    assert set(workflow[True]) == {"push"}, "a pull request starts nothing that has these rights"


def test_every_action_is_of_a_version(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d[\w.]*|[0-9a-f]{40})", step["uses"]), step["uses"]


def test_the_image_has_an_sbom_and_its_provenance_and_a_base_by_digest(steps: list[dict[str, Any]]) -> None:
    build = using(steps, "docker/build-push-action")["with"]
    assert build["sbom"] is True
    assert build["provenance"] == "mode=max"
    assert "BASE=${{ env.BASE }}" in build["build-args"].splitlines()
    (pin,) = [step["run"] for step in steps if "imagetools inspect" in step.get("run", "")]
    assert "BASE=$base@$digest" in pin
    # Each stage of the Dockerfile builds on that argument, and none on an image of its own.
    dockerfile = (ROOT / "images" / "shoal" / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.M)) == {"${BASE}"}
    assert len(re.findall(r"^ARG BASE=", dockerfile, re.M)) == 1


def test_image_and_charts_are_signed_by_digest_never_by_tag(steps: list[dict[str, Any]]) -> None:
    using(steps, "sigstore/cosign-installer")
    attest = using(steps, "actions/attest-build-provenance")["with"]
    assert attest["subject-digest"] == "${{ steps.image.outputs.digest }}"
    signed = [line.split()[-1] for step in steps for line in step.get("run", "").splitlines() if "cosign sign" in line]
    assert len(signed) == 2
    assert all("@$" in subject and ":" not in subject for subject in signed)


def test_the_chart_of_a_release_names_the_images_digest(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    (charts,) = [step["run"] for step in steps if "helm package" in step.get("run", "")]
    script, _, _ = charts.partition("helm registry login")
    values = tmp_path / "charts" / "shoal" / "values.yaml"
    values.parent.mkdir(parents=True)
    values.write_text((ROOT / "charts" / "shoal" / "values.yaml").read_text())
    subprocess.run(
        ["bash", "-eu", "-c", script], cwd=tmp_path, env={"DIGEST": DIGEST, "PATH": "/usr/bin:/bin"}, check=True
    )
    before = yaml.safe_load((ROOT / "charts" / "shoal" / "values.yaml").read_text())
    after = yaml.safe_load(values.read_text())
    assert after.pop("image") == before.pop("image") | {"digest": DIGEST}
    assert after == before
