"""The process: load, open the port, warm up, serve, drain."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from typing import cast

import structlog
import uvicorn
from uvicorn.config import ASGIApplication  # pyright: ignore[reportPrivateImportUsage]

from shoal_dev.sim.app import App
from shoal_dev.sim.args import EngineArgs
from shoal_dev.sim.engine import SimEngine
from shoal_dev.sim.journal import Journal

_log = structlog.get_logger()
KEEP_ALIVE_SECONDS = 5
"""As SGLang: shorter than most clients keep idle connections."""


class QuietServer(uvicorn.Server):
    """A server that leaves signals alone: SIGTERM must not close the port."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(args: EngineArgs) -> int:
    """Runs until told to stop; the exit code."""
    # Until the port is open SIGTERM kills, as it kills an SGLang that is still loading.
    _log.info("loading", model=args.served_model_name, gpu=args.gpu, speed=args.speed, seconds=args.load_seconds)
    with Journal(args.journal) as journal:
        engine = SimEngine(args, journal=journal)
        if engine.lora is not None:
            await engine.lora.preload()
        await asyncio.sleep(args.load_seconds)
        return await _serve(args, engine)


async def _serve(args: EngineArgs, engine: SimEngine) -> int:
    config = uvicorn.Config(
        cast(ASGIApplication, App(engine)),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        backlog=2048,
    )
    server = QuietServer(config)
    listener = listen(args.host, args.port)
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def drain() -> None:
        _log.info("SIGTERM: unready, draining")
        engine.journal.ended("sigterm")
        engine.draining = True

    loop.add_signal_handler(signal.SIGTERM, drain)
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]))
            turning = group.create_task(engine.loop.run())
            _log.info("port open", host=args.host, port=args.port, kv_tokens=engine.scheduler.kv.capacity)
            await asyncio.sleep(args.warmup_seconds)
            engine.warmed_up()
            _log.info("ready")
            engine.journal.ended("ready")
            await _until_drained(engine, interrupted, args.drain_poll_seconds)
            _log.info("exiting")
            engine.journal.ended("exiting")
            server.should_exit = True
            await serving
            turning.cancel()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        listener.close()
        if engine.traces is not None:
            await asyncio.to_thread(engine.traces.close)
    return 0


async def _until_drained(engine: SimEngine, interrupted: asyncio.Event, poll_seconds: float) -> None:
    """Returns when told to stop and nothing is left to do. New requests are still accepted: only Kubernetes can turn
    them away, and steady traffic therefore prolongs the drain, as it does with SGLang."""
    # An engine whose health check failed does not wait for what it cannot finish.
    while not (engine.draining and (not engine.busy or engine.status == "UnHealthy")):
        try:
            async with asyncio.timeout(poll_seconds):
                await interrupted.wait()
        except TimeoutError:
            continue
        return


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio switches Nagle's algorithm off only where it reads TCP, and with it a kept
    # connection would answer 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
