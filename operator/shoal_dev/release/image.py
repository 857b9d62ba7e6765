"""What can be checked of the image without building it."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

from dockerfile_parse import DockerfileParser

DOCKERFILE: Final = "images/shoal/Dockerfile"
GIVEN: Final = ("BASE", "VERSION")
"""Build arguments that the release workflow sets."""


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, its value) without comments, continued lines joined."""
    # It reads bytes, whatever its annotation.
    parser: Any = DockerfileParser(fileobj=cast(Any, BytesIO(dockerfile.encode())))
    rows: Sequence[Mapping[str, Any]] = parser.structure
    return [(str(row["instruction"]), str(row["value"])) for row in rows if row["instruction"] != "COMMENT"]


def problems(root: Path) -> list[str]:
    """Why a build would fail, or would not be what a release needs."""
    found = instructions((root / DOCKERFILE).read_text(encoding="utf-8"))
    ignore = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    arguments = {value.partition("=")[0] for name, value in found if name == "ARG"}
    stages: list[str] = []
    wrong: list[str] = []
    for name, value in found:
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            stages.append(stage or str(len(stages)))
            # Each stage on the one base that the workflow gives by digest.
            wrong += [] if base == "${BASE}" else [f"FROM {base}: not the base that the workflow names by digest"]
        elif name in ("COPY", "ADD"):
            wrong += _copy_problems(root, name, value.split(), kept, stages)
    wrong += [f"no ARG {name}, which the workflow sets" for name in GIVEN if name not in arguments]
    users = [value for name, value in found if name == "USER"]
    if not users or not users[-1].split(":")[0].isdigit() or users[-1].split(":")[0] == "0":
        wrong.append("the last USER is not a number other than 0, which pods with runAsNonRoot need")
    if not any(name == "ENTRYPOINT" for name, _ in found):
        wrong.append("no ENTRYPOINT")
    return [f"{DOCKERFILE}: {each}" for each in wrong]


def _copy_problems(
    root: Path, instruction: str, words: Sequence[str], kept: Sequence[str], stages: Sequence[str]
) -> list[str]:
    options = {name: value for name, _, value in (word.partition("=") for word in words if word.startswith("--"))}
    sources = [word for word in words if not word.startswith("--")][:-1]
    if (stage := options.get("--from")) is not None:
        # The last of `stages` is the one being built.
        return [] if stage in stages[:-1] else [f"{instruction} --from={stage}: no earlier stage of this name"]
    wrong: list[str] = []
    for source in (word.rstrip("/") for word in sources):
        if not (root / source).exists():
            wrong.append(f"{instruction} {source}: it does not exist (`make models` makes the examples' models)")
        elif not any(source == each or source.startswith(f"{each}/") for each in kept):
            wrong.append(f"{instruction} {source}: .dockerignore leaves it out")
    return wrong
