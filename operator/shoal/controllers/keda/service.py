"""The five methods of KEDA's external scaler protocol, answered from memory.

What KEDA does with them (2.21): each poll, and each sync of the HPA, calls GetMetrics and IsActive; an error of any of
them, UNAVAILABLE included, makes it keep the replicas that there are. It sets no deadline, so nothing here may wait.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Final, NoReturn

import grpc.aio
import prometheus_client

from shoal.controllers.keda.answers import Answers
from shoal.controllers.keda.protocol import externalscaler_pb2 as pb
from shoal.controllers.keda.protocol import externalscaler_pb2_grpc as rpc
from shoal.core.keda import ScalerAnswer

METRIC: Final = "replicas"
"""Name of the one metric; KEDA puts `s0-` before it."""
FIRST_PUSH_SECONDS: Final = 0.25
PUSH_SECONDS: Final = 1.0
"""KEDA drops a push for whose ScaledObject it knows no metric yet, and says nothing: so it is pushed again, soon at
first, since a request waits, and then every second."""
SETTLED_PUSH_SECONDS: Final = 15.0
"""The same once replicas stand: each push costs KEDA a write of the ScaledObject's status, of which it does 20 a second
by default."""
TICK_SECONDS: Final = 0.25

CALLS = prometheus_client.Counter(
    "shoal_keda_calls",
    "Calls of KEDA to the external scaler. A stream counts when it is opened.",
    ["method", "outcome"],
)
PUSHES = prometheus_client.Counter("shoal_keda_pushes", "Wakes from zero that were pushed to KEDA.")
STREAMS = prometheus_client.Gauge("shoal_keda_streams", "Open streams of KEDA to the external scaler.", ["method"])

Key = tuple[str, str]
"""Namespace and name of a ScaledObject."""
Context = grpc.aio.ServicerContext[Any, Any]

_ACTIVE, _IDLE = pb.IsActiveResponse(result=True), pb.IsActiveResponse(result=False)


class _Stream:
    """One open stream: `news` wakes it."""

    __slots__ = ("due", "news")

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.due = math.inf
        """When it wants to be woken in any case, on the loop's clock."""


class ScalerService(rpc.ExternalScalerServicer):
    """`run` it while this process leads; what it is asked before or after that it does not answer."""

    def __init__(self, answers: Answers, certain: Callable[[], bool]) -> None:
        """`certain`: whether this process is sure to lead, asked before each answer."""
        self._answers, self._certain = answers, certain
        self._streams: dict[Key, set[_Stream]] = {}
        self._greeted: set[Key] = set()
        self._running = False

    @property
    def streams(self) -> int:
        """Open ones."""
        return sum(map(len, self._streams.values()))

    async def run(self) -> None:
        """Pushes again what has to be, until cancelled; then the streams end. One timer for all of them."""
        loop = asyncio.get_running_loop()
        self._greeted.clear()
        self._running = True
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                now = loop.time() + TICK_SECONDS / 2
                for streams in self._streams.values():
                    for stream in streams:
                        if stream.due <= now:
                            stream.news.set()
        finally:
            self._running = False
            for streams in self._streams.values():
                for stream in streams:
                    stream.news.set()

    # --- the protocol -----------------------------------------------------------------------------------------------

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        answer = await self._ask("IsActive", request, context)
        return _ACTIVE if answer.active else _IDLE

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        return _spec(await self._ask("GetMetricSpec", request, context))

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        answer = await self._ask("GetMetrics", request.scaledObjectRef, context)
        whole = math.ceil(answer.metric)
        value = pb.MetricValue(metricName=METRIC, metricValue=whole, metricValueFloat=answer.metric)
        return pb.GetMetricsResponse(metricValues=[value])

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> AsyncIterator[pb.IsActiveResponse]:
        """A ScaledObject's first stream of a term ends at once and well, and KEDA opens another one 2 s later: its wait
        before that doubles with each stream that ended badly, up to a minute, and nothing else sets it back."""
        loop = asyncio.get_running_loop()
        key = (request.namespace, request.name)
        first = key not in self._greeted
        self._greeted.add(key)
        sent: bool | None = None
        pause = FIRST_PUSH_SECONDS
        with self._open("StreamIsActive", key) as stream:
            while self._running:
                stream.news.clear()
                stream.due = math.inf
                answer = self._known(key)
                if answer is not None and (answer.active or answer.active != sent):
                    sent = answer.active
                    if answer.active:
                        PUSHES.inc()
                        stream.due = loop.time() + (SETTLED_PUSH_SECONDS if answer.above_zero else pause)
                        pause = min(PUSH_SECONDS, 2 * pause)
                    else:
                        pause = FIRST_PUSH_SECONDS
                    yield _ACTIVE if answer.active else _IDLE
                if first:
                    return
                await stream.news.wait()

    async def StreamMetricSpec(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.GetMetricSpecResponse]:
        key = (request.namespace, request.name)
        sent: float | None = None
        with self._open("StreamMetricSpec", key) as stream:
            while self._running:
                stream.news.clear()
                answer = self._known(key)
                if answer is not None and answer.target != sent:
                    sent = answer.target
                    yield _spec(answer)
                await stream.news.wait()

    # --- what they have in common -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self, method: str, key: Key) -> Generator[_Stream]:
        CALLS.labels(method, "ok").inc()
        STREAMS.labels(method).inc()
        self._answers.polled(*key)
        stream = _Stream()
        self._streams.setdefault(key, set()).add(stream)
        try:
            yield stream
        finally:
            STREAMS.labels(method).dec()
            self._streams[key].discard(stream)
            if not self._streams[key]:
                del self._streams[key]

    def answer_changed(self, namespace: str, name: str) -> None:
        """The answer for a ScaledObject is another one: its open streams send it at once."""
        for stream in self._streams.get((namespace, name), ()):
            stream.news.set()

    def _known(self, key: Key) -> ScalerAnswer | None:
        return self._answers.answer(*key) if self._certain() else None

    async def _ask(self, method: str, ref: pb.ScaledObjectRef, context: Context) -> ScalerAnswer:
        if not self._running or not self._certain():
            await self._refuse(method, context, "this operator does not lead, and its successor will be asked next")
        self._answers.polled(ref.namespace, ref.name)
        answer = self._answers.answer(ref.namespace, ref.name)
        if answer is None:
            await self._refuse(
                method,
                context,
                f"nothing is decided for ScaledObject {ref.namespace}/{ref.name}: the replicas stay as they are until "
                "then. Shoal answers for the ScaledObjects that it made itself, of Models with spec.scaling.driver "
                "KEDA; `kubectl shoal why` tells of each",
            )
        CALLS.labels(method, "ok").inc()
        return answer

    async def _refuse(self, method: str, context: Context, why: str) -> NoReturn:
        CALLS.labels(method, "unavailable").inc()
        await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        raise AssertionError("abort raises")


def _spec(answer: ScalerAnswer) -> pb.GetMetricSpecResponse:
    size = pb.MetricSpec(metricName=METRIC, targetSize=max(1, round(answer.target)), targetSizeFloat=answer.target)
    return pb.GetMetricSpecResponse(metricSpecs=[size])
