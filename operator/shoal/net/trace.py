"""Traces, for who wants them: on by OpenTelemetry's own environment variables, off without them.

Off, nothing of OpenTelemetry is even loaded. On, finished spans go through a bounded queue to the SDK's own thread,
which sends them in batches: a collector that is slow or away costs spans, which are counted, and never a request.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from shoal.net.traceexport import TraceExporter

log = structlog.get_logger()

PER_SECOND: Final = "SHOAL_TRACES_PER_SECOND"
"""Traces that a process begins or joins per second at most, whatever sampler and clients ask for."""
_PER_SECOND: Final = 100.0
_RATIOS: Final = ("traceidratio", "parentbased_traceidratio")
_SAMPLERS: Final = ("always_on", "always_off", "parentbased_always_on", "parentbased_always_off", *_RATIOS)


class TracingUnusable(Exception):
    """The environment asks for something that there is not: what, and what to write instead."""


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether traces are configured. Like the SDK's own rules, but without an endpoint nothing is exported.

    Raises:
        Unusable: with what to do.
    """

    def value(*names: str) -> str:
        return next((found for name in names if (found := environ.get(name, "").strip())), "")

    if value("OTEL_SDK_DISABLED").lower() == "true":
        return False
    exporter = value("OTEL_TRACES_EXPORTER").lower()
    endpoint = value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter not in ("", "none", "otlp"):
        raise TracingUnusable(f"OTEL_TRACES_EXPORTER is {exporter!r}: set it to otlp, or to none")
    if exporter == "none" or not (exporter or endpoint):
        return False
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise TracingUnusable(f"the OTLP endpoint is {endpoint!r}: write a URL, such as http://otel-collector:4318")
    protocol = value("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL").lower()
    if protocol not in ("", "http/protobuf"):
        raise TracingUnusable(
            f"the OTLP protocol is {protocol!r}: only http/protobuf is spoken; leave the variable out, and name the "
            "collector's HTTP port, usually 4318"
        )
    sampler, argument = value("OTEL_TRACES_SAMPLER").lower(), value("OTEL_TRACES_SAMPLER_ARG")
    if sampler and sampler not in _SAMPLERS:
        # The SDK would go on with all of them, which is the most expensive reading of a typing error.
        raise TracingUnusable(f"OTEL_TRACES_SAMPLER is {sampler!r}: set it to one of {', '.join(_SAMPLERS)}")
    ratio = _number(argument) if argument else 1.0
    if sampler in _RATIOS and (ratio is None or not 0 <= ratio <= 1):
        raise TracingUnusable(
            f"OTEL_TRACES_SAMPLER_ARG is {argument!r}: {sampler} needs a share from 0 to 1, such as 0.01"
        )
    return True


def per_second(environ: Mapping[str, str]) -> float:
    """The bound on traces per second.

    Raises:
        Unusable: it is no positive number.
    """
    text = environ.get(PER_SECOND, "").strip()
    found = _number(text) if text else _PER_SECOND
    if found is None or not 0 < found < math.inf:
        raise TracingUnusable(f"{PER_SECOND} is {text!r}: set it to a number above 0, such as {_PER_SECOND:g}")
    return found


def from_environment(service: str, registry: CollectorRegistry) -> "TraceExporter | None":
    """What makes this process's spans, with its counts in `registry`; None: nobody wants them, or they are asked for in
    a way that cannot work, which is logged: serving does not hang on traces."""
    try:
        if not wanted(os.environ):
            return None
        bound = per_second(os.environ)
        from shoal.net.traceexport import TraceExporter

        return TraceExporter(service, registry, bound)
    except (TracingUnusable, ValueError, OSError) as error:
        log.error("no traces are exported", why=str(error))
        return None


async def close(tracing: "TraceExporter | None", seconds: float = 3.0) -> None:
    """Sends what waits, for `seconds` at most. The blocking work is the SDK's; it runs in a thread that ends with the
    process."""
    if tracing is None:
        return
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def finished() -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(done.set)

    tracing.shut_down(finished)
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError:
        log.warning("the last traces were not taken in time", seconds=seconds)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
