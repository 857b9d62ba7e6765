"""The kubelet's server, for the API server only: `kubectl logs`, `kubectl exec` and `kubectl port-forward`.

The API server presents its client certificate; nothing else gets in. The last two are WebSockets from end to end, which
the API server hands on because the Node declares ExtendWebSocketsToKubelet (on by default since Kubernetes 1.36).
"""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from shoal_dev.lab.node import execsession, logs, portforward
from shoal_dev.lab.node.config import NodeConfig
from shoal_dev.lab.node.container import NodeContainer
from shoal_dev.lab.node.launch import log_path
from shoal_dev.lab.node.pod import NodePod
from shoal_dev.lab.node.runtime import ContainerProcess


class KubeletServer:
    """`pods` is the live table of each node that this process runs, by the pod's uid."""

    def __init__(self, config: NodeConfig, pods: Mapping[str, Mapping[str, NodePod]]) -> None:
        self._config = config
        self._pods = pods

    async def run(self) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        for path in ("/exec/{namespace}/{pod}/{container}", "/exec/{namespace}/{pod}/{uid}/{container}"):
            app.router.add_route("*", path, self._exec)
        for path in ("/portForward/{namespace}/{pod}", "/portForward/{namespace}/{pod}/{uid}"):
            app.router.add_get(path, self._port_forward)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self._config.client_ca))
        context.load_cert_chain(self._config.serving_cert, self._config.serving_key)
        context.verify_mode = ssl.CERT_REQUIRED
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            for port in sorted({node.kubelet_port for node in self._config.nodes}):
                await web.TCPSite(runner, self._config.host_address, port, ssl_context=context).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    def _find_pod(self, request: web.Request) -> NodePod:
        """Raises HTTPNotFound with a kubelet's sentence."""
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        for pods in self._pods.values():
            for pod in pods.values():
                if pod.metadata["namespace"] == namespace and pod.metadata["name"] == name:
                    return pod
        raise web.HTTPNotFound(text=f"pod {name}_{namespace} not found on this node\n")

    def _find(self, request: web.Request) -> NodeContainer:
        """Raises HTTPNotFound with a kubelet's sentence."""
        pod, container = self._find_pod(request), request.match_info["container"]
        for candidate in pod.containers:
            if candidate.name == container:
                return candidate
        name = f"{pod.metadata['name']}_{pod.metadata['namespace']}"
        raise web.HTTPNotFound(text=f"container {container} not found in pod {name}\n")

    # --- logs -------------------------------------------------------------------------------------------------------

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        path, follow = self._log_file(request)
        if not path.exists():
            raise web.HTTPBadRequest(text=f"no log of container {request.match_info['container']} yet\n")
        try:
            since = _since(query)
            tail = int(query["tailLines"]) if "tailLines" in query else None
            limit = int(query["limitBytes"]) if "limitBytes" in query else None
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        lines = logs.read(path, follow=follow, tail=tail, since=since, timestamps=query.get("timestamps") == "true")
        with contextlib.suppress(ConnectionResetError):
            async for data in lines:
                if limit is not None:
                    data, limit = data[:limit], limit - len(data[:limit])
                await response.write(data)
                if limit == 0:
                    break
            await response.write_eof()
        return response

    def _log_file(self, request: web.Request) -> Any:
        try:
            container = self._find(request)
        except web.HTTPNotFound:
            # a pod that is over has no life here, but its logs stay until its object is deleted
            found = self._log_of_ended(request)
            if found is None:
                raise
            return found, None
        restart = container.record.restarts
        waiting = "waiting" in container.record.state
        if request.query.get("previous") == "true":
            restart = restart if waiting and container.record.last else restart - 1
            if restart < 0:
                name = container.name
                raise web.HTTPBadRequest(text=f'previous terminated container "{name}" in pod not found\n')
            return log_path(container, restart), None
        follow = asyncio.Event()
        if (
            request.query.get("follow") != "true"
            or container.process is None
            or container.process.exit_code is not None
        ):
            follow.set()
        else:
            process = container.process
            watcher = asyncio.create_task(_set_at_end(process, follow))
            request.task.add_done_callback(lambda _: watcher.cancel()) if request.task else None
        return log_path(container, restart), follow

    def _log_of_ended(self, request: web.Request) -> Any:
        namespace, name, container = (request.match_info[key] for key in ("namespace", "pod", "container"))
        for node in self._config.nodes:
            folder = self._config.log_dir / node.name
            found = sorted(
                folder.glob(f"{namespace}_{name}_*/{container}/*.log"), key=lambda path: path.stat().st_mtime
            )
            if found:
                return found[-1]
        return None

    # --- port-forward -----------------------------------------------------------------------------------------------

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        pod = self._find_pod(request)
        name = f"{pod.metadata['name']}_{pod.metadata['namespace']}"
        if portforward.PROTOCOL not in request.headers.get("Sec-WebSocket-Protocol", ""):
            raise web.HTTPBadRequest(
                text="the lab's nodes forward ports over WebSockets only (kubectl 1.31 or later)\n"
            )
        processes = (container.process for container in pod.containers)
        running = next((each for each in processes if each is not None and each.exit_code is None), None)
        if running is None:
            raise web.HTTPNotFound(text=f"no container of pod {name} runs\n")
        return await portforward.serve(request, name, f"/proc/{running.pid}/ns/net")

    # --- exec -------------------------------------------------------------------------------------------------------

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        container = self._find(request)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise web.HTTPBadRequest(text="the lab's nodes serve exec over WebSockets only (kubectl 1.31 or later)\n")
        return await execsession.serve(request, container)


async def _set_at_end(process: ContainerProcess, event: asyncio.Event) -> None:
    await process.wait()
    # what was still in the pipe
    await asyncio.sleep(logs.FOLLOW_SECONDS)
    event.set()


def _since(query: Mapping[str, str]) -> str | None:
    """As the log's own times, to be compared as text."""
    if "sinceTime" in query:
        moment = datetime.fromisoformat(query["sinceTime"]).astimezone(UTC)
    elif "sinceSeconds" in query:
        moment = datetime.now(UTC) - timedelta(seconds=int(query["sinceSeconds"]))
    else:
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
