"""Whatever breaks, a download ends with the source's bytes or says why not, and never with others."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.artifacts import ArtifactError, File, Interrupted, Manifest, Settings
from shoal.artifacts.errors import NoRanges
from shoal.artifacts.ranges import RangedSource


class Faulty(RangedSource):
    """Serves `content`; each stream meets the next fault of the list: it breaks after so many bytes, or lies."""

    def __init__(self, content: bytes, faults: list[int | None], *, ranges: bool, fetch_settings: Settings) -> None:
        super().__init__(fetch_settings)
        self.content, self.faults, self.ranges = content, faults, ranges

    async def manifest(self) -> Manifest:
        raise NotImplementedError

    async def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        if not self.ranges and (start, end) != (0, file.size):
            raise NoRanges("it")
        fault = self.faults.pop() if self.faults else end
        if fault is None:
            yield bytes(byte ^ 1 for byte in self.content[start:end])
            return
        stop = min(end, start + fault)
        for at in range(start, stop, 7):
            yield self.content[at : min(at + 7, stop)]
            await asyncio.sleep(0)
        if stop < end:
            raise Interrupted("broke off")


@settings(deadline=None, max_examples=60)
@given(
    content=st.binary(max_size=300),
    faults=st.lists(st.none() | st.integers(0, 120), max_size=12),
    segment=st.integers(1, 200),
    connections=st.integers(1, 5),
    runs=st.integers(1, 4),
    ranges=st.booleans(),
    validator=st.sampled_from(["", "etag:1"]),
)
def test_a_download_gives_the_sources_bytes_or_an_error(
    content: bytes, faults: list[int | None], segment: int, connections: int, runs: int, ranges: bool, validator: str
):
    fetch_settings = Settings(attempts=2, pause_seconds=0.0, connections=connections, segment_bytes=segment)
    file = File("m", len(content), validator, hashlib.sha256(content).hexdigest())
    source = Faulty(content, faults, ranges=ranges, fetch_settings=fetch_settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        for _ in range(runs):
            came: list[int] = []
            try:
                asyncio.run(source.download(file, path, came.append))
            except ArtifactError:
                assert not path.exists()
                assert sum(came) <= len(content)
                continue
            assert path.read_bytes() == content
            assert sum(came) == len(content)
            assert [each.name for each in path.parent.iterdir()] == ["x"]
            return
