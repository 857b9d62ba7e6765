"""The metrics APIs of the test with a real HPA: what they say of pods, and that they say nothing of what they cannot
read."""

from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from shoal_dev.lab.errors import LabError
from tests.support import podmetrics
from tests.support.podmetrics import PodMetrics, PodMetricsConfig, value_of

METRIC = "shoal_gateway_requests_in_flight"
PAGE = f"# HELP {METRIC} Requests.\n# TYPE {METRIC} gauge\n{METRIC} 7.0\n"


def pod(name: str, address: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"a": "b"}},
        "spec": {"containers": [{"name": "gateway"}]},
        "status": {"podIP": address} if address else {},
    }


class Pods:
    """An API server with three pods: one answers, one has no address yet, one does not answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, str]]] = []

    async def request(self, method: str, path: str, params: Mapping[str, str]) -> dict[str, Any]:
        assert method == "GET"
        self.asked.append((path, params))
        return {"items": [pod("up", "127.0.0.1"), pod("new", ""), pod("down", "127.0.0.2")]}


class LabOfOnePod:
    """Its pod `up` is this process."""

    def first_process(self, name: str) -> int:
        if name != "n/up":
            raise LabError("does not run")
        return 1


def test_a_page_without_the_metric_has_no_value() -> None:
    assert value_of(PAGE, METRIC) == 7.0
    assert value_of(PAGE, "other") is None


async def test_both_apis_say_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async def metrics(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer t"
        return web.Response(text=PAGE)

    page = web.Application()
    page.router.add_get("/metrics", metrics)
    config = PodMetricsConfig(lab="x", token="t", metrics=(METRIC,))
    pods = Pods()
    async with TestServer(page) as server, ClientSession(headers={"Authorization": "Bearer t"}) as session:
        monkeypatch.setattr(podmetrics.names, "OPS_PORT", server.port)
        monkeypatch.setattr(podmetrics, "_cpu_seconds", lambda _pid: 1.0)
        both: Any = PodMetrics(config, LabOfOnePod(), pods, session)  # pyright: ignore[reportArgumentType]
        async with TestClient(TestServer(both.app())) as client:
            base = "/apis/custom.metrics.k8s.io/v1beta2"
            listed = await (await client.get(base)).json()
            assert [each["name"] for each in listed["resources"]] == [f"pods/{METRIC}"]
            # As a controller of Kubernetes writes it.
            asked = URL(f"{base}/namespaces/n/pods/%2A/{METRIC}?labelSelector=a%3Db", encoded=True)
            found = await (await client.get(asked)).json()
            assert pods.asked == [("/api/v1/namespaces/n/pods", {"labelSelector": "a=b"})]
            assert [(i["describedObject"]["name"], i["value"]) for i in found["items"]] == [("up", "7")]
            assert (await client.get(f"{base}/namespaces/n/pods/*/other")).status == 404
            cpu = "/apis/metrics.k8s.io/v1beta1/namespaces/n/pods"
            assert (await (await client.get(cpu)).json())["items"] == [], "one reading says nothing of a rate"
            (used,) = (await (await client.get(cpu)).json())["items"]
            assert used["containers"][0]["usage"]["cpu"] == "0m"
