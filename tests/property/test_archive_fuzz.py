"""Archives with bytes flipped, cut, doubled and spliced, unpacked under limits of memory and time in a process.

Whatever comes: an answer, nothing outside the target, nothing but files and folders, and no more bytes or entries than
allowed. `SHOAL_FUZZ_ARCHIVES` says how many (default 400)."""

import json
import multiprocessing
import os
import random
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any, cast

from shoal.artifacts import unpacker
from tests.support import bombs
from tests.support.sources import model_files, tar_of

COUNT = int(os.environ.get("SHOAL_FUZZ_ARCHIVES", "400"))
LIMIT, ENTRIES = 1 << 20, 64
MEMORY, SECONDS = 128 << 20, 300


def seeds() -> list[bytes]:
    files = model_files(3000)
    return [
        tar_of(files, "w:"),
        tar_of(files, "w:gz"),
        tar_of(files, "w:bz2"),
        tar_of(files, "w:xz"),
        bombs.zipped(1 << 20),
        bombs.directory(40),
        bombs.sparse(),
        bombs.many(80),
        bombs.zip_link(),
        bombs.linked(tarfile.SYMTYPE, "../.."),
        bombs.linked(tarfile.LNKTYPE, "config.json"),
        bombs.named("a/../../escaped"),
    ]


def mutated(rng: random.Random, kept: list[bytes]) -> bytes:
    content = bytearray(rng.choice(kept))
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(content) or 1)
        match rng.randrange(5):
            case 0:
                content[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del content[at : at + rng.choice((1, 512, len(content)))]
            case 2:
                content[at:at] = content[at : at + rng.choice((1, 512, 1024))]
            case 3:
                other = rng.choice(kept)
                content[at:] = other[rng.randrange(len(other)) :]
            case _:
                content[at : at + 8] = rng.choice((b"77777777", b"\xff" * 8, b"\x80" + b"\xff" * 7, bytes(8)))
    return bytes(content)


def fuzz(folder: str, count: int, seed: int, walls: bool, answers: Any) -> None:
    """In a process of its own, with limits. Leaves what it found in `answers`. Without walls the archives are taken as
    they are: where a changed one leads, nobody knows."""
    unpacker.limit_self(MEMORY, SECONDS, 64 << 20)
    rng, kept = random.Random(seed), seeds()  # noqa: S311 - a fuzz, to be run again
    if not walls:
        take_walls_away()
    told: dict[str, int] = {}
    top = Path(folder)
    for number in range(count):
        target = top / "target"
        target.mkdir()
        (top / "packed").write_bytes(mutated(rng, kept) if walls else kept[number])
        task = {"archive": str(top / "packed"), "target": str(target), "only": [], "limit": LIMIT, "skip": LIMIT}
        answer = unpacker.unpack(task | {"entries": ENTRIES})
        problem = answer.get("problem", "none")
        found = list(target.rglob("*"))
        size = sum(path.lstat().st_blocks * 512 for path in found if path.is_file())
        plain = all(not path.is_symlink() and (path.is_file() or path.is_dir()) for path in found)
        if problem not in ("none", *unpacker.PROBLEMS) or size > LIMIT or len(found) > ENTRIES or not plain:
            problem = f"broke at {number} of seed {seed}: {answer}, {size} bytes, {len(found)} entries"
        if sorted(path.name for path in top.iterdir()) != ["packed", "target"]:
            problem = f"left the folder at {number} of seed {seed}"
        told[problem] = told.get(problem, 0) + 1
        shutil.rmtree(target)
    answers.put(json.dumps(told))


def take_walls_away() -> None:
    cast("Any", unpacker.Unpacker)._inside = lambda self, name: self._target / name
    cast("Any", unpacker.Unpacker)._charge = lambda *_: None
    cast("Any", unpacker.Unpacker)._count = lambda _: None


def answers_of(count: int, walls: bool) -> dict[str, int]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=fuzz, args=(folder, count, 20_26, walls, answers))
        process.start()
        try:
            told: dict[str, int] = json.loads(answers.get(timeout=600))
        finally:
            process.join(30)
            process.kill()
    assert process.exitcode == 0
    assert sum(told.values()) == count
    return told


def test_no_archive_does_harm() -> None:
    told = answers_of(COUNT, walls=True)
    assert not [problem for problem in told if problem.startswith(("broke", "left"))], told
    assert {"none", "invalid", "too-large"} <= set(told), "all kinds are met"


def test_without_its_walls_the_harm_is_noticed() -> None:
    told = " ".join(answers_of(len(seeds()), walls=False))
    assert "left the folder" in told
    assert "broke" in told
