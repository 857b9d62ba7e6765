"""Tenants on a live fleet: keys, grants, limits, own usage; each request once in the ledger, whoever is killed.

The tests share two Tenants and go in order: the last looks for keys, prompts and answers of all of them, where none
should be.
"""

import concurrent.futures
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal.api.meta import API_VERSION
from shoal.cli.main import main
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet, serves
from tests.support.pages import page
from tests.support.tenantfixture import LEDGER, MODEL, OTHER, PROMPT, TENANT, TenantFixture, admitted, turn, wait_ready
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

LOGGED = "kept prompt"


@pytest.fixture(scope="module")
def tenants(fleet: Fleet) -> Generator[TenantFixture]:
    made = TenantFixture(fleet)
    grant = [{"namespace": "demo", "name": "tiny-chat"}]
    for tenant in (TENANT, OTHER):
        # One of them grants the adapters of the namespace, whatever Model is under them.
        adapters = [{"namespace": "demo"}] if tenant == OTHER else []
        spec = {"models": grant, "adapters": adapters, "externalID": f"cus_{tenant}"}
        fleet.apply({"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": tenant}, "spec": spec})
    fleet.kubectl("rollout", "status", "statefulset/shoal-ledger", "-n", NAMESPACE, "--timeout=120s", timeout=130)
    try:
        for tenant in (TENANT, OTHER):
            made.keys[tenant] = made.make_key("first", tenant=tenant)
            admitted(made, made.keys[tenant])
        yield made
    finally:
        fleet.kubectl("delete", "models,lorapools,loraadapters", "tenants-e2e", "-n", "demo", "--ignore-not-found")
        fleet.kubectl("delete", "tenants.shoal.dev", TENANT, OTHER, "--ignore-not-found")


def own(kind: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "tenants-e2e", "namespace": "demo"}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def test_a_key_that_the_command_made_opens_what_was_granted_and_nothing_else(
    fleet: Fleet, tenants: TenantFixture
) -> None:
    # Of a Model that is never placed: it cannot answer, which is told to whom it was granted.
    fleet.make_model("tenants-e2e", variants=[{"class": "no-such-class"}])
    source = {"uri": "file:///opt/shoal/adapters/legal"}
    fleet.apply(
        own("LoRAPool", modelRef={"name": "tenants-e2e"}),
        own("LoRAAdapter", poolRef={"name": "tenants-e2e"}, source=source, tenants=[OTHER], servedNames=["solo"]),
    )

    def asked(tenant: str, model: str) -> int:
        try:
            with tenants.client(tenant) as client:
                client.completions.create(model=model, prompt=PROMPT, max_tokens=1)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    assert asked(TENANT, MODEL) == 200
    assert asked(TENANT, "demo/tiny-code") == 404
    until(lambda: asked(OTHER, "solo") == 503, 60, lambda: asked(OTHER, "solo"))
    assert asked(TENANT, "solo") == 404


def test_nobody_else_can_put_a_name_before_a_tenant(fleet: Fleet, tenants: TenantFixture) -> None:
    """Whoever can write Models, pools and adapters in some namespace, and lists the tenant."""
    space, names_wanted = "tenants-e2e-evil", ["tiny-chat", "bait"]

    def theirs(kind: str, **spec: Any) -> dict[str, Any]:
        metadata = {"name": "theft", "namespace": space}
        return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}

    source = {"uri": "file:///opt/shoal/adapters/legal"}
    fleet.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}},
        theirs("Model", source={"uri": "file:///models/tiny-chat"}, variants=[{"class": "no-such-class"}]),
        theirs("LoRAPool", modelRef={"name": "theft"}),
        theirs(
            "LoRAAdapter",
            poolRef={"name": "theft"},
            source=source,
            tenants=[TENANT, OTHER, "*"],
            servedNames=names_wanted,
        ),
    )
    try:

        def asked(model: str, tenant: str = TENANT) -> int:
            try:
                with tenants.client(tenant) as client:
                    client.completions.create(model=model, prompt=PROMPT, max_tokens=1)
            except openai.APIStatusError as error:
                return error.status_code
            return 200

        # With the tenant's own half of the consent it is there: 503 says that it does not answer yet. The Model's name
        # stays the Model's, and another tenant sees nothing.
        tenants.patch({"adapters": [{"namespace": space, "names": ["theft", "none"]}]})
        until(lambda: asked("bait") == 503, 60, lambda: asked("bait"))
        assert (asked("tiny-chat"), asked("bait", OTHER), asked(f"{space}/theft", OTHER)) == (200, 404, 404)

        def ready() -> dict[str, Any]:
            (tenant,) = [t for t in fleet.get("tenants.shoal.dev") if t["metadata"]["name"] == TENANT]
            return next((c for c in tenant["status"]["conditions"] if c["type"] == "AdaptersReady"), {})

        until(lambda: ready().get("reason") == "AdapterNotFound", 60, ready)
        assert f"{space}/none" in ready()["message"]
        assert f"{space}/theft" not in ready()["message"]
        # Without it there is nothing, though every gateway knows of the adapter by now.
        tenants.patch({"adapters": None})
        # Asked several times: each gateway hears of it by itself.
        until(lambda: {asked(name) for name in ("bait", f"{space}/theft") * 4} == {404}, 60, lambda: asked("bait"))
        assert asked("tiny-chat") == 200
        listed = tenants.get("/v1/models").json()["data"]
        assert not [one for one in listed if "theft" in one["id"] or "bait" in one["id"]]
    finally:
        tenants.patch({"adapters": None})
        fleet.kubectl("delete", "namespace", space, "--wait=false")


def test_what_is_taken_away_is_refused_by_every_gateway_at_once(tenants: TenantFixture) -> None:
    def measured(what: str, key: str, status: int, act: Callable[[], object]) -> None:
        seconds = turn(tenants, key, status, act)
        print(f"{what}: {status} at both gateways {max(0.0, seconds) * 1000:.0f} ms after the command returned")

    first = tenants.keys[TENANT]
    measured("suspended", first, 403, lambda: tenants.patch({"suspended": True}))
    measured("no longer suspended", first, 200, lambda: tenants.patch({"suspended": None}))
    second = tenants.make_key("second")
    admitted(tenants, second)
    tenants.keys[TENANT] = second
    measured("disabled", first, 401, lambda: tenants.manage("disable", "first"))
    third = tenants.make_key("third")
    admitted(tenants, third)
    measured("expired", third, 401, lambda: tenants.manage("expire", "third", "now"))
    listed = CliRunner().invoke(
        main, ["keys", "list", "--tenant", TENANT, "--kubeconfig", str(tenants.fleet.lab.kubeconfig)]
    )
    states = dict(re.findall(rf"{TENANT} +(\w+) +(\w+)", listed.output))
    assert states == {"first": "disabled", "second": "active", "third": "expired"}


def test_over_a_limit_it_is_429_with_the_headers_that_sdks_read(tenants: TenantFixture) -> None:
    tenants.patch({"limits": {"requestsPerMinute": 2}}, OTHER)
    refused: list[tuple[Mapping[str, str], Any]] = []

    def limited() -> bool:
        try:
            tenants.ask(OTHER, 1)
        except openai.RateLimitError as error:
            refused.append((error.response.headers, error.response.json()))
            return True
        return False

    until(limited, 60)
    headers, body = refused[0]
    assert 0 < int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-limit-requests"] == "2"
    # What is left is shared out between the gateways: one may refuse before all of it is used.
    assert int(headers["x-ratelimit-remaining-requests"]) <= 1
    assert headers["x-ratelimit-reset-requests"]
    assert body["error"]["code"] == "rate_limit_exceeded"
    tenants.patch({"limits": None}, OTHER)
    until(lambda: not limited(), 60)


def test_a_tenant_reads_its_own_usage_and_nobody_elses(tenants: TenantFixture) -> None:
    asked = [tenants.ask() for _ in range(3)]

    def usage(tenant: str) -> list[dict[str, Any]]:
        answer = tenants.get("/v1/usage?by=key", tenant)
        return answer.json()["rows"] if answer.is_success else []

    def counted(tenant: str) -> int:
        return sum(row["inputTokens"] + row["outputTokens"] for row in usage(tenant) if row.get("key") == "second")

    until(lambda: counted(TENANT) >= sum(tokens for _, tokens in asked), 60, lambda: tenants.get("/v1/usage").text)
    assert {row["key"] for row in usage(TENANT)} <= {"first", "second", "third"}
    assert {row.get("tenant", OTHER) for row in usage(OTHER)} == {OTHER}
    # Asking for another's is not an error that tells of it: it is one's own.
    said = tenants.get(f"/v1/usage?tenant={TENANT}", OTHER)
    assert said.status_code >= 400 or all(row.get("tenant", OTHER) == OTHER for row in said.json()["rows"])


def test_a_request_log_is_kept_for_who_asked_for_it_and_read_by_nobody_else(tenants: TenantFixture) -> None:
    tenants.patch({"logging": {"mode": "Full", "redact": [{"name": "digits", "pattern": "[0-9]{4}"}]}}, OTHER)

    def logged(tenant: str) -> str:
        answer = tenants.get("/v1/logs", tenant)
        return answer.text if answer.is_success else ""

    def kept() -> bool:
        # Also a key that somebody puts into a prompt.
        tenants.ask(OTHER, prompt=f"{LOGGED} 4711 {tenants.keys[TENANT]}")
        return LOGGED in logged(OTHER)

    until(kept, 60, lambda: tenants.get("/v1/logs", OTHER).text)
    text = logged(OTHER)
    assert "[digits]" in text
    assert not [key for key in tenants.every_key if key in text]
    assert LOGGED not in logged(TENANT)

    # The same for who runs the fleet, through the API server's proxy to a gateway's pod.
    def ran(*words: str) -> str:
        done = CliRunner().invoke(main, ["logs", *words, "--kubeconfig", str(tenants.fleet.lab.kubeconfig)])
        assert done.exit_code == 0, done.output
        return done.output

    shown = ran("--tenant", OTHER, "-o", "json", "--since", "10m")
    entries = [json.loads(line) for line in shown.splitlines()]
    assert any(LOGGED in line for line in shown.splitlines())
    assert {entry["gateway"] for entry in entries}
    assert tenants.keys[TENANT] not in shown
    assert LOGGED not in ran("--tenant", TENANT, "-o", "json")
    assert "demo/tiny-chat" in ran("--tenant", OTHER)
    assert ran("delete", "--tenant", OTHER, "--yes").startswith("Deleted: ")
    assert ran("--tenant", OTHER, "-o", "json") == ""
    tenants.patch({"logging": None}, OTHER)


def test_a_gateway_killed_in_the_middle_of_an_answer_leaves_one_final_row(tenants: TenantFixture) -> None:
    pod = f"{NAMESPACE}/shoal-gateway-0"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    address = tenants.fleet.get("pods", "-n", NAMESPACE, "-l", "statefulset.kubernetes.io/pod-name=shoal-gateway-0")
    url = f"http://{address[0]['status']['podIP']}:{names.GATEWAY_PORT}/v1/completions"
    settings = [f'url = "{url}"', f'header = "Authorization: Bearer {tenants.keys[TENANT]}"']
    settings += ['header = "Content-Type: application/json"', f"data = {json.dumps(json.dumps(body))}"]
    curl = [*tenants.fleet.lab.enter_command(), "curl", "-sS", "-i", "-N", "-K", "-"]
    with subprocess.Popen(
        curl, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as asks:
        assert asks.stdin is not None
        assert asks.stdout is not None
        asks.stdin.write("\n".join(settings))
        asks.stdin.close()
        head, begun = "", time.monotonic()
        for line in asks.stdout:
            head += line
            # Longer than a checkpoint takes: the tokens until then are known.
            if line.startswith("data:") and time.monotonic() - begun > 2.5:
                break
        found = re.search(r"x-request-id: (\S+)", head, re.IGNORECASE)
        assert found, head[:500]
        tenants.fleet.lab.signal_container(pod, signal.SIGKILL)
        asks.kill()
    request = found[1]

    def ended() -> bool:
        return any(row["ended"] for row in tenants.rows("--request", request))

    until(ended, 120, lambda: tenants.rows("--request", request))
    (row,) = tenants.rows("--request", request)
    assert (row["outcome"], row["tenant"], row["key_name"]) == ("cut", TENANT, "second")
    assert row["output_tokens"] > 0
    assert row["external_id"] == f"cus_{TENANT}"
    wait_ready(tenants, pod)


def kill(tenants: TenantFixture, pod: str) -> None:
    """Waits until its next process is ready: until the kubelet has seen the death, the pod still is."""
    namespace, _, name = pod.partition("/")

    def status() -> dict[str, Any]:
        found = json.loads(tenants.fleet.kubectl("get", "pod", name, "-n", namespace, "-o", "json"))
        return found["status"]["containerStatuses"][0]

    before = status()["restartCount"]
    tenants.fleet.lab.signal_container(pod, signal.SIGKILL)
    until(lambda: (now := status())["restartCount"] > before and now["ready"], 120, status)


def test_a_ledger_killed_under_load_loses_nothing_and_counts_nothing_twice(tenants: TenantFixture) -> None:
    tenants.keys[TENANT] = tenants.make_key("load")
    admitted(tenants, tenants.keys[TENANT])

    def several(count: int) -> list[tuple[str, int]]:
        return [tenants.ask() for _ in range(count)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(several, 15) for _ in range(4)]
        for _ in range(2):
            time.sleep(1.0)
            kill(tenants, LEDGER)
        asked = [one for job in running for one in job.result(120)]

    def mine() -> list[dict[str, Any]]:
        return [row for row in tenants.rows("--tenant", TENANT) if row["key_name"] == "load" and row["ended"]]

    until(lambda: len(mine()) >= len(asked), 120, lambda: f"{len(mine())} of {len(asked)}")
    rows = mine()
    assert sorted(row["request"] for row in rows) == sorted(request for request, _ in asked)
    assert {row["request"]: row["input_tokens"] + row["output_tokens"] for row in rows} == dict(asked)


def test_keys_prompts_and_answers_are_nowhere(tenants: TenantFixture) -> None:
    """In no object, event, log, spool or database of the whole lab, and in no metric."""
    fleet, lab = tenants.fleet, tenants.fleet.lab
    assert any(PROMPT in answer for answer in tenants.answers), (
        "the answers do not hold the canary: nothing is looked for"
    )
    secrets = [PROMPT, *tenants.every_key]

    def holding(words: Sequence[str]) -> list[str]:
        command = ["grep", "-rlaF", "-D", "skip", "-f", "-", str(lab.paths.state)]
        text = "\n".join(words)
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
        return done.stdout.splitlines()

    # What does stand there is found: objects in etcd, records in spools and in the ledger, lines in logs.
    known = holding([hash_api_key(tenants.every_key[0])]), holding([f"cus_{TENANT}"])
    assert any("/etcd/" in path for path in known[0]), known
    assert any("spool.sqlite" in path for path in known[1]), known
    assert any("ledger.sqlite" in path for path in known[1]), known
    assert holding(secrets) == []
    # And one that somebody wrote down would be: what is looked for is not spelt in a way that no disk has.
    fleet.kubectl("annotate", "tenants.shoal.dev", OTHER, f"written-down={tenants.every_key[-1]}", f"too={PROMPT}")
    until(lambda: any("/etcd/" in path for path in holding(secrets)), 60)

    metrics = 0
    for pod in filter(serves, fleet.get("pods", "-A")):  # others start or go, and may not answer
        name = pod["metadata"]["name"]
        for port in (names.OPS_PORT, names.AGENT_PORT):
            listed = [p["containerPort"] for c in containers(pod) for p in c.get("ports", [])]
            if port in listed:
                text = page(fleet, pod["status"]["podIP"], port=port)
                metrics += 1
                assert "# HELP" in text
                assert not [word for word in secrets if word in text], f"{name}:{port}"
    assert metrics >= 5


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
