"""The chart of a release names its image, and krew's manifest the plugin's archives."""

from pathlib import Path

import pytest
import yaml

from shoal_dev.release import charts, checksums, krew, plugin, project

ROOT = project.root()
VALUES = (ROOT / "charts" / "shoal" / "values.yaml").read_text()
VERSION = project.version(ROOT)
DIGEST = "sha256:" + "a" * 64


def test_the_chart_of_a_release_names_the_images_digest_and_keeps_all_else() -> None:
    changed = charts.with_image(VALUES, f"ghcr.io/fork/shoal@{DIGEST}")
    before, after = yaml.safe_load(VALUES), yaml.safe_load(changed)
    assert after.pop("image") == before.pop("image") | {"repository": "ghcr.io/fork/shoal", "digest": DIGEST}
    assert after == before
    assert len(set(VALUES.splitlines()) - set(changed.splitlines())) == 2


@pytest.mark.parametrize("image", ["ghcr.io/fork/shoal:1.0.0", "ghcr.io/fork/shoal", f"ghcr.io/fork/shoal:1@{DIGEST}x"])
def test_a_chart_names_no_image_without_its_digest(image: str) -> None:
    with pytest.raises(project.ReleaseError, match="charts name no tag"):
        charts.with_image(VALUES, image)


def test_values_of_another_form_are_refused_and_not_left_as_they_are() -> None:
    with pytest.raises(project.ReleaseError, match=r"no `image.repository`"):
        charts.with_image("image: {repository: a, digest: ''}\n", f"a/b@{DIGEST}")


def archives(dist: Path, platforms: tuple[project.Platform, ...]) -> None:
    for platform in platforms:
        (dist / plugin.archive_name(VERSION, platform)).write_bytes(str(platform).encode())


def test_the_manifest_has_each_platforms_archive_and_its_checksum(tmp_path: Path) -> None:
    archives(tmp_path, project.PLATFORMS)
    path, missing = krew.build(ROOT, tmp_path, every_platform=True)
    spec = yaml.safe_load(path.read_text())["spec"]
    assert missing == []
    assert spec["version"] == f"v{VERSION}"
    assert {tuple(row["selector"]["matchLabels"].values()) for row in spec["platforms"]} == {
        ("linux", "amd64"), ("linux", "arm64"), ("darwin", "amd64"), ("darwin", "arm64"),
    }  # fmt: skip
    for row in spec["platforms"]:
        folder, _, name = row["uri"].rpartition("/")
        assert folder == f"{project.REPOSITORY}/releases/download/v{VERSION}"
        assert row["sha256"] == checksums.sha256(tmp_path / name)


def test_a_release_without_one_platforms_archive_has_no_manifest(tmp_path: Path) -> None:
    archives(tmp_path, project.PLATFORMS[:-1])
    with pytest.raises(project.ReleaseError, match=r"for darwin/arm64$"):
        krew.build(ROOT, tmp_path, every_platform=True)
    assert not (tmp_path / krew.FILE).exists()
