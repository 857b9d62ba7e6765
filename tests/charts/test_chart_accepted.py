"""What the chart renders, sent to a real API server under the restricted pod standard (server-side dry run)."""

import copy
from typing import Any

import pytest
import yaml

from tests.support.apiserver import ApiServer
from tests.support.charts import CHART, SETS, helm, rendered

pytestmark = pytest.mark.apiserver

FOREIGN = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute"}
"""Kinds of other projects, which this API server does not have."""


@pytest.fixture(scope="module")
def namespace(apiserver: ApiServer) -> str:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": "shoal-system", "labels": labels}
    assert apiserver.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}).returncode == 0
    return "shoal-system"


@pytest.mark.parametrize("name", SETS)
def test_every_object_is_accepted(apiserver: ApiServer, namespace: str, name: str) -> None:
    objects = [o for o in rendered(SETS[name]) if o["kind"] not in FOREIGN]

    done = apiserver.apply(*objects, dry_run=True)

    assert done.returncode == 0, done.stderr
    # Of the only thing with a hostPath, and of nothing else.
    warnings = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert len(warnings) == sum(o["kind"] == "DaemonSet" for o in objects)
    assert all('volume "cache" uses restricted volume type "hostPath"' in line for line in warnings)
    assert len(done.stdout.splitlines()) == len(objects)


def _pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in objects:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = copy.deepcopy(one["spec"]["template"])
        claims = [{"name": c["metadata"]["name"], "emptyDir": {}} for c in one["spec"].get("volumeClaimTemplates", [])]
        template["spec"]["volumes"] += claims
        metadata = template["metadata"] | {"name": one["metadata"]["name"], "namespace": "shoal-system"}
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return found


@pytest.mark.parametrize("name", SETS)
def test_pods_keep_to_the_restricted_standard(apiserver: ApiServer, namespace: str, name: str) -> None:
    objects = rendered(SETS[name])
    accounts = [o for o in objects if o["kind"] == "ServiceAccount"]
    assert apiserver.apply(*accounts).returncode == 0

    for pod in _pods(objects):
        pod["spec"].pop("priorityClassName", None)
        done = apiserver.apply(pod, dry_run=True)
        assert done.returncode == 0, done.stderr

        # The check can fail: the same pod with one field less is refused.
        del pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"]
        refused = apiserver.apply(pod, dry_run=True)
        assert 'violates PodSecurity "restricted:latest"' in refused.stderr


def test_the_node_cache_needs_a_namespace_that_allows_its_host_path(apiserver: ApiServer, namespace: str) -> None:
    objects = rendered({})
    (daemons,) = [o for o in objects if o["kind"] == "DaemonSet"]
    accounts = [o for o in objects if o["kind"] == "ServiceAccount"]
    template = daemons["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}

    def tried(where: str) -> str:
        metadata = template["metadata"] | {"name": "shoal-cache", "namespace": where}
        return apiserver.apply(pod | {"metadata": metadata}, dry_run=True).stderr

    open_labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    own = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shoal-open", "labels": open_labels}}
    for one in [own, *(a | {"metadata": a["metadata"] | {"namespace": "shoal-open"}} for a in accounts), *accounts]:
        assert apiserver.apply(one).returncode == 0

    assert tried("shoal-open") == ""
    refused = tried("shoal-system")
    assert "restricted volume types" in refused
    # Everything else is within the standard.
    assert "allowPrivilegeEscalation" not in refused
    assert "capabilities" not in refused
    assert "seccompProfile" not in refused


def test_an_install_that_could_not_run_the_node_cache_says_so(apiserver: ApiServer, namespace: str) -> None:
    def tried(**cache: bool) -> tuple[int, str]:
        where = ("--namespace", namespace, "--dry-run=server", "--kubeconfig", str(apiserver.kubeconfig))
        done = helm("template", "shoal", str(CHART), *where, values={"cache": cache})
        return done.returncode, done.stderr

    code, said = tried()
    assert code != 0
    assert 'namespace shoal-system enforces the pod security standard "restricted"' in said
    assert "cache.enabled=false" in said
    # (Other tests left objects there which no release owns: of those it may complain.)
    assert "pod security standard" not in tried(enabled=False)[1]


def test_an_installation_with_autoscaling_begins_with_the_number_of_gateways_and_an_upgrade_keeps_the_clusters(
    apiserver: ApiServer, namespace: str
) -> None:
    values = {"cache": {"enabled": False}, "gateway": {"replicas": 5, "autoscaling": {"enabled": True}}}

    def gateways(name: str, *more: str) -> dict[str, Any]:
        done = helm("template", "shoal", str(CHART), "--namespace", name, *more, values=values)
        assert done.returncode == 0, done.stderr
        return next(
            o
            for o in yaml.safe_load_all(done.stdout)
            if o and (o["kind"], o["metadata"]["name"]) == ("StatefulSet", "shoal-gateway")
        )

    with_cluster = ("--dry-run=server", "--kubeconfig", str(apiserver.kubeconfig))
    found = gateways("shoal-scaled", *with_cluster)
    assert found["spec"]["replicas"] == 5
    own = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shoal-scaled"}}
    found["spec"]["replicas"] = 7  # as the autoscaler has it
    done = apiserver.apply(own, found)
    assert done.returncode == 0, done.stderr
    try:
        assert gateways("shoal-scaled", *with_cluster, "--is-upgrade")["spec"]["replicas"] == 7
        assert "replicas" not in gateways("shoal-scaled")["spec"], "a sync of Argo CD would write it again and again"
    finally:
        apiserver.run("delete", "statefulset", "shoal-gateway", "-n", "shoal-scaled")


@pytest.mark.parametrize(
    ("who", "verb", "what", "allowed"),
    [
        ("shoal-cache", "watch", "persistentvolumes", True),
        ("shoal-cache", "get", "secrets -n demo", False),
        ("shoal-cache", "list", "pods -n demo", False),
        ("shoal-operator", "patch", "models.shoal.dev --subresource=status -A", True),
        ("shoal-operator", "update", "models.shoal.dev -A", False),
        ("shoal-operator", "patch", "deployments.apps --subresource=scale -n demo", True),
        ("shoal-operator", "list", "secrets -A", False),
        ("shoal-operator", "get", "secrets -n demo", True),
        ("shoal-operator", "update", "leases.coordination.k8s.io/shoal-operator -n shoal-system", True),
        ("shoal-operator", "update", "leases.coordination.k8s.io/other -n shoal-system", False),
        ("shoal-operator", "delete", "pods -n demo", False),
        ("shoal-ledger", "watch", "pods -A", True),
        ("shoal-ledger", "watch", "gpuclasses.shoal.dev", True),
        ("shoal-ledger", "get", "secrets -n shoal-system", False),
        ("shoal-ledger", "list", "tenants.shoal.dev", False),
        ("shoal-gateway", "watch", "tenants.shoal.dev", True),
        ("shoal-gateway", "get", "secrets -n shoal-system", False),
        ("shoal-gateway", "patch", "tenants.shoal.dev", False),
    ],
)
def test_who_may_do_what(apiserver: ApiServer, namespace: str, who: str, verb: str, what: str, allowed: bool) -> None:
    roles = [o for o in rendered({}) if o["apiVersion"].startswith("rbac.")]
    assert apiserver.apply(*roles).returncode == 0
    account = f"--as=system:serviceaccount:shoal-system:{who}"

    done = apiserver.run("auth", "can-i", verb, *what.split(), account)

    assert done.stdout.strip() == ("yes" if allowed else "no"), done.stderr


@pytest.mark.parametrize(
    ("role", "verb", "what", "allowed"),
    [
        ("shoal-billing", "get", "secrets/shoal-key-billing", True),
        ("shoal-billing", "get", "secrets/shoal-root-key", False),
        ("shoal-billing", "get", "secrets/shoal-key-gateway", False),
        ("shoal-billing", "get", "secrets/other", False),
        ("shoal-billing", "list", "pods", True),
        ("shoal-billing", "create", "pods/x --subresource=proxy", True),
        ("shoal-billing", "delete", "pods/x --subresource=proxy", False),
        ("shoal-logs", "delete", "pods/x --subresource=proxy", True),
        ("shoal-logs", "delete", "pods/x", False),
        ("shoal-logs", "list", "persistentvolumeclaims", True),
        ("shoal-logs", "delete", "persistentvolumeclaims/x", False),
    ],
)
def test_what_people_may_who_are_bound_to_a_role(
    apiserver: ApiServer, namespace: str, role: str, verb: str, what: str, allowed: bool
) -> None:
    (found,) = [o for o in rendered({}) if (o["kind"], o["metadata"]["name"]) == ("Role", role)]
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": role, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": role}],
    }
    assert apiserver.apply(found, binding).returncode == 0

    done = apiserver.run("auth", "can-i", verb, *what.split(), f"--as={role}", "-n", namespace)

    assert done.stdout.strip() == ("yes" if allowed else "no"), done.stderr
