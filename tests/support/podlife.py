"""The life-cycle suite's cluster, pods and timelines.

The suite runs on a process node of a lab of its own by default. With SHOAL_LIFECYCLE_LAB and SHOAL_LIFECYCLE_NODE it
runs on that node of a lab that is there, such as one with a real kubelet (`python -m tests.kubelet`); with
SHOAL_LIFECYCLE_KUBECONFIG on any cluster, where SHOAL_LIFECYCLE_NODE may name a node too. SHOAL_LIFECYCLE_IMAGE is an
image that has python3; SHOAL_LIFECYCLE_PARALLEL and _TIMEOUT are for machines that start containers slowly.
"""

import asyncio
import codecs
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

APP = (Path(__file__).parent / "podlife_app.py").read_text()
Json = dict[str, Any]

MISSED_SECONDS = 20.0
"""Between two looks for pods that went while no watch was there. An API server ends the watch of a client that reads
too slowly, as on a busy machine, and the next one begins with what is there then."""


@dataclass(frozen=True)
class Entry:
    time: float
    """Unix seconds: of the event itself for containers, of the watch's delivery for the API."""
    who: str
    """A container's name, or api, slice, event, test."""
    what: str


@dataclass
class Timeline:
    """What happened around one pod."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, who: str, what: str, at: float | None = None) -> None:
        self.entries.append(Entry(at or time.time(), who, what))

    def find(self, who: str, what: str) -> list[float]:
        return sorted(entry.time for entry in self.entries if entry.who == who and what in entry.what)

    def at(self, who: str, what: str, nth: int = 0) -> float:
        """When it happened; fails with the whole timeline when it did not."""
        found = self.find(who, what)
        if len(found) <= nth:
            raise AssertionError(f"{who} {what!r} number {nth + 1} never happened:\n{self}")
        return found[nth]

    def in_order(self, *steps: tuple[str, str]) -> None:
        """Asserts that the first happening of each step is not before that of the step in front of it."""
        times = [self.at(*step) for step in steps]
        assert times == sorted(times), f"wrong order of {steps}:\n{self}"

    def never(self, who: str, what: str) -> None:
        assert not self.find(who, what), f"{who} {what!r} must not happen:\n{self}"

    def __str__(self) -> str:
        ordered = sorted(self.entries, key=lambda entry: entry.time)
        start = ordered[0].time if ordered else 0.0
        return "\n".join(f"{entry.time - start:8.2f}  {entry.who:10} {entry.what}" for entry in ordered)


@dataclass(frozen=True)
class Node:
    """The machine under the pods, as far as a test may lay hands on it. Each call blocks."""

    name: str
    restart_kubelet: Callable[[], None]
    """Of the node; its containers run on."""
    kill: Callable[[], None]
    start: Callable[[], None]


class Cluster:
    """One namespace of a cluster, with a collector pod; everything by kubectl, so that any cluster will do."""

    def __init__(self, kubectl: str, environment: dict[str, str], node: Node | None = None) -> None:
        self._kubectl = kubectl
        self._environment = environment
        self.namespace = f"podlife-{secrets.token_hex(3)}"
        self.image = os.environ.get("SHOAL_LIFECYCLE_IMAGE", "shoal")
        self.node = node
        name = node.name if node else os.environ.get("SHOAL_LIFECYCLE_NODE")
        self.node_selector: Json = {"kubernetes.io/hostname": name} if name else {}
        self.collector_selector: Json = {}
        """The collector must outlive the node that the test switches off."""
        self.collector = ""
        self.timelines: dict[str, Timeline] = {}
        self.pods: dict[str, Json] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._seen: dict[str, Json] = {}

    async def kubectl(self, *arguments: str, stdin: str = "", check: bool = True) -> str:
        process = await asyncio.create_subprocess_exec(
            self._kubectl,
            "--namespace",
            self.namespace,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        async with asyncio.timeout(120):
            out, errors = await process.communicate(stdin.encode())
        if check and process.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {errors.decode()}")
        return out.decode()

    async def start(self) -> None:
        await self.kubectl("create", "namespace", self.namespace)
        await self.until_async(lambda: self.kubectl("get", "serviceaccount", "default", check=False))
        await self.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "collector"},
                "spec": {
                    "containers": [self.container("collector", 1)],
                    "terminationGracePeriodSeconds": 1,
                    "tolerations": [{"operator": "Exists"}],
                    **({"nodeSelector": self.collector_selector} if self.collector_selector else {}),
                },
            }
        )
        await self.kubectl("wait", "--for=condition=Ready", "pod/collector", "--timeout=110s")
        self.collector = await self.kubectl("get", "pod", "collector", "-o", "jsonpath={.status.podIP}")
        for kind, hear in (("pods", self._on_pod), ("endpointslices", self._on_slice), ("events", self._on_event)):
            self._watches.append(asyncio.create_task(self._watch(kind, hear)))
        self._watches.append(asyncio.create_task(self._hear_of_missed_ends()))

    async def stop(self) -> None:
        """Fills in what the containers told, and removes the namespace."""
        for line in (await self.kubectl("logs", "collector")).splitlines():
            told: Json = json.loads(line)
            rest = {k: v for k, v in told.items() if k not in ("time", "pod", "container", "event")}
            if told["pod"] in self.timelines:
                text = " ".join([told["event"], *(f"{key}={value}" for key, value in rest.items())])
                self.timelines[told["pod"]].add(told["container"], text, told["time"])
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self.kubectl("delete", "namespace", self.namespace, "--wait=false")

    async def create(self, *objects: Json) -> None:
        await self.kubectl(
            "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    async def _watch(self, kind: str, hear: Callable[[str, Json], None]) -> None:
        """Follows a kind until cancelled. A watch may end at any time: another one begins with all that is there."""
        while True:
            process = await asyncio.create_subprocess_exec(
                self._kubectl, "--namespace", self.namespace, "get", kind, "--watch", "--output-watch-events",
                "-o", "json", stdout=asyncio.subprocess.PIPE, env=self._environment, limit=1 << 24,
            )  # fmt: skip
            assert process.stdout is not None
            # A part of the output may end within a character.
            utf8, decoder, text = codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder(), ""
            try:
                while data := await process.stdout.read(1 << 16):
                    text += utf8.decode(data)
                    while text := text.lstrip():
                        try:
                            found, end = decoder.raw_decode(text)
                        except json.JSONDecodeError:
                            break
                        text = text[end:]
                        hear(found["type"], found["object"])
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()
            await asyncio.sleep(1)

    async def _hear_of_missed_ends(self) -> None:
        while True:
            await asyncio.sleep(MISSED_SECONDS)
            heard = set(self.pods)
            try:
                there = await self.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.name}")
            except (AssertionError, TimeoutError):
                continue
            for name in heard - set(there.split()):
                self._on_pod("DELETED", {"metadata": {"name": name}})

    def _changed(self, key: str, name: str, who: str, new: Json) -> None:
        old, self._seen[key] = self._seen.get(key, {}), new
        for what, value in new.items():
            if old.get(what) != value and name in self.timelines:
                self.timelines[name].add(who, f"{what}: {value}")

    def _on_pod(self, kind: str, pod: Json) -> None:
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            self.pods.pop(name, None)
            if name in self.timelines:
                self.timelines[name].add("api", "DELETED")
            return
        self.pods[name] = pod
        status: Json = pod.get("status", {})
        new = {"phase": status.get("phase")}
        new |= {c["type"]: c["status"] for c in status.get("conditions", []) if c["type"] == "Ready"}
        for record in status.get("initContainerStatuses", []) + status.get("containerStatuses", []):
            state, details = next(iter(record["state"].items()), ("-", {}))
            text = f"{state} {details.get('reason', '')} {details.get('exitCode', '')} {details.get('message', '')}"
            new[record["name"]] = f"{text} ready={record['ready']} restarts={record['restartCount']}"
        self._changed(f"pod/{name}", name, "api", new)

    def _on_slice(self, _kind: str, found: Json) -> None:
        name = found["metadata"]["labels"].get("kubernetes.io/service-name", "")
        states = [e["conditions"] for e in found.get("endpoints") or []]
        text = [" ".join(f"{k}={int(bool(s.get(k)))}" for k in ("ready", "serving", "terminating")) for s in states]
        self._changed(f"slice/{found['metadata']['name']}", name, "slice", {"endpoint": text[0] if text else "none"})

    def _on_event(self, _kind: str, event: Json) -> None:
        name = event["involvedObject"]["name"]
        if name in self.timelines:
            self.timelines[name].add("event", f"{event['reason']}: {event['message']}")

    # --- what scenarios do ------------------------------------------------------------------------------------------

    async def until(self, probe: Callable[[], Any], what: str, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if probe():
                    return
            except (KeyError, IndexError, StopIteration, AssertionError):
                pass
            if time.monotonic() > end:
                raise AssertionError(f"timed out: {what}")
            await asyncio.sleep(0.05)

    async def until_async(self, probe: Callable[[], Awaitable[Any]], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not await probe():
                await asyncio.sleep(0.1)

    def ready(self, name: str) -> bool:
        conditions = self.pods[name]["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def status(self, name: str, container: str) -> Json:
        status = self.pods[name]["status"]
        records = status.get("initContainerStatuses", []) + status["containerStatuses"]
        return next(record for record in records if record["name"] == container)

    def node_of(self, name: str) -> str:
        """Where the pod runs."""
        return self.pods[name]["spec"]["nodeName"]

    async def tell(self, name: str, port: int, path: str) -> None:
        """A GET to the pod through the API server; what it answers does not matter (it may die of it)."""
        await self.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{name}:{port}/proxy{path}", check=False
        )

    async def evict(self, name: str) -> None:
        """As `kubectl drain` and other evictors do it."""
        self.timelines[name].add("test", "evicts")
        meta = {"name": name, "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        await self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    async def delete(self, name: str, *options: str) -> None:
        self.timelines[name].add("test", "deletes")
        await self.kubectl("delete", "pod", name, "--wait=false", *options)

    async def gone(self, name: str) -> None:
        await self.until(lambda: name not in self.pods, f"end of pod {name}")

    def container(self, name: str, port: int, env: Json | None = None, **more: Any) -> Json:
        values = {"NAME": name, "PORT": str(port), "COLLECTOR": self.collector} | (env or {})
        own = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        return {
            "name": name,
            "image": self.image,
            "command": ["python3", "-u", "-c", APP],
            "env": [own, *({"name": key, "value": str(value)} for key, value in values.items() if value != "")],
            "ports": [{"containerPort": port}],
            **more,
        }

    def agent(self, env: Json | None = None, **more: Any) -> Json:
        return self.sidecar("agent", 9000, env, **more)

    def sidecar(self, name: str, port: int, env: Json | None = None, **more: Any) -> Json:
        """One that has its handlers in place when the pod goes on: an interpreter that still starts ignores SIGTERM."""
        startup = {
            "httpGet": {"port": port, "path": "/"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 60,
        }
        return self.container(name, port, env, restartPolicy="Always", startupProbe=startup, **more)

    def engine(self, env: Json | None = None, hook: Json | None = None, **more: Any) -> Json:
        probe = {
            "httpGet": {"port": 8000, "path": "/ready"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 1,
        }
        lifecycle = {"lifecycle": {"preStop": hook}} if hook else {}
        return self.container("engine", 8000, env, readinessProbe=probe, **lifecycle, **more)

    def pod(self, name: str, inits: list[Json], engine: Json, grace: int = 10, **more: Any) -> Json:
        self.timelines.setdefault(name, Timeline())
        spec = {
            "terminationGracePeriodSeconds": grace,
            "initContainers": inits,
            "containers": [engine],
            "tolerations": [{"operator": "Exists"}],
            **({"nodeSelector": self.node_selector} if self.node_selector else {}),
            **more,
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def drain(delay: float, code: int = 200, port: int = 9000, **headers: str) -> Json:
    given = [{"name": name.replace("_", "-"), "value": value} for name, value in headers.items()]
    action = {"port": port, "path": f"/drain?delay={delay}&code={code}"}
    return {"httpGet": action | ({"httpHeaders": given} if given else {})}
