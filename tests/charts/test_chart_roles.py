"""The chart's roles for people: what they grant, and that nobody has one until somebody binds it."""

from typing import Any

import pytest

from shoal.api import names, permissions, rights
from shoal.api.meta import GROUP
from tests.charts.test_chart import one
from tests.support.apiserver import ApiServer
from tests.support.charts import CHART, helm, rendered
from tests.support.waiting import until

HOME = "shoal-system"
RBAC = "rbac.authorization.k8s.io"


def with_roles(**roles: Any) -> list[dict[str, Any]]:
    return rendered({"rbac": {"roles": roles}})


def test_the_roles_are_those_of_the_code() -> None:
    objects = rendered({})
    for role in rights.ROLES:
        assert one(objects, "ClusterRole", role)["rules"] == permissions.rules(permissions.ROLES[role])
        account = one(objects, "ClusterRole", f"{role}-account")["rules"]
        assert account == permissions.rules(permissions.ACCOUNTS[role])
        assert {group for rule in account for group in rule["apiGroups"]} == {GROUP}
    assert one(objects, "Role", "shoal-reach")["rules"] == permissions.rules(permissions.REACH)
    reviews = one(objects, "ClusterRole", "shoal-reviews")["rules"]
    assert {(rule["resources"][0], *rule["verbs"]) for rule in reviews} == {
        ("tokenreviews", "create"),
        ("subjectaccessreviews", "create"),
    }


def test_no_role_reads_a_secret_or_reaches_a_pod() -> None:
    for rows in (*permissions.ROLES.values(), *permissions.ACCOUNTS.values(), permissions.REACH):
        resources = {resource for row in rows for resource in row.resources}
        assert not resources & {"secrets", "pods/proxy", "pods/exec", "*"}
        for row in rows:
            narrow = {"serviceaccounts/token", "services", "services/proxy", "configmaps"} & set(row.resources)
            assert not narrow or row.resource_names, row
            assert not {"impersonate", "bind", "escalate"} & set(row.verbs)


def test_nobody_has_a_role_and_none_is_aggregated() -> None:
    objects = rendered({})
    ours = {*rights.ROLES, *(f"{role}-account" for role in rights.ROLES), "shoal-reach"}
    bound = {
        (subject["kind"], subject["name"], subject.get("namespace"), binding["roleRef"]["name"])
        for binding in objects
        if binding["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in binding["subjects"]
        if binding["roleRef"]["name"] in ours
    }
    # An account has what it may ask, and never what its people have: it cannot get tokens, nor edit a Tenant.
    assert bound == {("ServiceAccount", role, HOME, f"{role}-account") for role in rights.ROLES}
    roles = [o for o in objects if o["kind"] == "ClusterRole" and o["metadata"]["name"] in ours]
    assert len(roles) == 2 * len(rights.ROLES)
    assert not [o for o in roles if any("aggregate" in label for label in o["metadata"]["labels"])]
    for role in rights.ROLES:
        assert one(objects, "ServiceAccount", role)["automountServiceAccountToken"] is False


def test_a_namespace_gets_an_account_that_sees_it_alone() -> None:
    objects = with_roles(viewerNamespaces=["team-a"], reachGroups=["system:authenticated"])
    accounts = [o for o in objects if o["kind"] == "ServiceAccount" and o["metadata"]["name"] == "shoal-viewer"]
    assert sorted(o["metadata"]["namespace"] for o in accounts) == [HOME, "team-a"]
    (binding,) = [o for o in objects if o["kind"] == "RoleBinding" and o["metadata"]["namespace"] == "team-a"]
    assert binding["roleRef"] == {"apiGroup": RBAC, "kind": "ClusterRole", "name": "shoal-viewer-account"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "shoal-viewer", "namespace": "team-a"}]
    reach = one(objects, "RoleBinding", "shoal-reach")
    assert (reach["metadata"]["namespace"], reach["roleRef"]["kind"]) == (HOME, "Role")
    assert reach["subjects"] == [{"kind": "Group", "apiGroup": RBAC, "name": "system:authenticated"}]


def test_shoals_own_namespace_is_no_namespace_of_viewers() -> None:
    done = helm("template", "shoal", str(CHART), "-n", HOME, "--set", f"rbac.roles.viewerNamespaces={{{HOME}}}")
    assert done.returncode != 0
    assert "whose shoal-viewer sees all namespaces" in done.stderr


def test_with_roles_off_nothing_asks_and_nothing_is_granted() -> None:
    off = with_roles(enabled=False)
    ours = {*rights.ROLES, *(f"{role}-account" for role in rights.ROLES), "shoal-reach", "shoal-reviews"}
    left = [(o["kind"], o["metadata"]["name"]) for o in off if o["metadata"]["name"] in ours]
    assert sorted(left) == [("Role", "shoal-billing"), ("Role", "shoal-logs")], "the roles with a key stay"
    for component in ("gateway", "ledger"):
        for objects, value in ((off, "false"), (rendered({}), "true")):
            container = one(objects, "StatefulSet", f"shoal-{component}")["spec"]["template"]["spec"]["containers"][0]
            assert {"name": f"SHOAL_{component.upper()}_ROLE_TOKENS", "value": value} in container["env"]


@pytest.mark.apiserver
@pytest.mark.parametrize(
    ("role", "where", "verb", "what", "allowed"),
    [
        ("shoal-billing", HOME, "create", "serviceaccounts/shoal-billing --subresource=token", True),
        ("shoal-billing", HOME, "create", "serviceaccounts/shoal-tenant-admin --subresource=token", False),
        ("shoal-billing", HOME, "create", "serviceaccounts/shoal-ledger --subresource=token", False),
        ("shoal-billing", HOME, "get", "services/shoal-ledger:8500 --subresource=proxy", True),
        ("shoal-billing", HOME, "get", "services/https:shoal-ledger:8543 --subresource=proxy", True),
        ("shoal-billing", HOME, "get", "services/shoal-gateway-pods:9090 --subresource=proxy", False),
        ("shoal-billing", HOME, "get", "pods/shoal-ledger-0 --subresource=proxy", False),
        ("shoal-billing", HOME, "get", "secrets/shoal-key-billing", False),
        ("shoal-billing", HOME, "get", "secrets/shoal-root-key", False),
        ("shoal-billing", HOME, "get", "configmaps/shoal-prices", True),
        ("shoal-viewer", "default", "create", "serviceaccounts/shoal-viewer --subresource=token", True),
        ("shoal-viewer", "default", "get", "models.shoal.dev", True),
        ("shoal-viewer", "default", "patch", "models.shoal.dev", False),
        ("shoal-viewer", "default", "list", "pods", True),
        ("shoal-viewer", "default", "list", "events.events.k8s.io", True),
        ("shoal-viewer", "default", "get", "pods --subresource=log", False),
        ("shoal-viewer", "default", "delete", "pods", False),
        ("shoal-viewer", HOME, "get", "services/shoal-gateway-pods:9090 --subresource=proxy", True),
        ("shoal-viewer", HOME, "delete", "services/shoal-gateway-pods:9090 --subresource=proxy", False),
        ("shoal-logs", HOME, "delete", "services/shoal-gateway-pods:9090 --subresource=proxy", True),
        ("shoal-logs", HOME, "delete", "pods", False),
        ("shoal-logs", HOME, "get", "services/shoal-ledger:8500 --subresource=proxy", False),
        ("shoal-tenant-admin", HOME, "create", "services/shoal-ledger:8500 --subresource=proxy", True),
    ],
)
def test_what_people_may_who_are_bound_in_a_namespace(
    apiserver: ApiServer, role: str, where: str, verb: str, what: str, allowed: bool
) -> None:
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME}}
    binding = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{role}-person", "namespace": where},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "apiGroup": RBAC, "name": f"{role}-person"}],
    }
    assert apiserver.apply(space, one(rendered({}), "ClusterRole", role), binding).returncode == 0
    ask = ("auth", "can-i", verb, *what.split(), f"--as={role}-person", "-n", where)
    if allowed:
        until(lambda: apiserver.run(*ask).stdout.strip() == "yes", 30)
    else:
        assert apiserver.run(*ask).stdout.strip() == "no"
    # Nowhere else: a RoleBinding is of one namespace.
    assert apiserver.run(*ask[:-1], "kube-public").stdout.strip() == "no"


def test_the_names_of_the_charts_services_are_those_of_the_code() -> None:
    ports = {
        names.LEDGER_SERVICE: {names.LEDGER_PORT, names.LEDGER_TLS_PORT},
        names.OPERATOR_SERVICE: {names.OPS_PORT},
        names.GATEWAY_OPS_SERVICE: {names.OPS_PORT, names.OPS_TLS_PORT},
    }
    for name, wanted in ports.items():
        service = one(rendered({}), "Service", name)
        assert wanted <= {port["port"] for port in service["spec"]["ports"]}
