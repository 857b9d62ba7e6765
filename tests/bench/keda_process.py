"""The process of `bench_keda` inside the lab: the operator's external scaler with answers that the bench sets.

Its last line is JSON.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.controllers.keda.answers import Changed
from shoal.controllers.keda.server import ScalerServer
from shoal.controllers.keda.service import CALLS
from shoal.core.keda import ScalerAnswer
from shoal_dev.lab import network
from shoal_dev.lab.kubeapi import Api, LabReflector

SPACE = "bench"
_LABEL = "shoal-bench"
_SETTLE_SECONDS = 8.0
_WITHIN_SECONDS = 60.0
_SCALED_OBJECTS = f"/apis/keda.sh/v1alpha1/namespaces/{SPACE}/scaledobjects"
_DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SPACE}/deployments"


class FixedAnswers:
    """`Answers`: everything is at zero but for what `push` sets."""

    def __init__(self) -> None:
        self.changed: list[Changed] = []
        self.wanted: dict[str, int] = {}
        self.heard: Counter[str] = Counter()

    def answer(self, namespace: str, name: str) -> ScalerAnswer | None:
        wanted = self.wanted.get(name, 0)
        return ScalerAnswer(active=wanted > 0, replicas=wanted, metric=float(wanted), target=1.0)

    def polled(self, namespace: str, name: str) -> None:
        self.heard[name] += 1

    def push(self, name: str, wanted: int) -> None:
        self.wanted[name] = wanted
        for heard in self.changed:
            heard(SPACE, name)


class Bench:
    """Deployments that ask for nothing that could run, a ScaledObject each."""

    def __init__(self, api: Api, book: FixedAnswers, port: int, polling: int) -> None:
        self._api, self._book, self._port, self._polling = api, book, port, polling
        self.seen: dict[str, int] = {}
        self._news = asyncio.Event()

        def changed(kind: str, item: dict[str, Any]) -> None:
            self.seen[item["metadata"]["name"]] = item["spec"].get("replicas", 1)
            self._news.set()

        self.watch = LabReflector(api, _DEPLOYMENTS, changed)

    async def make(self, name: str) -> None:
        labels = {_LABEL: name}
        container = {"name": "c", "image": "none"}
        template = {"metadata": {"labels": labels}, "spec": {"nodeSelector": {"no": "node"}, "containers": [container]}}
        deployment = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        scaled = {
            "scaleTargetRef": {"name": name},
            "pollingInterval": self._polling,
            "cooldownPeriod": 0,
            "minReplicaCount": 0,
            "maxReplicaCount": 10,
            "triggers": [{"type": "external-push", "metadata": {"scalerAddress": f"{network.HOST}:{self._port}"}}],
        }
        metadata = {"name": name, "namespace": SPACE}
        for path, version, kind, spec in (
            (_DEPLOYMENTS, "apps/v1", "Deployment", deployment),
            (_SCALED_OBJECTS, "keda.sh/v1alpha1", "ScaledObject", scaled),
        ):
            body = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
            await self._api.apply(f"{path}/{name}", body)

    async def until(self, holds: Callable[[], bool], seconds: float = _WITHIN_SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def wakes(self, name: str, count: int, *, at_once: bool) -> list[float]:
        """Seconds from a push to 1 replica, as a watch tells it; back to zero between two.

        `at_once`: each push comes as KEDA has just written zero, when it does not act on most of them. Else a push
        comes at any moment between two of KEDA's polls, the one that wrote zero being a poll or more ago.
        """
        taken: list[float] = []
        moments = random.Random(1)  # noqa: S311
        for _ in range(count):
            if not at_once:
                await asyncio.sleep(self._polling * moments.uniform(1, 2))
            begun = time.monotonic()
            self._book.push(name, 1)
            await self.until(lambda: self.seen.get(name) == 1)
            taken.append(time.monotonic() - begun)
            self._book.push(name, 0)
            await self.until(lambda: self.seen.get(name) == 0)
        return taken


def _calls() -> float:
    return sum(s.value for metric in CALLS.collect() for s in metric.samples if s.name.endswith("_total"))


async def _measure(api: Api, wakes: int, many: int, seconds: float) -> dict[str, Any]:
    book = FixedAnswers()
    server = ScalerServer(book, lambda: True, host=network.HOST, port=0, certificate=None, endpoints=None)
    book.changed.append(server.answer_changed)
    server.need()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(server.run())]
        while server.port is None:
            await asyncio.sleep(0.05)
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
        await api.apply(f"/api/v1/namespaces/{SPACE}", space)
        bench = Bench(api, book, server.port, polling=1)
        running.append(tasks.create_task(bench.watch.run()))
        await bench.make("woken")
        # Until KEDA knows the metric's name a push is dropped, and a stream that it has just lost comes back 2 s later.
        async with asyncio.timeout(_WITHIN_SECONDS):
            while server.streams < 2:
                await asyncio.sleep(0.2)
        await asyncio.sleep(_SETTLE_SECONDS)
        found: dict[str, Any] = {"wakes": await bench.wakes("woken", wakes, at_once=False)}
        found["wakes_at_once"] = await bench.wakes("woken", wakes, at_once=True)
        if many:
            others = Bench(api, book, server.port, polling=5)
            for number in range(many):
                await others.make(f"m{number}")
            async with asyncio.timeout(600):
                while sum(1 for n in range(many) if book.heard[f"m{n}"]) < many:
                    await asyncio.sleep(1)
            await asyncio.sleep(_SETTLE_SECONDS)
            calls, cpu, begun = _calls(), time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            spent = time.monotonic() - begun
            found |= {
                "many": many,
                "calls_per_second": (_calls() - calls) / spent,
                "cpu": (time.process_time() - cpu) / spent,
                "streams": server.streams,
            }
        for task in running:
            task.cancel()
    return found


async def _run(arguments: argparse.Namespace) -> None:
    async with Api(arguments.kubeconfig) as api:
        print(json.dumps(await _measure(api, arguments.wakes, arguments.many, arguments.seconds)))


def main() -> None:
    """The process's entry."""
    parser = argparse.ArgumentParser(prog="keda_process")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--wakes", type=int, required=True)
    parser.add_argument("--many", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
