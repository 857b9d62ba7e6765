"""The whole gateway process in a test, beside an API server that is a fake."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from shoal.api import keys, names
from shoal.gateway.process import GatewayProcess
from shoal.gateway.settings import GatewaySettings
from shoal.kube.client import KubeClient
from tests.support.addresses import pod_ip
from tests.support.controlplane import free_ports
from tests.support.gateway import API_KEY, INSTALL_KEY, tenant
from tests.support.owners import owned
from tests.support.rolekeys import give
from tests.support.scripted_engine import ScriptedEngine

POD_IP = pod_ip(1)
MODEL = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "llama", "namespace": "chat", "uid": "uid-llama", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"source": {"uri": "file:///models/tiny"}},
}
POD = {
    "metadata": {
        "name": "llama-1",
        "namespace": "chat",
        "uid": "pod-1",
        "labels": {
            names.LABEL_MODEL: "llama",
            names.LABEL_MODEL_UID: "uid-llama",
            names.LABEL_GPU_CLASS: "l4-24gb",
            names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
        },
        "annotations": {names.ANNOTATION_INSTALL_KEY: keys.fingerprint(INSTALL_KEY)},
    },
    "spec": {"nodeName": "node-1"},
    "status": {"phase": "Running", "podIP": POD_IP, "conditions": [{"type": "Ready", "status": "True"}]},
}


_BUILT_IN = ("pods", "replicasets", "deployments")


class FakeApiServer:
    """Lists and watches, as far as a reflector needs it."""

    def __init__(self) -> None:
        kinds = ("models", "tenants", "lorapools", "loraadapters", "modelroutes", *_BUILT_IN)
        self.objects: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        self.crds = False
        self.controllers = True
        """An engine pod gets its owners, as in a cluster."""
        self.version = 1
        self.port = 0
        self._removed: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def remove(self, plural: str, name: str) -> None:
        self.version += 1
        (gone,) = [o for o in self.objects[plural] if o["metadata"]["name"] == name]
        self.objects[plural].remove(gone)
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.version)}}
        self._removed.append((plural, gone))
        async with self._changed:
            self._changed.notify_all()

    async def change(self, plural: str, obj: dict[str, Any]) -> None:
        metadata = obj["metadata"]
        if self.controllers and plural == "pods" and names.LABEL_MODEL_UID in metadata.get("labels", {}):
            obj, replica_set, deployment = owned(obj)
            await self._change("replicasets", replica_set)
            await self._change("deployments", deployment)
        await self._change(plural, obj)

    async def _change(self, plural: str, obj: dict[str, Any]) -> None:
        self.version += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self.objects[plural] = [o for o in self.objects[plural] if o["metadata"]["name"] != obj["metadata"]["name"]]
        self.objects[plural].append(obj)
        async with self._changed:
            self._changed.notify_all()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        plural = request.path.rpartition("/")[2]
        if plural not in self.objects or (plural not in _BUILT_IN and not self.crds):
            return web.json_response(
                {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found"},
                status=404,
            )
        wanted = request.query.get("labelSelector", "")
        if "watch" not in request.query:
            items = [o for o in self.objects[plural] if _selected(o, wanted)]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        with contextlib.suppress(ConnectionError):
            while True:
                for obj in self.objects[plural]:
                    if int(obj["metadata"]["resourceVersion"]) > seen and _selected(obj, wanted):
                        await response.write(json.dumps({"type": "MODIFIED", "object": obj}).encode() + b"\n")
                for of_plural, obj in self._removed:
                    if of_plural == plural and int(obj["metadata"]["resourceVersion"]) > seen:
                        await response.write(json.dumps({"type": "DELETED", "object": obj}).encode() + b"\n")
                seen = self.version
                async with self._changed:
                    await self._changed.wait()
        return response

    async def up(self) -> None:
        app = web.Application()
        app.router.add_get("/{tail:.*}", self.handle)
        # Who watches and is killed leaves a handler that waits.
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        self.port = self.port or free_ports(1)[0]  # nobody takes it while this one is down
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


def _selected(obj: dict[str, Any], selector: str) -> bool:
    """`a=b` and `a`, comma-separated."""
    labels = obj["metadata"].get("labels", {})
    terms = (term.partition("=") for term in selector.split(",") if term)
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in terms)


def kubeconfig(folder: Path, server: FakeApiServer) -> str:
    """The path of a kubeconfig that leads to the server."""
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    return str(path)


async def agent() -> web.AppRunner:
    async def replica(request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {keys.derive(INSTALL_KEY, 'gateway', 'uid-llama')}"
        response = web.StreamResponse()
        await response.prepare(request)
        keys_ = {"phase": "ready", "engineBoot": "boot-1"}
        await response.write(
            b"data: " + json.dumps({"boot": "a", "seq": 0, "full": True, "keys": keys_}).encode() + b"\n\n"
        )
        await asyncio.sleep(60)
        return response

    app = web.Application()
    app.router.add_get("/v1/replica", replica)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, POD_IP, names.AGENT_PORT).start()
    return runner


@contextlib.asynccontextmanager
async def running(tmp_path: Path, server: FakeApiServer, **settings: Any) -> AsyncGenerator[GatewayProcess, None]:
    await server.up()  # takes a port, which then is closed again: the API server is away
    await server.down()
    client = await KubeClient.from_environment(kubeconfig=kubeconfig(tmp_path, server))
    (tmp_path / "key").mkdir()
    fields: dict[str, Any] = {"settle_seconds": 0.0, "spool_dir": tmp_path / "spool", **settings}
    process = GatewayProcess(
        GatewaySettings(
            host="127.0.0.1",
            port=0,
            ops_host="127.0.0.1",
            ops_port=0,
            keys_dir=tmp_path / "key",
            **fields,
        ),
        client,
    )
    started = asyncio.Event()
    task = asyncio.create_task(process.run(started.set))
    async with client:
        async with asyncio.timeout(20):
            await started.wait()
        try:
            yield process
        finally:
            process.stop()
            async with asyncio.timeout(30):
                await task
            await server.down()


async def readyz(session: aiohttp.ClientSession, process: GatewayProcess) -> tuple[int, dict[str, str]]:
    async with session.get(f"http://127.0.0.1:{process.ops.port}/readyz") as response:
        return response.status, await response.json()


async def until_ready(session: aiohttp.ClientSession, process: GatewayProcess) -> None:
    async with asyncio.timeout(40):
        while (await readyz(session, process))[0] != 200:
            await asyncio.sleep(0.05)


def ask(session: aiohttp.ClientSession, process: GatewayProcess, *, key: str = API_KEY, **body: Any) -> Any:
    return session.post(
        f"http://127.0.0.1:{process.server.port}/v1/chat/completions",
        json={"model": "llama", "messages": [{"role": "user", "content": "hi"}], **body},
        headers={"authorization": f"Bearer {key}"},
    )


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, engine: ScriptedEngine, server: FakeApiServer | None = None, **settings: Any
) -> AsyncGenerator[GatewayProcess, None]:
    """A gateway that is ready: one Model, one Tenant, one pod whose engine is `engine`."""
    server = server or FakeApiServer()
    async with running(tmp_path, server, **settings) as process, aiohttp.ClientSession() as session:
        give(tmp_path / "key", INSTALL_KEY)
        server.crds = True
        await server.up()
        for plural, obj in (
            ("models", MODEL),
            ("tenants", tenant().model_dump(mode="json", by_alias=True, exclude_none=True)),
            ("pods", POD),
        ):
            await server.change(plural, obj)
        listener = await asyncio.start_server(engine.handle, POD_IP, names.ENGINE_PORT)
        try:
            await until_ready(session, process)
            yield process
        finally:
            listener.close()
