"""`kubectl shoal usage`, `top` and `why` with a role and no key: with the chart's roles, and the tokens and the proxy
of a real API server.

Nothing runs pods here: the ledger and the operators' pages are in this process, and the endpoints of their Services
lead to them.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from sqlalchemy import insert

from shoal.api import names, rights
from shoal.cli.main import main
from shoal.controllers.scaling.serve import add_routes
from shoal.kube.access import Access
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.ledger.schema import hours
from shoal.net.pages import TokenGuard, denial_response
from shoal.net.server import HTTPServer, make_server
from shoal.net.serving import serving
from shoal.net.shell import Shell
from tests.support.apiserver import ApiServer
from tests.support.charts import rendered
from tests.support.ledger import Served, served
from tests.support.operators import NAMESPACE
from tests.support.queryapi import hour
from tests.support.waiting import until
from tests.unit.controllers.test_decisions_served import FakeHistory

pytestmark = pytest.mark.apiserver

KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
TEAM = "chat"
POD = "shoal-pages-0"
PEOPLE = "people"
"""The namespace of the accounts that stand for users."""


def own_address() -> str:
    """Of this machine: the API server's proxy reaches no loopback address of an endpoint."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return str(probe.getsockname()[0])


def kubeconfig(cluster: ApiServer, folder: Path, account: str, namespace: str) -> str:
    """Of a user, by the token of a ServiceAccount; its tokens are for the API server alone."""
    token = cluster.kubectl("create", "token", account, "-n", namespace).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = folder / f"kubeconfig-{account}"
    path.write_text(json.dumps(config))
    return str(path)


def service(name: str, port: int, address: str, *targets: int) -> list[dict[str, Any]]:
    """As the endpoints controller would fill it: the API server's proxy goes to addresses of pods only, and chooses one
    at random."""
    pod = {"kind": "Pod", "name": POD, "namespace": NAMESPACE}
    ports = [{"name": "main", "port": port, "protocol": "TCP"}]
    subsets = [
        {"addresses": [{"ip": address, "targetRef": pod}], "ports": [{"name": "main", "port": each, "protocol": "TCP"}]}
        for each in targets
    ]
    metadata = {"name": name, "namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}},
        {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets},
    ]


def remove(cluster: ApiServer) -> None:
    for name in (names.LEDGER_SERVICE, names.OPERATOR_SERVICE):
        cluster.run("delete", "service,endpoints", name, "-n", NAMESPACE)
    cluster.run("delete", "pod", POD, "-n", NAMESPACE, "--force", "--grace-period=0")


class Office:
    """The API server, the ledger, and users with nothing but what a test binds."""

    def __init__(self, cluster: ApiServer, folder: Path, ledger: Served) -> None:
        self.cluster, self.folder, self.ledger = cluster, folder, ledger
        self._bound: list[tuple[str, str]] = []

    def user(self, name: str) -> str:
        self.cluster.run("create", "serviceaccount", name, "-n", PEOPLE)
        return kubeconfig(self.cluster, self.folder, name, PEOPLE)

    def bind(self, user: str, role: str, namespace: str, *, kind: str = "clusterrole") -> None:
        name = f"{user}-{role}"
        subject = f"--serviceaccount={PEOPLE}:{user}"
        self.cluster.kubectl("create", "rolebinding", name, "-n", namespace, f"--{kind}={role}", subject)
        self._bound.append((name, namespace))

    def unbind(self) -> None:
        for name, namespace in self._bound:
            self.cluster.run("delete", "rolebinding", name, "-n", namespace)

    async def shoal(self, config: str, *args: str) -> Result:
        given = [*args, "--kubeconfig", config]
        return await asyncio.to_thread(CliRunner().invoke, main, given, env={"COLUMNS": "200"})

    async def eventually(self, config: str, *args: str) -> Result:
        """The API server's authorizer learns of a new binding by its own watch."""
        for _ in range(40):
            found = await self.shoal(config, *args)
            if found.exit_code == 0:
                return found
            await asyncio.sleep(0.5)
        raise AssertionError(found.output)  # pyright: ignore[reportPossiblyUnboundVariable]


@contextlib.asynccontextmanager
async def two_operators(client: KubeClient) -> AsyncGenerator[tuple[int, int]]:
    """The pages of two operators, of which one leads; yields their ports."""
    guard = TokenGuard(Access(client), Callers(client, rights.OPERATOR_AUDIENCE), rights.OPERATOR)
    servers: list[HTTPServer] = []
    for name in ("op-1", "op-2"):
        shell = Shell("the operator", wording=denial_response, guard=guard)
        leads = name == "op-1"
        add_routes(shell, FakeHistory(), operator=name, leads=lambda leads=leads: leads, leader=lambda: "op-1")
        servers.append(make_server(shell, host="0.0.0.0", port=0, keep_alive=5, stop_seconds=1))
    async with serving(*servers):
        yield servers[0].port, servers[1].port


@pytest.fixture
async def office(apiserver: ApiServer, tmp_path: Path) -> AsyncIterator[Office]:
    address = own_address()
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in (NAMESPACE, TEAM, PEOPLE)]
    # Only shoal-reviews lets the ledger ask: the other way to the same right is off.
    values = {"metrics": {"auth": {"enabled": False}}, "rbac": {"roles": {"viewerNamespaces": [TEAM]}}}
    objects = [o for o in rendered(values) if o["kind"] in KINDS]
    assert apiserver.apply(*spaces).returncode == 0
    applied = apiserver.apply(*objects)
    assert applied.returncode == 0, applied.stderr
    ledgers = kubeconfig(apiserver, tmp_path, "shoal-ledger", NAMESPACE)
    can = ("auth", "can-i", "create", "subjectaccessreviews.authorization.k8s.io")
    until(lambda: apiserver.run(*can, f"--as=system:serviceaccount:{NAMESPACE}:shoal-ledger").returncode == 0, 30)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(await KubeClient.from_environment(kubeconfig=ledgers))
        given: dict[str, Any] = {"client": client, "role_tokens": True, "reconcile": False, "host": "0.0.0.0"}
        it = await stack.enter_async_context(served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, **given))
        rows = [
            hour("2026-11-01T00:00", "acme", model=f"{TEAM}/llama", input_tokens=10),
            hour("2026-11-01T00:00", "globex", model="code/coder", input_tokens=20),
        ]
        await it.process.store.write(lambda connection: connection.execute(insert(hours), rows) and None)
        remove(apiserver)
        operators = await stack.enter_async_context(two_operators(client))
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": POD, "namespace": NAMESPACE},
            "spec": {"serviceAccountName": "shoal-ledger", "containers": [{"name": "main", "image": "none"}]},
        }
        made = apiserver.apply(
            pod,
            *service(names.LEDGER_SERVICE, names.LEDGER_PORT, address, it.process.server.port),
            *service(names.OPERATOR_SERVICE, names.OPS_PORT, address, *operators),
        )
        assert made.returncode == 0, made.stderr
        status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
        apiserver.kubectl("patch", "pod", POD, "-n", NAMESPACE, "--subresource=status", "-p", json.dumps(status))
        found = Office(apiserver, tmp_path, it)
        try:
            yield found
        finally:
            found.unbind()
            remove(apiserver)


SPAN = ("--from", "2026-11", "--to", "2026-12")


def models(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [row["model"] for row in json.loads(result.stdout)["rows"]]


async def test_finance_with_the_role_sees_usage_and_bills_and_no_key(office: Office) -> None:
    finance = office.user("finance")
    before = await office.shoal(finance, "usage", *SPAN)
    assert before.exit_code == 1
    who = f"system:serviceaccount:{PEOPLE}:finance"
    assert f"--clusterrole=shoal-viewer --user={who}" in before.stderr
    office.bind("finance", rights.BILLING, NAMESPACE)
    found = await office.eventually(finance, "usage", "--by", "model", "-o", "json", *SPAN)
    assert models(found) == [f"{TEAM}/llama", "code/coder"]
    bill = await office.shoal(finance, "bill", "--tenant", "acme", "--month", "2026-11")
    assert bill.exit_code == 0, bill.output
    for key in ("shoal-key-billing", "shoal-root-key"):
        can = ("auth", "can-i", "get", f"secrets/{key}", "-n", NAMESPACE, f"--as={who}")
        assert office.cluster.run(*can).stdout.strip() == "no"
    credit = await office.shoal(finance, "credits", "add", "--tenant", "acme", "--amount", "5")
    assert (credit.exit_code, "This needs the ClusterRole shoal-tenant-admin" in credit.stderr) == (1, True)


async def test_a_team_sees_its_namespace_alone(office: Office) -> None:
    member = office.user("member")
    office.bind("member", rights.VIEWER, TEAM)
    query = ("usage", "--by", "model", "-o", "json", *SPAN)
    said = ""
    for _ in range(40):
        said = (await office.shoal(member, *query, "-n", TEAM)).stderr
        if "shoal-reach" in said:
            break
        await asyncio.sleep(0.5)
    assert "This needs the Role shoal-reach in namespace shoal-system" in said
    office.bind("member", "shoal-reach", NAMESPACE, kind="role")
    assert models(await office.eventually(member, *query, "-n", TEAM)) == [f"{TEAM}/llama"]
    for more in ((), ("-n", "default"), ("-n", NAMESPACE)):
        assert (await office.shoal(member, *query, *more)).exit_code == 1, more
    bill = await office.shoal(member, "bill", "--tenant", "acme", "--month", "2026-11")
    assert bill.exit_code == 1


async def test_a_team_sees_load_and_decisions_of_its_namespace_alone(office: Office) -> None:
    member = office.user("watcher")
    office.bind("watcher", rights.VIEWER, TEAM)
    office.bind("watcher", "shoal-reach", NAMESPACE, kind="role")
    model = {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "a", "namespace": TEAM},
        "spec": {"source": {"uri": "hf://owner/llama"}},
    }
    assert office.cluster.apply(model).returncode == 0
    top = await office.eventually(member, "top", "-n", TEAM, "-o", "json")
    assert [each["model"] for each in json.loads(top.stdout)] == [f"{TEAM}/a"]
    for _ in range(5):  # some of these calls reach the operator that does not lead
        why = await office.shoal(member, "why", "a", "-n", TEAM)
        assert why.exit_code == 0, why.output
        assert "Waking: 1 held" in why.stdout
        assert f"pods of Model {TEAM}/a" not in why.stdout, "not read, so not known"
        assert f"events of namespace {TEAM}" not in why.stdout
    for args in (("top", "-A"), ("top", "-n", "code"), ("adapters", "-n", "code"), ("why", "b", "-n", "code")):
        refused = await office.shoal(member, *args)
        assert refused.exit_code == 1, args
    everywhere = office.user("on-call")
    office.bind("on-call", rights.VIEWER, NAMESPACE)
    top = await office.eventually(everywhere, "top", "-A", "-o", "json")
    assert [each["model"] for each in json.loads(top.stdout)] == [f"{TEAM}/a", "code/b"]
    office.cluster.kubectl("delete", "model", "a", "-n", TEAM)


async def test_tokens_of_others_open_nothing(office: Office) -> None:
    """Straight at the ledger, as a pod in the cluster would try it."""

    def token(account: str, namespace: str, *more: str) -> str:
        return office.cluster.kubectl("create", "token", account, "-n", namespace, *more).strip()

    async def status(shown: str, path: str = "/v1/usage") -> int:
        return (await office.ledger.call("GET", path, Authorization=f"Bearer {shown}"))[0]

    ours = f"--audience={rights.LEDGER_AUDIENCE}"
    good = token(rights.BILLING, NAMESPACE, ours)
    assert await status(good) == 200
    head, body, signature = good.split(".")
    assert await status(f"{head}.{body}.{signature[::-1]}") == 401
    assert await status(token(rights.BILLING, NAMESPACE)) == 401, "a token for the API server itself"
    assert await status(token(rights.BILLING, NAMESPACE, "--audience=shoal-ledger")) == 401
    assert await status(token("shoal-gateway", NAMESPACE, ours)) == 403
    assert await status(token(rights.VIEWER, TEAM, ours)) == 403, "its role is of another namespace"
    assert await status(token(rights.VIEWER, TEAM, ours), f"/v1/usage?namespace={TEAM}") == 200
    assert await status(token(rights.VIEWER, NAMESPACE, ours), "/v1/bill?tenant=acme&month=2026-11") == 403
    # Shown to the API server, such a token is nobody's: it is for the ledger.
    asked = office.cluster.run("--token", good, "--kubeconfig=/dev/null", f"--server={office.cluster.url}",
                               "--insecure-skip-tls-verify", "get", "tenants.shoal.dev")  # fmt: skip
    assert asked.returncode != 0
