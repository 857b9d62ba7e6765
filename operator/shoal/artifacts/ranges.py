"""Reads and downloads files by byte ranges: in parallel, resumed after broken connections, verified."""

import asyncio
import contextlib
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import structlog

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError, Interrupted, NoRanges, gib, is_full, of_os_error, require_space
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.part import Part, Span
from shoal.artifacts.source import Settings
from shoal.artifacts.threads import in_thread

_SAVE_SECONDS = 2.0
"""Interval at which missing spans are noted: what a killed process fetched after the last note is fetched again."""

_Result = TypeVar("_Result")

log = structlog.get_logger()


async def with_retries(settings: Settings, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    """Retries interrupted attempts up to `settings.attempts` times. Raises the last Interrupted."""
    failures = 0
    while True:
        try:
            return await attempt()
        except Interrupted as error:
            failures += 1
            if failures >= settings.attempts:
                raise
            log.info("source.retry", problem=str(error))
        await asyncio.sleep(settings.pause_seconds * 2**failures)


async def paced(settings: Settings, pieces: AsyncGenerator[bytes], name: str) -> AsyncGenerator[bytes]:
    """The same pieces. Raises Interrupted when the server is too slow, though not silent."""
    loop = asyncio.get_running_loop()
    since, came = loop.time(), 0
    async for piece in pieces:
        came += len(piece)
        yield piece
        if (now := loop.time()) - since >= settings.stall_seconds:
            if came < settings.slow_bytes:
                raise Interrupted(f"{name} arrives at {came} bytes in {settings.stall_seconds:g} s, which is too slow")
            since, came = now, 0


@dataclass(slots=True)
class _Segment:
    """A range that one connection fetches. `at` is the position."""

    at: int
    end: int
    since: float = 0.0
    """Start of its latest connection, by the loop's clock."""


class RangedSource(ABC):
    """Base of sources: implements reading and downloading on top of `stream`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._free = asyncio.Semaphore(settings.connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    @abstractmethod
    async def manifest(self) -> Manifest: ...

    @abstractmethod
    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]: ...

    async def authorise(self, manifest: Manifest) -> None:
        await self.read(max(manifest.files, key=lambda file: file.size), 0, 1)

    async def read(self, file: File, start: int, length: int) -> bytes:
        content = bytearray()
        end = min(start + length, file.size)

        async def attempt() -> None:
            async with self._free, contextlib.aclosing(self.stream(file, start + len(content), end)) as pieces:
                async for piece in paced(self.settings, pieces, file.name):
                    content.extend(piece[: end - start - len(content)])
                    if len(content) >= end - start:
                        return
            raise Interrupted(f"{file.name} broke off after {start + len(content)} of {file.size} bytes")

        if start < end:
            await with_retries(self.settings, attempt)
        return bytes(content)

    async def download(self, file: File, path: Path, on_bytes: Callable[[int], None]) -> None:
        await Download(self, file, path, self._free, on_bytes).run()


class Download:
    """The download of one file."""

    def __init__(
        self, source: RangedSource, file: File, path: Path, free: asyncio.Semaphore, on_bytes: Callable[[int], None]
    ) -> None:
        self._source, self._settings, self._file, self._path = source, source.settings, file, path
        self._free, self._on_bytes = free, on_bytes
        self._part = Part(path, file)
        self._waiting: deque[_Segment] = deque()
        self._segments: list[_Segment] = []
        self._whole = not file.validator
        """Whether to use one connection and restart after a break: the server does not support ranges, or provides no
        validator that proves two ranges to be of one version."""

    async def run(self) -> None:
        """Raises ArtifactError."""
        try:
            problem = await self._once() and await self._once()
        except OSError as error:
            raise self._explain(error) from error
        finally:
            await in_thread(self._part.close)
        if problem:
            raise ArtifactError(
                reasons.DIGEST_MISMATCH,
                f"{self._file.name} arrived twice with another content than the source promises: {problem}. "
                "Upload the file again",
            )

    async def _once(self) -> str | None:
        """Fetches the missing spans and verifies the file. Returns the problem, if any; the file is then deleted."""
        try:
            await self._fetch()
        except NoRanges:
            await self._discard()
            self._whole = True
            await self._fetch()
        # Only reads, which takes minutes for a large file: cancellation does not wait for it.
        problem = await asyncio.to_thread(self._part.problem)
        if problem is None:
            await in_thread(self._part.finish)
            return None
        log.warning("source.corrupt", file=self._file.name, problem=problem)
        await self._discard()
        return problem

    async def _fetch(self) -> None:
        missing = await in_thread(self._part.open)
        self._on_bytes(self._file.size - sum(end - start for start, end in missing))
        await asyncio.to_thread(
            require_space, self._path.parent, sum(end - start for start, end in missing), self._settings.disk_advice
        )
        step = max(self._file.size, 1) if self._whole else self._settings.segment_bytes
        self._segments = [_Segment(at, min(at + step, end)) for start, end in missing for at in range(start, end, step)]
        self._waiting = deque(self._segments)
        ended = asyncio.Event()
        saving = asyncio.create_task(self._save_until(ended))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(self._segments), self._settings.connections)):
                    group.create_task(self._work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            # Not cancelled: a note that is being written in its thread would overlap with the next one.
            ended.set()
            await saving

    async def _work(self) -> None:
        while self._waiting:
            segment = self._waiting.popleft()
            failures = 0
            while segment.at < segment.end:
                before = segment.at
                try:
                    await self._transfer(segment)
                except Interrupted as error:
                    enough = self._required_bytes(asyncio.get_running_loop().time() - segment.since)
                    failures = 0 if segment.at - before >= enough and not self._whole else failures + 1
                    if failures >= self._settings.attempts:
                        raise
                    log.info("source.retry", file=self._file.name, at=segment.at, problem=str(error))
                    await asyncio.sleep(self._settings.pause_seconds * 2**failures)
                    if self._whole:
                        self._on_bytes(-segment.at)
                        segment.at = 0

    def _required_bytes(self, seconds: float) -> int:
        """Bytes that a connection must have fetched in `seconds` to count as progress.

        This is the pace of `paced`, including the pause before the next attempt. A server that sends single bytes is
        given up, while a file still arrives through a proxy that cuts each connection after some KiB.
        """
        settings = self._settings
        share = min(1.0, (seconds + settings.pause_seconds) / settings.stall_seconds)
        return max(1, min(int(settings.slow_bytes * share), settings.segment_bytes // 4))

    async def _transfer(self, segment: _Segment) -> None:
        segment.since = asyncio.get_running_loop().time()
        async with self._free, contextlib.aclosing(self._source.stream(self._file, segment.at, segment.end)) as pieces:
            segment.since = asyncio.get_running_loop().time()  # excludes the wait for a free connection
            async for piece in paced(self._settings, pieces, self._file.name):
                piece = piece[: segment.end - segment.at]
                await in_thread(partial(self._part.write, segment.at, piece))
                segment.at += len(piece)
                self._on_bytes(len(piece))
                if segment.at >= segment.end:
                    break
        if segment.at < segment.end:
            raise Interrupted(f"{self._file.name} broke off after {segment.at} of {self._file.size} bytes")

    async def _save_until(self, ended: asyncio.Event) -> None:
        """Notes the missing spans periodically, and at the end; also while a connection is silent."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SAVE_SECONDS):
                    await ended.wait()
            # Read before the bytes are synced: bytes that arrive meanwhile are fetched again, which is harmless.
            missing: list[Span] = [(s.at, s.end) for s in self._segments if s.at < s.end]
            if not self._whole and (missing or len(self._segments) > 1):
                await in_thread(partial(self._part.save, missing))
            if ended.is_set():
                return

    async def _discard(self) -> None:
        self._on_bytes(-(self._file.size - sum(s.end - s.at for s in self._segments)))
        await in_thread(self._part.discard)

    def _explain(self, error: OSError) -> ArtifactError:
        if is_full(error):
            missing = sum(s.end - s.at for s in self._segments)
            free = shutil.disk_usage(self._path.parent).free
            return ArtifactError(
                reasons.DISK_FULL,
                f"no space left while fetching {self._file.name}: {gib(missing)} of it are still to come and "
                f"{gib(free)} are free: {self._settings.disk_advice}",
            )
        return of_os_error(error, f"writing {self._file.name}")
