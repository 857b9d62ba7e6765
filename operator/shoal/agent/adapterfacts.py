"""The adapter facts container: reads the metadata of a batch of adapters and reports it to the operator.

Each adapter has its own timeout and its own line in the answer, and one that takes long gives up its fetch slot, so no
source blocks the others. All lines are reported together when the container ends. Adapters that are not read soon after
the others are therefore pending out; a later Job reads them in a smaller batch. The exit code is 0 whenever there is an
answer.
"""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from shoal.agent.stage.adapter import of_pool
from shoal.api import names, reasons
from shoal.api.adapterfacts import AdapterBatch, AdapterFacts, AdapterToRead
from shoal.api.sources import shown
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, adapter, open_source
from shoal.artifacts.errors import of_os_error
from shoal.artifacts.fetchslots import FetchSlots
from shoal.core.lora.format import facts as answers
from shoal.core.lora.format.sources import credentials_for
from shoal.core.status.observed import ModelProblem

AT_A_TIME = 4
EACH_SECONDS = 180.0
"""Timeout of one adapter."""
SLOT_SECONDS = 5.0
"""An adapter that takes longer gives up its fetch slot."""
IDLE_SECONDS = 20.0
"""How long to wait for a further adapter after the last one was read."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FactsReading:
    """A batch of adapters to read, with credentials and timeouts."""

    batch: AdapterBatch
    secrets: Path = Path(names.ADAPTER_SECRETS_DIR)
    settings: Settings = field(default_factory=Settings)
    seconds: float = EACH_SECONDS
    slot_seconds: float = SLOT_SECONDS
    idle_seconds: float = IDLE_SECONDS


async def read_batch(reading: FactsReading) -> list[tuple[str, answers.Result]]:
    """(key, facts or problem) of each adapter, in the order of the batch."""
    slots = FetchSlots(AT_A_TIME, reading.slot_seconds)
    tasks = [asyncio.create_task(_in_slot(wanted, reading, slots)) for wanted in reading.batch.adapters]
    try:
        pending, timeout = set(tasks), None
        while pending:
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            timeout = reading.idle_seconds
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [
        (wanted.key, _not_read(wanted, reading) if task.cancelled() else task.result())
        for wanted, task in zip(reading.batch.adapters, tasks, strict=True)
    ]


async def _in_slot(wanted: AdapterToRead, reading: FactsReading, slots: FetchSlots) -> answers.Result:
    async with slots.slot():
        return await _read(wanted, reading)


def _not_read(wanted: AdapterToRead, reading: FactsReading) -> ModelProblem:
    what = (
        f"{shown(wanted.uri)} was not read within {reading.idle_seconds:g} s after others that were declared with it: "
        "it is slow, or hangs; it is read again, beside fewer and with more time"
    )
    log.error("adapter.not_read", uri=shown(wanted.uri), reason=reasons.SOURCE_UNREACHABLE, problem=what)
    return ModelProblem(reasons.SOURCE_UNREACHABLE, what)


async def _read(wanted: AdapterToRead, reading: FactsReading) -> answers.Result:
    try:
        async with asyncio.timeout(reading.seconds):
            found = await read_one(wanted, reading)
    except ArtifactError as error:
        problem = ModelProblem(error.reason, str(of_pool(error)))
    except TimeoutError:
        what = f"{shown(wanted.uri)} was not read within {reading.seconds:g} s: it is too slow, or hangs"
        problem = ModelProblem(reasons.SOURCE_UNREACHABLE, what)
    except OSError as error:
        translated = of_os_error(error, f"reading {shown(wanted.uri)}")
        problem = ModelProblem(translated.reason, str(translated))
    except Exception as error:
        # A source that nobody thought of: the others of the batch are read whatever it is.
        log.exception("adapter.read_broke", uri=shown(wanted.uri))
        what = f"{shown(wanted.uri)} cannot be read: {type(error).__name__}"
        problem = ModelProblem(reasons.SOURCE_UNREACHABLE, what)
    else:
        log.info("adapter.read", uri=shown(wanted.uri), revision=found.revision, rank=found.rank)
        return found
    log.error("adapter.not_read", uri=shown(wanted.uri), reason=problem.reason, problem=problem.message)
    return problem


async def read_one(wanted: AdapterToRead, reading: FactsReading) -> AdapterFacts:
    """Reads config and weights header; an archive is fetched first. Raises ArtifactError and OSError."""
    index = credentials_for(wanted.uri, reading.batch.credentials)
    folder = reading.secrets / str(index)
    credentials = StoreCredentials() if index is None else await asyncio.to_thread(StoreCredentials.read, folder)
    async with open_source(wanted.uri, credentials, reading.settings) as source:
        manifest = await source.manifest()
        if not manifest.archive:
            found = await adapter.read_adapter(source, manifest)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                await adapter.fetch_adapter(source, manifest, Path(scratch), reading.batch.max_bytes)
                arguments = (Path(scratch), manifest.source, manifest.digest, manifest.revision)
                found = await asyncio.to_thread(adapter.read_folder, *arguments)
        if wanted.digest is not None and (digest := await adapter.content_digest(source, manifest)) != wanted.digest:
            raise ArtifactError(
                reasons.DIGEST_MISMATCH,
                f"{shown(wanted.uri)} has digest {digest}, but spec.source.digest says {wanted.digest}: either the "
                "source changed, or the digest is not its own",
            )
        return found


def run_batch(reading: FactsReading, write_termination: Callable[[str], None]) -> int:
    """Runs the container: reads the batch, writes the termination message, returns the exit code."""
    write_termination(answers.message(asyncio.run(read_batch(reading))))
    return 0
