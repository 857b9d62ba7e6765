"""A gateway in the test's own process, on a real port, with fake engines behind it."""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import aiohttp

from shoal.api import keys
from shoal.api.replica import ReplicaKeys
from shoal.api.tenant import Tenant
from shoal.core.capabilities import Capability
from shoal.core.fields.kinds import Facts
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.resolveadapters import DeclaredAdapter, DeclaredPool
from shoal.core.routing.routes import DeclaredRoute
from shoal.core.routing.score import ReplicaScores
from shoal.gateway.app import GatewayApp
from shoal.gateway.connections import Pool
from shoal.gateway.directory import Directory
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.shared import Gateway
from shoal.metering.record import UsageRecord
from shoal.metering.spool import UsageSpool
from shoal.metering.spoolreader import SpoolReader
from shoal.net.installkey import KeyRing
from shoal.net.server import HTTPServer, make_server
from shoal.net.stream import ListenerIdentity
from tests.support.rolekeys import give
from tests.support.scripted_engine import ScriptedEngine

API_KEY = "sk-test-acme"
INSTALL_KEY = b"an install key of 32 bytes......"
FACTS = Facts(vocabulary=32_000, context_length=8192, media=frozenset({"image", "audio"}))
ABLE: frozenset[Capability] = frozenset(get_args(Capability))
"""No engine can do all of it: each test says what its scripted engine does."""
MODEL = ServedModel(
    "chat/llama", "uid-llama", "chat/llama", ("llama",), datetime(2026, 1, 1, tzinfo=UTC), ABLE, facts=FACTS
)


def tenant(name: str = "acme", key: str = API_KEY, models: Sequence[str] = ("chat/llama",), **spec: Any) -> Tenant:
    key_fields = {f: spec.pop(f) for f in ("expires", "disabled") if f in spec}
    return Tenant.model_validate(
        {
            "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "externalID": "cus_1",
                "keys": [{"name": "prod", "sha256": hashlib.sha256(key.encode()).hexdigest(), **key_fields}],
                "models": [dict(zip(("namespace", "name"), m.split("/"), strict=True)) for m in models],
                **spec,
            },
        }
    )


def replica(number: int = 1, model: ServedModel = MODEL, **changes: Any) -> Replica:
    namespace, name = model.key.split("/")
    fields: dict[str, Any] = {
        "uid": f"pod-{number}",
        "namespace": namespace,
        "name": f"{name}-{number}",
        "model": model.key,
        "model_uid": model.uid,
        "ip": "127.0.0.1",
        "ready": True,
        "deleting": False,
        "install_key": keys.fingerprint(INSTALL_KEY),
        "gpu_class": "l4-24gb",
        "node": f"node-{number}",
        **changes,
    }
    return Replica(**fields)


class GatewayUnderTest:
    def __init__(
        self, tmp_path: Path, engines: Sequence[ScriptedEngine], *, name: str = "gateway-1", **settings: Any
    ) -> None:
        key_dir = tmp_path / "install-key"
        key_dir.mkdir(exist_ok=True)
        give(key_dir, INSTALL_KEY)
        self.settings = GatewaySettings(keys_dir=key_dir, spool_dir=tmp_path / "spool", **settings)
        self.models = {MODEL.key: MODEL}
        self.tenants = {"acme": tenant()}
        self.pods = {f"chat/llama-{n}": replica(n) for n in range(1, len(engines) + 1)}
        self.ports = {f"pod-{n}": engine.port for n, engine in enumerate(engines, 1)}
        self.ring = KeyRing(key_dir)
        self.ring.refresh()
        self.me = ListenerIdentity(name, "boot-of-the-gateway")
        self.prompt_sent: Callable[[str, bytes], None] = lambda _uid, _marks: None
        """Called with a pod's uid and the marks of a prompt that goes there, if it was chosen by score."""
        self.fleet = ReplicaPool(
            self.ring,
            self.me,
            scores=ReplicaScores() if self.settings.routing == "Seconds" else None,
            prompt_sent=self._sent,
        )
        self.metrics = GatewayMetrics()
        self.spool = UsageSpool(self.settings.spool_dir, when_full=self.settings.when_spool_full)
        self.pool = Pool(keep_alive=4.0, connect_timeout=10.0)  # patient: an engine and several gateways share the loop
        self.agents = Pool(keep_alive=30.0, connect_timeout=10.0)
        self.pools: dict[str, DeclaredPool] = {}
        self.adapters: dict[str, DeclaredAdapter] = {}
        self.routes: dict[str, DeclaredRoute] = {}
        self.directory = Directory(
            self.models, self.tenants, self.pods, pools=self.pools, adapters=self.adapters, routes=self.routes
        )
        self.app = Gateway(
            self.settings,
            self.directory,
            self.fleet,
            self.ring,
            self.spool,
            self.pool,
            self.metrics,
            identity=self.me,
            agents=self.agents,
            engine_port=lambda r: self.ports[r.uid],
        )
        self.ready = True
        """As /healthz answers."""
        self.server: HTTPServer = make_server(
            GatewayApp(self.app, lambda: self.ready),
            host="127.0.0.1",
            port=0,
            keep_alive=5,
            max_head_bytes=self.settings.max_head_bytes,
            head_seconds=self.settings.body_seconds,
            tls_cert=self.settings.tls_cert,
            tls_key=self.settings.tls_key,
            stop_seconds=10,
        )
        self.session: aiohttp.ClientSession

    def _sent(self, uid: str, marks: bytes) -> None:
        self.prompt_sent(uid, marks)

    def changed(self) -> None:
        for source in ("models", "tenants", "pods", "routes"):
            self.directory.mark(source)
        self.directory.rebuild()
        self.app.canaries.follow(self.directory.snapshot.model_index.routes.values())
        self.app.externals.follow(self.directory.snapshot.model_index.routes.values())
        self.app.quotas.retain_routes({route.uid for route in self.directory.snapshot.model_index.routes.values()})

    def model(self, **changes: Any) -> None:
        """Changes what is known of the Model."""
        self.models[MODEL.key] = dataclasses.replace(self.models[MODEL.key], **changes)
        self.changed()

    def hear(self, number: int, **said: Any) -> None:
        fields: dict[str, Any] = {"phase": "ready", "engine_boot": f"boot-{number}", **said}
        self.fleet.update(f"pod-{number}", ReplicaKeys(**fields))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def post(self, body: Any = None, path: str = "/v1/chat/completions", key: str | None = API_KEY, **kw: Any):
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **kw.pop("headers", {})}
        if isinstance(body, bytes):
            return await self.session.post(self.url + path, data=body, headers=headers, **kw)
        return await self.session.post(self.url + path, json=body, headers=headers, **kw)

    async def records(self, kind: str = "final", count: int = 1) -> list[UsageRecord]:
        """Waits until `count` rows of the kind are there."""
        async with asyncio.timeout(30):
            while True:
                reader = SpoolReader(self.settings.spool_dir)
                rows = [r.record for r in reader.newest(1000) if kind in ("", r.kind)]
                reader.close()
                if len(rows) >= count:
                    return rows
                await asyncio.sleep(0.01)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the other labels."""
        samples = (each for family in self.metrics.registry.collect() for each in family.samples)
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path, *engines: ScriptedEngine, live: bool = True, **settings: Any):
    """Starts everything; with `live` every replica has a stream."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            if not engine.port:
                await stack.enter_async_context(engine.running())
        it = GatewayUnderTest(tmp_path, engines, **settings)
        it.changed()
        if live:
            for number in range(1, len(engines) + 1):
                it.hear(number)
        it.spool.start()
        await it.spool.opened()
        serving = asyncio.create_task(it.server.serve())
        while not it.server.started:
            await asyncio.sleep(0.005)
        it.session = aiohttp.ClientSession()
        try:
            yield it
        finally:
            await it.session.close()
            it.server.should_exit = True
            await serving
            await it.app.leases.close()
            await it.app.usage.close()
            await it.app.media.close()
            await it.app.copies.close()
            it.app.externals.close()
            it.agents.close()
            it.pool.close()
            await it.spool.stop()


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip()
