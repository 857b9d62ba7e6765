"""Two Tenants on a live fleet, whose keys `shoal keys` makes, and what tests ask in their name."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
import openai
from click.testing import CliRunner

from shoal.api import names
from shoal.cli.main import main
from shoal_dev.demo.clusters import NAMESPACE, LabCluster
from shoal_dev.lab.errors import LabError
from tests.support.knocking import knocking
from tests.support.waiting import until

MODEL = "demo/tiny-chat"
# Of this run: an earlier one on the same lab left usage.
TENANT, OTHER = f"tenants-e2e-{os.getpid()}", f"tenants-e2e-{os.getpid()}-other"
PROMPT = "xylophone canary prompt"
LEDGER = f"{NAMESPACE}/shoal-ledger-0"


@dataclass
class TenantFixture:
    """The two tenants of these tests, and what was asked in their name."""

    fleet: LabCluster
    keys: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    """Tenant -> key that works."""
    every_key: list[str] = field(default_factory=list[str], repr=False)
    answers: list[str] = field(default_factory=list[str])

    def client(self, tenant: str = TENANT) -> openai.OpenAI:
        port = self.fleet.lab.forward_port()
        url = f"http://127.0.0.1:{port}/v1"
        return openai.OpenAI(base_url=url, api_key=self.keys[tenant], max_retries=0, timeout=30)

    def get(self, path: str, tenant: str = TENANT) -> httpx.Response:
        port = self.fleet.lab.forward_port()
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=30)

    def ask(self, tenant: str = TENANT, tokens: int = 4, prompt: str = PROMPT) -> tuple[str, int]:
        """Id of the request, and its tokens by the answer's own usage. The answer repeats the prompt."""
        with self.client(tenant) as client:
            raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=tokens, echo=True)
        answer = raw.parse()
        self.answers.append(answer.choices[0].text)
        assert answer.usage is not None
        return raw.headers["x-request-id"], answer.usage.total_tokens

    def make_key(self, name: str, *more: str, tenant: str = TENANT) -> str:
        said = self.manage("create", "--name", name, *more, tenant=tenant)
        self.every_key.append(said["key"])
        return said["key"]

    def manage(self, *args: str, tenant: str = TENANT) -> dict[str, Any]:
        """`kubectl shoal keys ... --apply`."""
        where = ("--tenant", tenant, "--apply", "-o", "json", "--kubeconfig", str(self.fleet.lab.kubeconfig))
        done = CliRunner().invoke(main, ["keys", *args, *where])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def patch(self, spec: dict[str, Any], tenant: str = TENANT) -> None:
        body = json.dumps({"spec": spec})
        self.fleet.kubectl("patch", "tenants.shoal.dev", tenant, "--type=merge", "-p", body)

    def gateways(self) -> list[str]:
        """Addresses of the single pods, as they are inside the lab."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY}"
        pods = self.fleet.get("pods", "-n", NAMESPACE, "-l", selector)
        return [f"{pod['status']['podIP']}:{names.GATEWAY_PORT}" for pod in pods]

    def rows(self, *args: str) -> list[dict[str, Any]]:
        """Requests of the tenant that the ledger has, by its own listing; empty while it starts."""
        command = ("shoal", "ledger", "records", "--limit", "10000", "-o", "json")
        try:
            output = self.fleet.exec(LEDGER.partition("/")[2], *command, *args)
        except click.ClickException:
            return []
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def admitted(tenants: TenantFixture, key: str) -> None:
    """Waits until every gateway knows the key."""
    turn(tenants, key, 200, lambda: None)


def turn(tenants: TenantFixture, key: str, status: int, act: Callable[[], object]) -> float:
    """Does something, waits until every gateway answers the key so; seconds from the end of the act to the last one."""
    gateways = tenants.gateways()
    assert len(gateways) == 2
    with knocking(tenants.fleet.lab.enter_command(), gateways, key) as knocks:
        until(lambda: len(knocks.last) == 2, 20, lambda: knocks.last)
        act()
        done = time.time()
        until(lambda: knocks.all_say(status, 2), 20, lambda: knocks.last)
        return max(knocks.since.values()) - done


def wait_ready(tenants: TenantFixture, pod: str) -> None:
    namespace, _, name = pod.partition("/")
    # First that its death was noticed, else it is still ready.
    until(lambda: alive(tenants, pod), 60)
    tenants.fleet.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "-n", namespace, "--timeout=60s", timeout=70)


def alive(tenants: TenantFixture, pod: str) -> bool:
    try:
        tenants.fleet.lab.first_process(pod)
    except LabError:
        return False
    return True
