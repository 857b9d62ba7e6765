"""`shoal doctor` and `shoal why` at a real API server: its CustomResourceDefinitions, reviews, clock, and its words."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli.main import main
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.apiserver

SPACE = "doctor"
NODE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "doctor-gpu-1", "labels": {"doctor": "gpu"}},
}
GPU_CLASS: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "GPUClass",
    "metadata": {"name": "doctor"},
    "spec": {"nodeSelector": {"doctor": "gpu"}, "memoryPerGPU": "80Gi"},
}
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "shoal-gateway", "namespace": SPACE, "labels": {"app.kubernetes.io/part-of": "shoal"}},
    "spec": {"ports": [{"port": 80}]},
}


def operator() -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/part-of": "shoal",
        "app.kubernetes.io/component": "operator",
        "app.kubernetes.io/version": "0.0.1",
    }
    container = {"name": "operator", "image": "shoal"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "shoal-operator", "namespace": SPACE, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"serviceAccountName": "shoal-operator", "containers": [container]},
            },
        },
    }


@pytest.fixture(scope="module")
def server(apiserver: ApiServer) -> Iterator[ApiServer]:
    apiserver.kubectl("create", "namespace", SPACE)
    done = apiserver.apply(NODE, GPU_CLASS, SERVICE, operator())
    assert done.returncode == 0, done.stderr
    yield apiserver
    apiserver.kubectl("delete", "node", "doctor-gpu-1")
    apiserver.kubectl("delete", "gpuclass", "doctor")
    apiserver.kubectl("delete", "-n", SPACE, "deployment/shoal-operator", "service/shoal-gateway")


def shoal(server: ApiServer, *args: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner(catch_exceptions=False).invoke(main, [*args, "-o", "json", "--kubeconfig", str(server.kubeconfig)])
    return done.exit_code, json.loads(done.stdout)


def doctor(server: ApiServer) -> tuple[int, dict[str, list[dict[str, str]]]]:
    code, found = shoal(server, "doctor", "--operator-namespace", SPACE)
    checks: dict[str, list[dict[str, str]]] = {}
    for each in found["results"]:
        checks.setdefault(each["check"], []).append(each)
    return code, checks


def test_an_installation_is_checked_at_a_real_api_server(server: ApiServer) -> None:
    code, found = doctor(server)
    assert code == 1
    assert [each["outcome"] for each in found["kinds"]] == ["ok"], "the API server stores every field of the schemas"
    assert [each["outcome"] for each in found["clock"]] == ["ok"]
    assert [each["reason"] for each in found["leader"]] == ["OperatorNotLeading"]
    assert {each["reason"] for each in found["processes"]} == {"NotInstalled"}
    assert [each["reason"] for each in found["services"]] == ["NoReadyAddress"]
    assert [each["reason"] for each in found["versions"]] == ["VersionsDiffer"]
    assert "DevicePluginMissing" in {each["reason"] for each in found["GPU classes"]}


def test_the_permissions_are_those_of_the_operators_account(server: ApiServer) -> None:
    _, before = doctor(server)
    assert {each["reason"] for each in before["permissions"]} == {"PermissionMissing"}
    assert any("list models.shoal.dev" in each["message"] for each in before["permissions"])
    server.kubectl("create", "clusterrolebinding", "doctor", "--clusterrole=cluster-admin",
                   f"--serviceaccount={SPACE}:shoal-operator")  # fmt: skip
    try:
        _, after = doctor(server)
        assert [each["outcome"] for each in after["permissions"]] == ["ok"]
    finally:
        server.kubectl("delete", "clusterrolebinding", "doctor")


def test_a_class_and_its_node_are_explained_at_a_real_api_server(server: ApiServer) -> None:
    code, found = shoal(server, "why", "gpuclass/doctor", "--operator-namespace", SPACE)
    assert code == 0
    assert (found["causes"][0]["layer"], found["causes"][0]["reason"]) == ("L1", "DevicePluginMissing")
    assert [each["what"] for each in found["unread"]] == [f"Lease shoal-operator in namespace {SPACE}"]
    _, found = shoal(server, "why", "node/doctor-gpu-1")
    assert found["causes"][0]["reason"] == "DevicePluginMissing"
    assert found["unread"] == []
