"""`shoal doctor`: what a person sees of an installation, and that a part that cannot be read stops no other."""

import json
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shoal.api.schema import KINDS, custom_resource_definition
from shoal.cli.main import main
from tests.faults.worlds import condition, node
from tests.support.cannedapi import CannedApi
from tests.support.devices import class_of_devices, device_class, resource_slice

SYSTEM = "/api/v1/namespaces/shoal-system"
SHOAL = "/apis/shoal.dev/v1alpha1"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
LOCAL = "/apis/authorization.k8s.io/v1/namespaces/shoal-system/localsubjectaccessreviews"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/shoal-system/leases/shoal-operator"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
DEVICES = "/apis/resource.k8s.io/v1"
FUTURE = "2999-01-01T00:00:00.000000Z"


def listed(*items: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def workload(component: str, kind: str, ready: int = 1) -> dict[str, Any]:
    return {
        "kind": kind,
        "metadata": {
            "name": f"shoal-{component}",
            "labels": {"app.kubernetes.io/component": component, "app.kubernetes.io/version": version("shoal")},
        },
        "spec": {"replicas": 1, "template": {"spec": {"serviceAccountName": f"shoal-{component}"}}},
        "status": {"readyReplicas": ready, "updatedReplicas": 1},
    }


def endpoints(service: str, ready: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": service}},
        "endpoints": [{"conditions": {"ready": ready}}],
    }


@pytest.fixture
def api() -> CannedApi:
    established = {"status": {"conditions": [{"type": "Established", "status": "True"}]}}
    leaf = {"notBefore": "2026-01-01T00:00:00Z", "notAfter": FUTURE, "uri": "", "dns": "", "authority": ""}
    annotation = json.dumps(leaf | {"trust": [], "strict": False})
    return CannedApi(
        {
            "/version": {"major": "1"},
            f"{SYSTEM}/configmaps/shoal-operator": {"data": {"config.yaml": "cache: {enabled: false}"}},
            "/apis/apps/v1/namespaces/shoal-system/deployments": listed(workload("operator", "Deployment")),
            "/apis/apps/v1/namespaces/shoal-system/statefulsets": listed(workload("gateway", "StatefulSet")),
            "/apis/apps/v1/namespaces/shoal-system/daemonsets": listed(),
            f"{SYSTEM}/pods": listed(),
            "/apis/events.k8s.io/v1/namespaces/shoal-system/events": listed(),
            LEASE: {"spec": {"holderIdentity": "shoal-operator-1", "renewTime": FUTURE}},
            **{
                f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.crd_name()}": (
                    custom_resource_definition(kind) | established
                )
                for kind in KINDS
            },
            REVIEWS: {"status": {"allowed": True}},
            LOCAL: {"status": {"allowed": True}},
            f"{SYSTEM}/secrets": listed(
                {"metadata": {"name": "shoal-gateway-tls", "annotations": {"shoal.dev/certificate": annotation}}}
            ),
            "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases": listed(),
            f"{SYSTEM}/services": listed({"metadata": {"name": "shoal-gateway"}}),
            SLICES.format("shoal-system"): listed(endpoints("shoal-gateway")),
            "/api/v1/namespaces/kube-system/services": listed({"metadata": {"name": "kube-dns"}}),
            SLICES.format("kube-system"): listed(endpoints("kube-dns")),
            "/api/v1/nodes": listed(node()),
            f"{SHOAL}/gpuclasses": listed(
                {
                    "metadata": {"name": "h100-80gb"},
                    "spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100"}},
                    "status": {"conditions": [condition("Ready", "True", "NodesFound")]},
                }
            ),
            f"{SHOAL}/models": listed(),
            f"{SHOAL}/tenants": listed(),
        }
    )


@pytest.fixture
def kubeconfig(api: CannedApi, tmp_path: Path) -> Generator[Path]:
    with api.kubeconfig(tmp_path) as path:
        yield path


def doctor(kubeconfig: Path, *args: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["doctor", *args], env={"KUBECONFIG": str(kubeconfig)})


def results(done: Result) -> dict[str, dict[str, str]]:
    return {each["check"]: each for each in json.loads(done.stdout)["results"] if each["outcome"] != "ok"}


def test_an_installation_that_is_well(kubeconfig: Path) -> None:
    done = doctor(kubeconfig)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip().startswith("0 error, 0 warning, 0 unknown, ")
    lines = doctor(kubeconfig, "--all").stdout
    assert "permissions: Shoal's processes have all" in lines
    assert "clock: this clock and the API server's agree" in lines


def test_what_is_wrong_has_layer_reason_and_next_step(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[SLICES.format("shoal-system")] = listed(endpoints("shoal-gateway", ready=False))
    done = doctor(kubeconfig)
    assert done.exit_code == 1
    first, do, *_ = done.stdout.splitlines()
    assert first.split()[:3] == ["error", "L5", "gateway"]
    assert "services: NoReadyAddress: Service shoal-gateway has no ready address" in first
    assert do.strip().startswith("do: Compare its selector")


def test_a_permission_that_the_operator_lacks_is_named(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[LOCAL] = {"status": {"allowed": False}}
    found = results(doctor(kubeconfig, "-o", "json"))["permissions"]
    assert (found["outcome"], found["reason"]) == ("error", "PermissionMissing")
    assert "in namespace shoal-system: needed to" in found["message"]


def test_in_a_scope_of_namespaces_permissions_are_asked_for_there(kubeconfig: Path, api: CannedApi) -> None:
    spaces = [f"team-{number}" for number in range(30)]
    config = f"scopeNamespaces: {json.dumps(spaces)}"
    api.answers[f"{SYSTEM}/configmaps/shoal-operator"] = {"data": {"config.yaml": config}}
    for space in spaces:
        api.answers[f"{SHOAL}/namespaces/{space}/models"] = listed()
    done = doctor(kubeconfig, "--all")
    assert "permissions that they need, in 5 of its 30 namespaces" in done.stdout, done.output


def test_a_part_that_may_not_be_read_is_unknown_and_stops_no_other(kubeconfig: Path, api: CannedApi) -> None:
    refused = {
        "permissions": (REVIEWS, "subjectaccessreviews is forbidden"),
        "certificates": (f"{SYSTEM}/secrets", "secrets is forbidden"),
        "GPU nodes": ("/api/v1/nodes", "nodes is forbidden"),
        "kinds": (
            f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{KINDS[0].crd_name()}",
            "customresourcedefinitions is forbidden",
        ),
    }
    for path, message in refused.values():
        api.answers[path] = (403, message)
    done = doctor(kubeconfig, "-o", "json")
    assert done.exit_code == 0, "unknown is no fault"
    found = results(done)
    assert found.keys() == refused.keys()
    for check, (_, message) in refused.items():
        assert found[check]["outcome"] == "unknown"
        assert message in found[check]["message"]


def test_price_lists_that_the_ledger_refuses_are_told(kubeconfig: Path, api: CannedApi) -> None:
    api.answers["/apis/apps/v1/namespaces/shoal-system/statefulsets"]["items"].append(workload("ledger", "StatefulSet"))
    found = results(doctor(kubeconfig, "-o", "json"))
    assert {name: each["outcome"] for name, each in found.items()} == {"price lists": "unknown"}, "no way to it"
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    labels = {"app.kubernetes.io/component": "ledger"}
    pod = {"metadata": {"name": "shoal-ledger-0", "labels": labels}, "spec": {}, "status": ready}
    api.answers[f"{SYSTEM}/pods"] = listed(pod)
    api.answers[f"{SYSTEM}/secrets/shoal-key-billing"] = {"data": {"key": "a2V5"}}
    mistake = "mine.yaml:2: begins when demo.yaml does, 2026-11-01T00:00Z"
    answer: dict[str, Any] = {"lists": ["demo"], "current": "demo", "currency": "USD", "refused": [mistake]}
    api.answers[f"{SYSTEM}/pods/shoal-ledger-0:8500/proxy/v1/prices"] = answer
    done = doctor(kubeconfig, "-o", "json")
    found = results(done)["price lists"]
    assert (done.exit_code, found["outcome"], found["reason"]) == (1, "error", "PriceListsRefused")
    assert f"accepted before stay in force (demo): {mistake}" in found["message"]
    answer["refused"] = []
    assert results(doctor(kubeconfig, "-o", "json")) == {}


def publish(api: CannedApi, *gpuclasses: Any) -> None:
    """A DRA driver publishes two GPUs of the node dra-1, whose kubelet is silent."""
    silent = node(condition("Ready", "Unknown", "NodeStatusUnknown", "no status"), name="dra-1", gpus=0)
    silent["metadata"]["labels"] = {}
    api.answers["/api/v1/nodes"]["items"].append(silent)
    api.answers[f"{SHOAL}/gpuclasses"]["items"] += gpuclasses
    api.answers[f"{DEVICES}/resourceslices"] = listed(resource_slice("dra-1", "gpu-0", "gpu-1"))
    api.answers[f"{DEVICES}/deviceclasses"] = listed(device_class())


def test_the_nodes_of_a_class_of_devices_are_those_that_have_them(kubeconfig: Path, api: CannedApi) -> None:
    ready = {"status": {"conditions": [condition("Ready", "True", "NodesFound")]}}
    publish(api, class_of_devices("devices") | ready)
    found = results(doctor(kubeconfig, "-o", "json"))
    assert found.keys() == {"GPU classes"}
    assert found["GPU classes"]["reason"] == "NodeSilent"
    assert found["GPU classes"]["message"].startswith("devices: node dra-1")


def test_devices_that_no_class_selects_are_named(kubeconfig: Path, api: CannedApi) -> None:
    publish(api)
    found = results(doctor(kubeconfig, "-o", "json"))
    assert found.keys() == {"GPU devices"}
    assert (found["GPU devices"]["outcome"], found["GPU devices"]["reason"]) == ("warning", "GPUsWithoutClass")
    assert "devices on dra-1 that no GPUClass selects: gpu.test/dra-1/gpu-0, " in found["GPU devices"]["message"]
    api.answers[f"{DEVICES}/resourceslices"] = (403, "resourceslices is forbidden")
    found = results(doctor(kubeconfig, "-o", "json"))["GPU devices"]
    assert (found["outcome"], "resourceslices is forbidden" in found["message"]) == ("unknown", True)


def test_a_long_message_is_cut_after_a_whole_sum_and_why_has_all(kubeconfig: Path, api: CannedApi) -> None:
    sums = "; ".join(f"class-{n}: on 4 GPUs with 44.99 GiB each, weights need {n}03.19 GiB" for n in range(14))
    broken = {
        "metadata": {"name": "huge", "namespace": "chat", "generation": 1},
        "status": {"observedGeneration": 1, "conditions": [condition("Ready", "False", "NoFit", sums)]},
    }
    api.answers[f"{SHOAL}/models"] = listed(broken)
    found = results(doctor(kubeconfig, "-o", "json"))["Models"]
    assert found["message"].startswith("chat/huge: NoFit: class-0: on 4 GPUs with 44.99 GiB each, weights need")
    assert found["message"].endswith("GiB; ...")
    assert len(found["message"]) < 330
    assert found["do"] == "Run `shoal why model/huge -n chat`, which shows the whole message."
    assert not any(line.endswith(" ") for line in doctor(kubeconfig).output.splitlines())


def test_an_installation_elsewhere_is_not_found_here(kubeconfig: Path) -> None:
    done = doctor(kubeconfig, "--operator-namespace", "elsewhere", "-o", "json")
    assert json.loads(done.stdout)["counts"]["ok"] > 0


def test_no_secrets_content_is_read_and_nothing_is_written(kubeconfig: Path, api: CannedApi) -> None:
    doctor(kubeconfig)
    secrets = [(path, headers["accept"]) for _, path, headers in api.calls if "/secrets" in path]
    assert [path.partition("?")[0] for path, _ in secrets] == [f"{SYSTEM}/secrets"]
    assert all("as=PartialObjectMetadataList" in accept for _, accept in secrets)
    assert api.patches == []
    assert {method for method, _, _ in api.calls} == {"GET"}
