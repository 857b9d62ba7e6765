"""A fleet with a LoRAPool: what its adapters' Jobs say, and agents that hold what they are told to."""

import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from shoal.agent.stream import AgentStream
from shoal.api import names, reasons
from shoal.api.adapterfacts import BATCH_ENV, AdapterBatch, AdapterFacts
from shoal.api.adapters import DesiredAdapters
from shoal.api.meta import API_VERSION, JsonObject
from shoal.core.lora.format.facts import message
from shoal.core.status.observed import ModelProblem
from shoal.kube.client import KubeClient
from shoal.kube.resources import LORA_ADAPTERS
from shoal.net.hub import Caller
from tests.support.controlplane import FACTS, Fleet
from tests.support.operators import with_condition

WIDTHS: Final = {"layers": 32, "hidden": 4096, "query": 4096, "key": 1024, "feedForward": 14336}
POOLED_FACTS: Final[JsonObject] = FACTS | {"widths": WIDTHS}
_FITS: Final = {"q_proj": (4096, 4096), "v_proj": (4096, 1024)}


def pool(namespace: str, name: str = "pool", *, model: str = "base", **spec: Any) -> JsonObject:
    return {
        "apiVersion": API_VERSION,
        "kind": "LoRAPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"modelRef": {"name": model}, **spec},
    }


def adapter(namespace: str, name: str, uri: str = "", *, pool: str = "pool", **spec: Any) -> JsonObject:
    """Its source says what is found there: see `Sources`."""
    return {
        "apiVersion": API_VERSION,
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "poolRef": {"name": pool},
            "source": {"uri": uri or f"s3://adapters/{name}/v1"},
            "tenants": ["acme"],
            **spec,
        },
    }


def revision_of(uri: str) -> str:
    return "sha256:" + hashlib.sha256(uri.encode()).hexdigest()


def found_at(uri: str, *, rank: int = 16, modules: dict[str, tuple[int, int]] | None = None) -> AdapterFacts:
    changed = modules or _FITS
    return AdapterFacts(
        revision=revision_of(uri),
        rank=rank,
        alpha=32,
        size_bytes=27_000_000,
        file_bytes=27_001_000,
        modules=dict(changed),
        targets=tuple(changed),
        layers=32,
    )


@dataclass
class Sources:
    """What Jobs find, by uri; elsewhere an adapter that fits."""

    known: dict[str, AdapterFacts | ModelProblem] = field(default_factory=dict[str, AdapterFacts | ModelProblem])
    batches: list[list[str]] = field(default_factory=list[list[str]])
    """The uris that each Job read."""
    _pods: set[str] = field(default_factory=set[str])

    def said(self, pod: JsonObject) -> tuple[int, JsonObject]:
        environment = pod["spec"]["containers"][0]["env"]
        batch = AdapterBatch.model_validate_json(next(e["value"] for e in environment if e["name"] == BATCH_ENV))
        if pod["metadata"]["uid"] not in self._pods:  # asked again where its status could not be written
            self._pods.add(pod["metadata"]["uid"])
            self.batches.append([one.uri for one in batch.adapters])
        results = [(one.key, self.known.get(one.uri) or found_at(one.uri)) for one in batch.adapters]
        return 0, json.loads(message(results))


def unreachable(uri: str) -> ModelProblem:
    return ModelProblem(reasons.SOURCE_UNREACHABLE, f"{uri}: no answer")


class PoolAgent:
    """An agent that has loaded its floor as soon as it is told, unless the test says otherwise."""

    def __init__(self, slots: int = 8) -> None:
        self.slots = slots
        self.floors: list[DesiredAdapters] = []
        self.refuses: dict[str, tuple[str, str]] = {}
        """Engine name -> (reason, message) of a load that fails."""
        self.loads = True
        self.start()

    def start(self) -> None:
        """As another process: nobody has told it anything."""
        if hasattr(self, "hub"):
            self.hub.close()
        self.hub = AgentStream()
        self._keys: dict[str, object] = {
            "phase": "ready",
            "engine_boot": "e1",
            "running": 0,
            "waiting": 0,
            "kv_tokens_used": 0,
            "kv_tokens_total": 12_000,
            "prompt_tokens_total": 0,
            "generation_tokens_total": 0,
            "adapter_slots": self.slots - 1,
            "adapter_slots_leased": 0,
        }
        self.hub.update(self._keys)

    @property
    def holds(self) -> list[str]:
        """Engine names of the latest floor."""
        return [a.name for a in self.floors[-1].adapters] if self.floors else []

    def tell(self) -> None:
        """Says what it has."""
        states = {
            name: {"state": "failed", "reason": self.refuses[name][0], "message": self.refuses[name][1]}
            if name in self.refuses
            else {"state": "loaded" if self.loads else "loading"}
            for name in self.holds
        }
        self._keys = self._keys | {"adapters": states}
        self.hub.update(self._keys)

    def app(self) -> web.Application:
        async def replica(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            with self.hub.reader(Caller("operator")) as reader, contextlib.suppress(ConnectionError):
                while True:
                    try:
                        said = await reader.next(1.0)
                    except TimeoutError:
                        said = self.hub.heartbeat()
                    if said is None:
                        return response
                    await response.write(said)
            return response

        async def put(request: web.Request) -> web.Response:
            self.floors.append(DesiredAdapters.model_validate_json(await request.read()))
            self.tell()
            return web.Response(status=204)

        app = web.Application()
        app.router.add_get(names.REPLICA_PATH, replica)
        app.router.add_put(names.ADAPTERS_PATH, put)
        return app


@contextlib.asynccontextmanager
async def pool_agent(host: str, **kw: int) -> AsyncGenerator[PoolAgent]:
    """At the agents' port of this address. Every key is good."""
    agent = PoolAgent(**kw)
    runner = web.AppRunner(agent.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, names.AGENT_PORT).start()
        yield agent
    finally:
        agent.hub.close()
        await runner.cleanup()


async def adapter_with(
    client: KubeClient,
    namespace: str,
    name: str,
    kind: str,
    status: str,
    reason: str | None = None,
    *,
    seconds: float = 90,
) -> JsonObject:
    """Waits for a condition of a LoRAAdapter, as `with_condition`."""
    return await with_condition(client, LORA_ADAPTERS, namespace, name, kind, status, reason, seconds=seconds)


def ready_for_adapters(fleet: Fleet) -> Sources:
    """The fleet's Jobs find models and adapters that go together."""
    sources = Sources()
    fleet.kubelet.said = (0, {"facts": POOLED_FACTS})
    fleet.kubelet.adapters_said = sources.said
    return sources
