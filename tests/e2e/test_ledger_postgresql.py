"""The chart with PostgreSQL: a real server, which the ledger's pod reaches by a URL with a password, from a Secret.

The release moves there and back again, as an administrator's would; what is kept on the one is not on the other.
"""

import base64
import json
import os
import secrets
import signal
import time
from collections.abc import Generator
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.api.meta import API_VERSION
from shoal.cli.main import main
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab import network
from tests.e2e.conftest import VALUES, Fleet
from tests.support.pages import page
from tests.support.postgres import Postgres, postgres
from tests.support.tenantfixture import LEDGER, TenantFixture, admitted
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]

TENANT = f"postgresql-e2e-{os.getpid()}"
DATABASE = "ledger"
SECRET = "ledger-db"
PASSWORD = secrets.token_hex(16)
POD = LEDGER.partition("/")[2]
WAIT = 90.0
"""A pod that starts anew, and gateways that try again every 10 s."""


def install(fleet: Fleet, **ledger: Any) -> None:
    """The release as the other tests have it, but for these values of the ledger."""
    prices = steps.EXAMPLES / steps.PRICES_FILE
    own = {"ledger": {"prices": {prices.name: prices.read_text()}, **ledger}}
    steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES | own)
    fleet.kubectl("rollout", "status", "statefulset/shoal-ledger", "-n", NAMESPACE, "--timeout=120s", timeout=130)


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Generator[Postgres]:
    with postgres("fsync=off", f"listen_addresses={network.GATEWAY}", network=fleet.lab.state.pid) as it:
        it.owned_database(DATABASE, PASSWORD)
        yield it


@pytest.fixture(scope="module")
def tenants(fleet: Fleet, server: Postgres) -> Generator[TenantFixture]:
    made = TenantFixture(fleet)
    spec = {"models": [{"namespace": "demo", "name": "tiny-chat"}], "externalID": "cus_postgresql"}
    fleet.apply({"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": TENANT}, "spec": spec})
    url = f"postgresql://{DATABASE}:{PASSWORD}@{network.GATEWAY}:5432/{DATABASE}"
    metadata = {"name": SECRET, "namespace": NAMESPACE}
    fleet.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"url": url}})
    try:
        made.keys[TENANT] = made.make_key("first", tenant=TENANT)
        admitted(made, made.keys[TENANT])
        yield made
    finally:
        install(fleet)  # other tests go on with SQLite
        fleet.kubectl("delete", "secret", SECRET, "-n", NAMESPACE, "--ignore-not-found")
        fleet.kubectl("delete", "tenants.shoal.dev", TENANT, "--ignore-not-found")


def kept(server: Postgres) -> list[tuple[str, int]]:
    """Requests of the tenant that PostgreSQL has, with their tokens."""
    found = server.rows(
        DATABASE,
        "SELECT request, coalesce(input_tokens, 0) + coalesce(output_tokens, 0) FROM usage"
        " WHERE tenant = %s AND attempt = 0 AND ended",
        TENANT,
    )
    return sorted((str(request), int(tokens)) for request, tokens in found)


def arrived(server: Postgres, asked: list[tuple[str, int]]) -> None:
    """Waits until PostgreSQL has every request once, with the tokens that its client read."""
    until(lambda: len(kept(server)) >= len(asked), WAIT, lambda: f"{len(kept(server))} of {len(asked)}")
    assert kept(server) == sorted(asked)


def shoal(tenants: TenantFixture, *args: str) -> str:
    """What `kubectl shoal ARGS` prints."""
    done = CliRunner().invoke(main, [*args, "--kubeconfig", str(tenants.fleet.lab.kubeconfig)])
    assert done.exit_code == 0, done.output
    return done.stdout


def container(fleet: Fleet) -> dict[str, Any]:
    """How the ledger's container stands."""
    found = json.loads(fleet.kubectl("get", "pod", POD, "-n", NAMESPACE, "-o", "json"))
    return found["status"]["containerStatuses"][0]


def requests(tenants: TenantFixture) -> int:
    """Of the tenant, as the ledger that runs now says to an administrator."""
    table = json.loads(shoal(tenants, "usage", "--by", "tenant", "-o", "json"))
    return sum(row["requests"] for row in table["rows"] if row["tenant"] == TENANT)


def test_the_ledger_moves_to_postgresql_and_back(fleet: Fleet, tenants: TenantFixture, server: Postgres) -> None:
    before = [tenants.ask(TENANT) for _ in range(2)]
    until(lambda: requests(tenants) == len(before), WAIT, lambda: requests(tenants))

    install(fleet, database={"secretName": SECRET})
    asked = [tenants.ask(TENANT) for _ in range(3)]
    arrived(server, asked)
    own = tenants.get("/v1/usage?by=externalID", TENANT)
    assert own.status_code == 200, own.text
    (row,) = own.json()["rows"]
    assert (row["externalID"], row["requests"]) == ("cus_postgresql", len(asked))
    assert row["inputTokens"] + row["outputTokens"] == sum(tokens for _, tokens in asked)
    assert "demo/tiny-chat" in shoal(
        tenants, "bill", "--tenant", TENANT, "--month", time.strftime("%Y-%m", time.gmtime())
    )

    # The server is away: requests are served, gateways keep their records, and the tenant is told.
    server.stop()
    asked += [tenants.ask(TENANT) for _ in range(3)]

    def told() -> bool:
        time.sleep(1.0)  # how often a tenant may ask is bounded
        return tenants.get("/v1/usage", TENANT).status_code == 503

    until(told, WAIT)
    assert container(fleet)["restartCount"] == 0, "it waits, and is not restarted"
    server.start()
    arrived(server, asked)
    until(lambda: container(fleet)["ready"], WAIT, lambda: container(fleet))

    # The ledger is killed: its lock at the server ends with its session.
    fleet.lab.signal_container(LEDGER, signal.SIGKILL)
    asked += [tenants.ask(TENANT) for _ in range(3)]
    # Until the kubelet has seen its death, it still is what it was.
    until(lambda: (now := container(fleet))["restartCount"] > 0 and now["ready"], WAIT, lambda: container(fleet))
    arrived(server, asked)
    assert requests(tenants) == len(asked)

    # The password is in its Secret, and nowhere else.
    secret = json.loads(fleet.kubectl("get", "secret", SECRET, "-n", NAMESPACE, "-o", "json"))
    assert PASSWORD in base64.b64decode(secret["data"]["url"]).decode()
    texts = [fleet.kubectl("logs", POD, "-n", NAMESPACE, *more) for more in ((), ("--previous",))]
    texts += [fleet.kubectl("get", "pod,statefulset,events", "-n", NAMESPACE, "-o", "json")]
    texts += [
        page(fleet, json.loads(fleet.kubectl("get", "pod", POD, "-n", NAMESPACE, "-o", "json"))["status"]["podIP"])
    ]
    assert any("postgresql" in text for text in texts), "its log does not say where it keeps records"
    assert not [text for text in texts if PASSWORD in text]

    # No data is moved: on SQLite again the ledger has what it had there, and what comes now.
    install(fleet)
    before.append(tenants.ask(TENANT))
    until(lambda: requests(tenants) == len(before), WAIT, lambda: requests(tenants))
    assert len(kept(server)) == len(asked)
