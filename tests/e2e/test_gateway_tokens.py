"""A gateway can write only its own rows: with pods' tokens of a real API server, and the chart's permissions."""

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import select

from shoal.api import names
from shoal.kube.client import KubeClient
from shoal.ledger import schema
from shoal.ledger.ownrows import NOT_ITS_OWN
from tests.support.apiserver import ApiServer
from tests.support.charts import rendered
from tests.support.ledger import Served, record, served
from tests.support.operators import NAMESPACE
from tests.support.waiting import until

pytestmark = pytest.mark.apiserver

GATEWAYS = ("shoal-gateway-0", "shoal-gateway-1")
AT_ONCE = ("--force", "--grace-period=0")
LEDGER = f"system:serviceaccount:{NAMESPACE}:shoal-ledger"


def pod(name: str, account: str) -> dict[str, Any]:
    """As much of it as the API server wants: nothing runs it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"serviceAccountName": account, "containers": [{"name": "main", "image": "none"}]},
    }


@pytest.fixture
def cluster(apiserver: ApiServer) -> Iterator[ApiServer]:
    """What the chart makes of accounts and roles, where only the ledger's own one lets it ask; two pods of gateways and
    one of something else."""
    objects = rendered({"metrics": {"auth": {"enabled": False}}})
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    wanted = ("shoal-ledger", "shoal-ledger-senders", "shoal-gateway", "shoal-operator")
    roles = [o for o in objects if o["kind"] in kinds and o["metadata"]["name"] in wanted]
    # Tests share the API server, and another one may have let everybody of the chart ask.
    others = apiserver.run("get", "clusterrolebinding", "shoal-access", "-o", "json").stdout
    apiserver.run("delete", "clusterrolebinding", "shoal-access", "--ignore-not-found")
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    apiserver.kubectl("apply", "-f", "-", text=yaml.safe_dump_all([space, *roles]))
    pods = [*(pod(name, "shoal-gateway") for name in GATEWAYS), pod("other-0", "shoal-operator")]
    apiserver.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(pods))
    can = ("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", f"--as={LEDGER}")
    until(lambda: apiserver.run(*can).returncode == 0, 30)
    yield apiserver
    for each in pods:
        apiserver.run("delete", "pod", each["metadata"]["name"], f"--namespace={NAMESPACE}", *AT_ONCE)
    if others:
        binding = json.loads(others)
        fields = {key: binding[key] for key in ("apiVersion", "kind", "roleRef", "subjects")}
        fields["metadata"] = {"name": binding["metadata"]["name"], "labels": binding["metadata"].get("labels", {})}
        apiserver.kubectl("apply", "-f", "-", text=yaml.safe_dump(fields))


@pytest.fixture
async def ledger(cluster: ApiServer, tmp_path: Path) -> AsyncIterator[Served]:
    """With its own ServiceAccount."""
    token = cluster.kubectl("create", "token", "shoal-ledger", f"--namespace={NAMESPACE}").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    async with await KubeClient.from_environment(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        url = f"sqlite:///{tmp_path}/ledger.sqlite"
        given = {"gateway_tokens": True, "pod_namespace": NAMESPACE, "client": client}
        async with served(url, tmp_path, **given) as it:
            yield it


def token_of(
    cluster: ApiServer, name: str | None, account: str = "shoal-gateway", audience: str = names.LEDGER_AUDIENCE
) -> str:
    """As the kubelet gets it; None: bound to no pod."""
    bound = () if name is None else ("--bound-object-kind=Pod", f"--bound-object-name={name}")
    return cluster.kubectl(
        "create", "token", account, f"--namespace={NAMESPACE}", f"--audience={audience}", *bound
    ).strip()


async def send(ledger: Served, token: str, request: str, gateway: str) -> tuple[int, dict[str, Any]]:
    row = record(request, at=datetime.now(UTC), gateway=f"{gateway}/aaaa")
    return await ledger.send(row, **ledger.headers(), **{names.HEADER_POD_TOKEN: token})


async def test_a_pods_token_lets_its_own_rows_in_and_no_other_ones(ledger: Served, cluster: ApiServer) -> None:
    mine, other = GATEWAYS
    token = token_of(cluster, mine)
    status, answer = await send(ledger, token, "r1", mine)
    assert (status, answer["new"], answer["aside"]) == (200, 1, 0)
    status, answer = await send(ledger, token, "r2", other)
    assert (status, answer["new"], answer["aside"]) == (200, 0, 1)
    # The other one's own token takes the same row.
    status, answer = await send(ledger, token_of(cluster, other), "r2", other)
    assert (status, answer["new"], answer["aside"]) == (200, 1, 0)
    aside = await ledger.process.store.read(lambda c: c.execute(select(schema.aside.c.reason)).scalars().all())
    assert list(aside) == [f"sent by {mine}: {NOT_ITS_OWN}: it says that it is of {other}"]


async def test_what_is_no_token_of_a_gateways_pod_is_refused(ledger: Served, cluster: ApiServer) -> None:
    mine = GATEWAYS[0]
    good = token_of(cluster, mine)
    head, body, signature = good.split(".")
    for token, why in (
        (token_of(cluster, mine, audience="https://kubernetes.default.svc"), "not for audience shoal-ledger"),
        (token_of(cluster, "other-0", "shoal-operator"), "must be of system:serviceaccount"),
        (token_of(cluster, None), "bound to no pod"),
        (f"{head}.{body}.{signature[::-1]}", "does not know the pod's token"),
    ):
        status, answer = await send(ledger, token, "r1", mine)
        assert status == 403, answer
        assert why in answer["error"]["message"]
    assert (await send(ledger, good, "r1", mine))[0] == 200


async def test_the_token_of_a_pod_that_is_gone_proves_nothing(ledger: Served, cluster: ApiServer) -> None:
    name = GATEWAYS[1]
    gone = token_of(cluster, name)
    cluster.kubectl("delete", "pod", name, f"--namespace={NAMESPACE}", *AT_ONCE)
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": gone, "audiences": [names.LEDGER_AUDIENCE]},
    }

    def unknown() -> bool:
        """The API server hears of a deletion by its own watch, and keeps what it found for some seconds."""
        said = cluster.kubectl("create", "-f", "-", "-o", "json", text=json.dumps(review))
        return not json.loads(said)["status"].get("authenticated")

    until(unknown, 30)
    status, answer = await send(ledger, gone, "r1", name)
    assert (status, "does not know the pod's token" in answer["error"]["message"]) == (403, True)
    # Its successor has the same name, and so its rows.
    cluster.kubectl("apply", "-f", "-", text=yaml.safe_dump(pod(name, "shoal-gateway")))
    assert (await send(ledger, token_of(cluster, name), "r1", name))[0] == 200


async def test_without_the_charts_role_rows_wait(ledger: Served, cluster: ApiServer) -> None:
    """The mutation: the API server says no to the ledger itself, which is no verdict on the gateway."""
    # The second one is for people's roles, and grants the same; another test may have made it.
    cluster.kubectl("delete", "clusterrolebinding", "shoal-ledger-senders", "shoal-reviews", "--ignore-not-found")
    can = ("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", f"--as={LEDGER}")
    until(lambda: cluster.run(*can).returncode != 0, 30)
    status, answer = await send(ledger, token_of(cluster, GATEWAYS[0]), "r1", GATEWAYS[0])
    assert (status, "cannot say whose" in answer["error"]["message"]) == (503, True)
