"""The process: load, open the port, serve, stop or die.

The port is closed until the engine is ready. One SIGTERM while it loads is swallowed. A dead engine exits with 0.
"""

import asyncio
import signal
from typing import Final, cast

import structlog
import uvicorn
from uvicorn.config import ASGIApplication  # pyright: ignore[reportPrivateImportUsage]

from shoal_dev.sim.journal import Journal
from shoal_dev.sim.server import KEEP_ALIVE_SECONDS, QuietServer, listen
from shoal_dev.sim.vllm.app import App
from shoal_dev.sim.vllm.args import VLLMArgs
from shoal_dev.sim.vllm.engine import VLLMEngine

_log = structlog.get_logger()
_LINGER: Final = 0.3
"""From the engine's death to the closed port."""


async def serve(args: VLLMArgs) -> int:
    """Runs until told to stop, or until the engine dies; the exit code."""
    loop = asyncio.get_running_loop()
    told: list[float] = []

    def swallowed() -> None:
        told.append(loop.time())
        _log.warning("SIGTERM while loading", times=len(told))
        if len(told) > 1:
            # The first one is lost, a further one ends the start.
            loop.remove_signal_handler(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    seconds = args.engine.load_seconds + args.engine.warmup_seconds
    with Journal(args.engine.journal, live=True) as journal:
        loop.add_signal_handler(signal.SIGTERM, swallowed)
        _log.info("loading", model=args.names[0], gpu=args.engine.gpu, speed=args.engine.speed, seconds=seconds)
        engine = VLLMEngine(args, journal=journal)
        if engine.adapters is not None:
            await engine.adapters.preload()
        await asyncio.sleep(min(seconds, args.ready_timeout))
        if seconds > args.ready_timeout:
            raise ValueError(f"Timed out waiting for engine core processes to start: {args.ready_timeout} s")
        return await _serve(args, engine)


async def _serve(args: VLLMArgs, engine: VLLMEngine) -> int:
    config = uvicorn.Config(
        cast(ASGIApplication, App(engine)),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        backlog=2048,
    )
    server, stopped = QuietServer(config), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not stopped.is_set():
            _log.info("SIGTERM", timeout=args.shutdown_timeout)
            engine.journal.ended("sigterm")
            engine.draining = True
            stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    listener = listen(args.engine.host, args.engine.port)
    try:
        async with asyncio.TaskGroup() as group:
            turning = group.create_task(engine.turn())
            serving = group.create_task(server.serve(sockets=[listener]))
            engine.warmed_up()
            _log.info("ready", host=args.engine.host, port=args.engine.port, blocks=engine.blocks.blocks)
            engine.journal.ended("ready")
            await _until_over(args, engine, stopped)
            _log.info("exiting")
            engine.journal.ended("exiting")
            server.should_exit = True
            await serving
            turning.cancel()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        listener.close()
        if engine.traces is not None:
            await asyncio.to_thread(engine.traces.close)
    return 0


async def _until_over(args: VLLMArgs, engine: VLLMEngine, stopped: asyncio.Event) -> None:
    """Returns when the process should end. What was taken on is finished within the timeout, and cut after it."""
    died, told = asyncio.create_task(engine.died.wait()), asyncio.create_task(stopped.wait())
    await asyncio.wait({died, told}, return_when=asyncio.FIRST_COMPLETED)
    if not engine.died.is_set():
        try:
            async with asyncio.timeout(args.shutdown_timeout):
                await engine.finished()
        except TimeoutError:
            _log.warning("cutting what still runs")
            engine.stop_all()
    died.cancel()
    told.cancel()
    await asyncio.sleep(_LINGER)
