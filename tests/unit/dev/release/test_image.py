"""What is checked of the image where none can be built."""

import shutil
from pathlib import Path

import pytest

from shoal_dev.release import image, project

ROOT = project.root()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the Dockerfile reads; the examples' models as an empty folder."""
    for file in (image.DOCKERFILE, ".dockerignore", "pyproject.toml", "uv.lock", "README.md", "LICENSE"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "operator/shoal_dev").mkdir(parents=True)
    shutil.copy(ROOT / "operator/shoal_dev/pyproject.toml", tmp_path / "operator/shoal_dev")
    (tmp_path / "images/shoal/rootfs").mkdir()
    return tmp_path


def test_the_dockerfile_can_be_built_from_the_checkout(checkout: Path) -> None:
    assert image.problems(checkout) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("COPY README.md LICENSE ./", "COPY README.md NOTICE ./", "COPY NOTICE: it does not exist"),
        ("COPY operator operator", "COPY operator/shoal_dev/missing operator", "COPY operator/shoal_dev/missing"),
        ("COPY --from=build", "COPY --from=builder", "COPY --from=builder: no earlier stage"),
        ("FROM ${BASE} AS build", "FROM python:3.12 AS build", "FROM python:3.12: not the base"),
        ("ARG VERSION=dev\n", "", "no ARG VERSION"),
        ("USER 65532:65532", "USER 0", "the last USER"),
        ("USER 65532:65532", "USER nonroot", "the last USER"),
        ('ENTRYPOINT ["shoal"]', "", "no ENTRYPOINT"),
    ],
)
def test_what_would_break_the_build_is_found(checkout: Path, old: str, new: str, said: str) -> None:
    path = checkout / image.DOCKERFILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    (problem,) = image.problems(checkout)
    assert said in problem


def test_a_file_that_dockerignore_leaves_out_is_found(checkout: Path) -> None:
    path = checkout / ".dockerignore"
    path.write_text(path.read_text().replace("!LICENSE\n", ""))
    assert image.problems(checkout) == [f"{image.DOCKERFILE}: COPY LICENSE: .dockerignore leaves it out"]
