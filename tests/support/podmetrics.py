"""The APIs from which an HPA reads metrics of pods, as prometheus-adapter and the metrics server have them: `python -m
tests.support.podmetrics CONFIG`, a process inside a lab's network.

Custom metrics come from the pods' own /metrics at the moment of the question; CPU is what the pods' processes used
since the question before. Of a pod that cannot be read nothing is said, as of a series that Prometheus does not have.
"""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from shoal.api import names
from shoal_dev.demo import steps
from shoal_dev.lab import network
from shoal_dev.lab.api import Lab
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.kubeapi import Api, Object
from tests.support.waiting import until

PORT: Final = 7443
NAMESPACE: Final = "pod-metrics"
_CUSTOM: Final = ("custom.metrics.k8s.io", "v1beta2")
_RESOURCE: Final = ("metrics.k8s.io", "v1beta1")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class PodMetricsConfig(BaseModel):
    """What the test hands over."""

    lab: str
    token: str
    """With which pods show their metrics."""
    metrics: tuple[str, ...]


def value_of(page: str, metric: str) -> float | None:
    """A gauge's value, summed over its labels; None: the page does not have it."""
    values = [s.value for f in text_string_to_metric_families(page) for s in f.samples if s.name == metric]
    return sum(values) if values else None


class PodMetrics:
    """Both APIs."""

    def __init__(self, config: PodMetricsConfig, lab: Lab, api: Api, session: aiohttp.ClientSession) -> None:
        self._config, self._lab, self._api, self._session = config, lab, api, session
        self._before: dict[str, tuple[float, float]] = {}
        """Pod -> when its CPU was read last, and seconds of CPU until then."""

    def app(self) -> web.Application:
        app = web.Application()
        custom, resource = ("/apis/" + "/".join(api) for api in (_CUSTOM, _RESOURCE))
        listed = [(f"pods/{name}", "MetricValueList") for name in self._config.metrics]
        app.router.add_get(custom, self._discovery(_CUSTOM, listed))
        app.router.add_get(resource, self._discovery(_RESOURCE, [("pods", "PodMetrics")]))
        app.router.add_get(f"{custom}/namespaces/{{namespace}}/pods/*/{{metric}}", self._values)
        app.router.add_get(f"{resource}/namespaces/{{namespace}}/pods", self._cpu)
        return app

    def _discovery(self, api: tuple[str, str], resources: list[tuple[str, str]]) -> Any:
        found = [
            {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
            for name, kind in resources
        ]
        version = "/".join(api)
        body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}

        async def answer(_request: web.Request) -> web.Response:
            return web.json_response(body)

        return answer

    async def _pods(self, request: web.Request) -> list[Object]:
        path = f"/api/v1/namespaces/{request.match_info['namespace']}/pods"
        found = await self._api.request("GET", path, params={"labelSelector": request.query.get("labelSelector", "")})
        return [pod for pod in found["items"] if pod["status"].get("podIP")]

    async def _values(self, request: web.Request) -> web.Response:
        metric = request.match_info["metric"]
        if metric not in self._config.metrics:
            raise web.HTTPNotFound
        items: list[Object] = []
        for pod in await self._pods(request):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                url = f"http://{pod['status']['podIP']}:{names.OPS_PORT}/metrics"
                async with self._session.get(url) as response:
                    value = value_of(await response.text(), metric) if response.status == 200 else None
                if value is not None:
                    items.append(_described(pod, metric, value))
        return _list("MetricValueList", _CUSTOM, items)

    async def _cpu(self, request: web.Request) -> web.Response:
        items: list[Object] = []
        for pod in await self._pods(request):
            metadata, now = pod["metadata"], time.monotonic()
            with contextlib.suppress(LabError, OSError):
                first = self._lab.first_process(f"{metadata['namespace']}/{metadata['name']}")
                used, before = _cpu_seconds(first), self._before.get(metadata["uid"])
                self._before[metadata["uid"]] = (now, used)
                if before is None or now <= before[0]:
                    continue
                share = max(0.0, used - before[1]) / (now - before[0])
                usage = {"cpu": f"{round(share * 1000)}m", "memory": "0"}
                items.append(
                    {
                        "metadata": {k: metadata[k] for k in ("namespace", "name", "labels")},
                        "timestamp": _now(),
                        "window": f"{now - before[0]:.0f}s",
                        "containers": [{"name": c["name"], "usage": usage} for c in pod["spec"]["containers"][:1]],
                    }
                )
        return _list("PodMetricsList", _RESOURCE, items)


def _described(pod: Object, metric: str, value: float) -> Object:
    reference = {"kind": "Pod", "apiVersion": "/v1"} | {k: pod["metadata"][k] for k in ("namespace", "name")}
    return {
        "describedObject": reference,
        "metric": {"name": metric, "selector": None},
        "timestamp": _now(),
        "value": str(round(value)),
    }


def _list(kind: str, api: tuple[str, str], items: list[Object]) -> web.Response:
    return web.json_response({"kind": kind, "apiVersion": "/".join(api), "metadata": {}, "items": items})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(map(_cpu_seconds, map(int, children)))


# --- for the test -----------------------------------------------------------------------------------------------------


@contextmanager
def serving(lab: Lab, folder: Path, token: str, metrics: tuple[str, ...]) -> Generator[Path]:
    """Both APIs in the lab's API server, as long as the block runs. Yields the log of the process."""
    file, log = folder / "podmetrics.json", folder / "podmetrics.log"
    file.touch(0o600)
    file.write_text(PodMetricsConfig(lab=lab.state.name, token=token, metrics=metrics).model_dump_json())
    # Only into the lab's network: it reads CPU from this machine's /proc.
    command = ["nsenter", "--target", str(lab.state.pid), "--net", "--", sys.executable, "-m"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "tests.support.podmetrics", str(file)], cwd=steps.ROOT, stdout=out, stderr=out
        )
    try:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(_objects())}
        lab.kubectl("apply", "-f", "-", stdin=json.dumps(listed))
        services = [f"apiservice/{version}.{group}" for group, version in (_CUSTOM, _RESOURCE)]
        lab.kubectl("wait", "--for=condition=Available", *services, "--timeout=90s", timeout=100)
        until(lambda: process.poll() is None, 1, log.read_text)
        yield log
    finally:
        process.terminate()
        process.wait(20)


def _objects() -> Generator[Mapping[str, Any]]:
    metadata = {"name": NAMESPACE, "namespace": NAMESPACE}
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": PORT}]},
    }
    yield {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata | {"labels": {"kubernetes.io/service-name": NAMESPACE}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": PORT, "protocol": "TCP"}],
        "endpoints": [{"addresses": [network.HOST], "conditions": {"ready": True}}],
    }
    for group, version in (_CUSTOM, _RESOURCE):
        yield {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{version}.{group}"},
            "spec": {
                "group": group,
                "version": version,
                "service": {"name": NAMESPACE, "namespace": NAMESPACE},
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
            },
        }


async def _serve(config: PodMetricsConfig) -> None:
    lab = Lab.get(config.lab)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(lab.paths.pki / "kubelet.crt", lab.paths.pki / "kubelet.key")
    headers = {"Authorization": f"Bearer {config.token}"}
    timeout = aiohttp.ClientTimeout(total=5)
    async with (
        Api(lab.paths.admin_kubeconfig) as api,
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
    ):
        runner = web.AppRunner(PodMetrics(config, lab, api, session).app())
        await runner.setup()
        await web.TCPSite(runner, network.HOST, PORT, ssl_context=context).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(PodMetricsConfig.model_validate_json(Path(sys.argv[1]).read_bytes())))
