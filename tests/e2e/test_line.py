"""The line end to end: a declared Model answers the `openai` SDK, on a real control plane, installed by helm."""

import base64
import json
import time
import urllib.error
import urllib.request
from typing import Any

import anthropic
import click
import openai
import pytest

from shoal.api.keys import hash_api_key
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet, serves
from tests.support.pages import page, token
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

SHOAL_KINDS = "models.shoal.dev,gpuclasses.shoal.dev,tenants.shoal.dev"
CHILD_KINDS = "deployments,poddisruptionbudgets,networkpolicies,secrets"


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    port = fleet.lab.forward_port()
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=steps.DEMO_KEY, max_retries=0, timeout=30)


TRUSTED = ("--as=system:kube-controller-manager", "--as-group=system:masters")
"""Whom the admission policy on children lets write them."""


def children(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    return fleet.get(CHILD_KINDS, "-n", steps.DEMO_NAMESPACE, "-l", f"shoal.dev/model={model}")


def test_streamed_answer_and_its_usage_record(fleet: Fleet, client: openai.OpenAI) -> None:
    response = client.chat.completions.with_raw_response.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(response.parse())
    usage = next(c.usage for c in chunks if c.usage)
    assert all(c.model == "tiny-chat" for c in chunks)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    record = steps.usage_record(fleet, response.headers["x-request-id"])
    data = record["data"]
    assert record["subject"] == "acme"
    assert (data["inputTokens"], data["outputTokens"]) == (usage.prompt_tokens, usage.completion_tokens)
    assert (data["outcome"], data["countSource"], data["gpuClass"]) == ("answered", "final", "l40s-48gb")
    assert data["model"] == "demo/tiny-chat"
    assert data["replica"].startswith("demo/tiny-chat-l40s-48gb-")


def test_every_endpoint_answers_with_the_clients_own_model_name(fleet: Fleet, client: openai.OpenAI) -> None:
    assert {m.id for m in client.models.list()} >= {"tiny-chat", "tiny-code"}
    answer = client.chat.completions.create(
        model="demo/tiny-code", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert answer.model == "demo/tiny-code"
    assert client.completions.create(model="tiny-code", prompt="def f", max_tokens=3).choices[0].text


def test_a_client_of_anthropics_api_is_served(fleet: Fleet) -> None:
    port = fleet.lab.forward_port()
    said: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Who are you?"}]
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=steps.DEMO_KEY, max_retries=0) as client:
        with client.messages.stream(model="tiny-chat", max_tokens=12, messages=said) as stream:
            text = "".join(stream.text_stream)
            got = stream.get_final_message()
        assert text
        assert (got.model, got.stop_reason) == ("tiny-chat", "max_tokens")
        record = steps.usage_record(fleet, got.id)["data"]
        assert (record["endpoint"], record["outcome"], record["countSource"]) == ("/v1/messages", "answered", "final")
        tokens = got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0)
        assert (record["inputTokens"], record["outputTokens"]) == (tokens, got.usage.output_tokens)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="no-such-model", max_tokens=3, messages=said)


def test_embeddings_from_a_model_started_for_them(fleet: Fleet, client: openai.OpenAI) -> None:
    fleet.make_model("embedder", engine={"extraArgs": ["--is-embedding"]})
    fleet.kubectl("wait", "--for=condition=Ready", "model/embedder", "-n", "demo", "--timeout=120s", timeout=130)
    with pytest.raises(openai.NotFoundError):  # not granted
        client.embeddings.create(model="embedder", input="words")
    grant = [{"op": "add", "path": "/spec/models/-", "value": {"namespace": "demo", "name": "embedder"}}]
    fleet.kubectl("patch", "tenants.shoal.dev", "acme", "--type=json", "-p", json.dumps(grant))

    def granted() -> bool:
        return "embedder" in {m.id for m in client.models.list()}

    until(granted, 60)
    response = client.embeddings.with_raw_response.create(model="embedder", input="words", encoding_format="float")
    answer = response.parse()
    assert answer.model == "embedder"
    assert answer.data[0].embedding
    with pytest.raises(openai.BadRequestError, match="it can embed: use /v1/embeddings"):  # it would kill the engine
        client.completions.create(model="embedder", prompt="x")
    data = steps.usage_record(fleet, response.headers["x-request-id"])["data"]
    assert (data["inputTokens"], data["outputTokens"]) == (answer.usage.prompt_tokens, 0)
    fleet.delete_model("embedder")
    steps.apply_examples(fleet)


def test_wrong_key_and_unknown_model_are_told_apart(fleet: Fleet, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="key"):
        client.with_options(api_key="sk-not-a-key").models.list()
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")


def test_tenants_reach_only_what_they_were_granted_and_stop_within_a_second(
    fleet: Fleet, client: openai.OpenAI
) -> None:
    key = "sk-other-tenant"
    spec = {
        "keys": [{"name": "k", "sha256": hash_api_key(key)}],
        "models": [{"namespace": "demo", "name": "tiny-code"}],
    }
    other = {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "other"}, "spec": spec}
    fleet.apply(other)
    theirs = client.with_options(api_key=key)

    def admitted() -> bool:
        try:
            return bool(theirs.completions.create(model="tiny-code", prompt="x", max_tokens=1).choices)
        except openai.AuthenticationError:
            return False

    until(admitted, 60)
    with pytest.raises(openai.NotFoundError):
        theirs.completions.create(model="tiny-chat", prompt="x", max_tokens=1)
    assert not {m.id for m in theirs.models.list()} & {"tiny-chat", "demo/tiny-chat"}
    fleet.apply(other | {"spec": spec | {"suspended": True}})

    def refused() -> bool:
        try:
            theirs.models.list()
        except (openai.PermissionDeniedError, openai.AuthenticationError):
            return True
        return False

    until(refused, 30)
    fleet.kubectl("delete", "tenants.shoal.dev", "other")


def test_kubectl_shows_and_waits(fleet: Fleet) -> None:
    fleet.kubectl("wait", "--for=condition=Ready", "model/tiny-chat", "-n", "demo", "--timeout=10s")
    table = fleet.kubectl("get", "models.shoal.dev", "tiny-chat", "-n", "demo")
    assert "l40s-48gb" in table
    assert "True" in table

    def l40s() -> list[str]:
        classes = fleet.kubectl("get", "gpuclasses").splitlines()
        return next(line.split() for line in classes if line.startswith("l40s-48gb"))

    until(lambda: l40s()[1:4] == ["True", "3", "12"], 60, l40s)  # nodes of other tests come back
    assert "acme" in fleet.kubectl("get", "tenants")
    described = fleet.kubectl("describe", "model", "tiny-chat", "-n", "demo")
    assert "Placed" in described


def test_a_child_changed_by_hand_is_put_right(fleet: Fleet) -> None:
    def deployments() -> list[dict[str, Any]]:
        return fleet.get("deployments", "-n", "demo", "-l", "shoal.dev/model=tiny-code")

    def grace() -> int:
        return deployments()[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]

    (before,) = deployments()
    wanted, name = grace(), before["metadata"]["name"]
    patch = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}
    with pytest.raises(click.ClickException, match="belongs to a Model: change the Model instead"):
        fleet.kubectl("patch", "deployment", name, "-n", "demo", "--type=merge", "-p", json.dumps(patch))
    # Whom the policy lets through is put right by the operator.
    fleet.kubectl("patch", "deployment", name, "-n", "demo", "--type=merge", "-p", json.dumps(patch), *TRUSTED)
    until(lambda: grace() == wanted, 60)
    fleet.kubectl("delete", "deployment", name, "-n", "demo", *TRUSTED)
    until(lambda: [d["metadata"]["uid"] for d in deployments()] not in ([], [before["metadata"]["uid"]]), 60)
    # It serves again. Until the operator has seen the deletion, the Model says that it does.
    until(lambda: any(d["status"].get("readyReplicas") for d in deployments()), 120, deployments)
    fleet.kubectl("wait", "--for=condition=Ready", "model/tiny-code", "-n", "demo", "--timeout=60s", timeout=70)


def test_deleting_a_model_removes_all_that_it_made(fleet: Fleet) -> None:
    fleet.make_model("short-lived")
    fleet.kubectl("wait", "--for=condition=Ready", "model/short-lived", "-n", "demo", "--timeout=120s", timeout=130)
    kinds = {child["kind"] for child in children(fleet, "short-lived")}
    assert kinds == {"Deployment", "PodDisruptionBudget", "NetworkPolicy", "Secret"}
    fleet.delete_model("short-lived")
    until(lambda: not children(fleet, "short-lived"), 90, lambda: children(fleet, "short-lived"))
    until(lambda: not fleet.get("pods", "-n", "demo", "-l", "shoal.dev/model=short-lived"), 120)


def shared_fields(objects: list[dict[str, Any]]) -> list[str]:
    """Fields that more than one manager owns, and fields that the wrong one owns, read from managedFields."""

    def leaves(fields: dict[str, Any], path: str = "") -> set[str]:
        found: set[str] = set()
        for key, value in fields.items():
            if key != ".":
                found |= leaves(value, f"{path}/{key}") if value else {f"{path}/{key}"}
        return found

    wrong: list[str] = []
    for o in objects:
        writers: dict[str, set[str]] = {}
        for entry in o["metadata"]["managedFields"]:
            for leaf in leaves(entry.get("fieldsV1", {})):
                writers.setdefault(leaf, set()).add(entry["manager"])
        who = f"{o['kind']}/{o['metadata']['name']}"
        wrong += [f"{who} {leaf}: {sorted(by)}" for leaf, by in writers.items() if len(by) > 1]
        if o["kind"] == "Deployment" and writers["/f:spec/f:replicas"] != {"shoal-scaler"}:
            wrong.append(f"{who} replicas: {writers['/f:spec/f:replicas']}")
        if o["apiVersion"].startswith("shoal.dev"):
            in_spec = {w for leaf, by in writers.items() if leaf.startswith("/f:spec") for w in by}
            wrong += [f"{who}: {w} wrote into spec" for w in in_spec if w.startswith("shoal-")]
    return wrong


def test_every_field_has_one_writer(fleet: Fleet) -> None:
    """Invariant 7: read from the managedFields of everything that Shoal made."""

    def ours() -> list[dict[str, Any]]:
        objects = fleet.get(f"{SHOAL_KINDS},{CHILD_KINDS}", "-n", "demo", "--show-managed-fields")
        made = "app.kubernetes.io/managed-by"
        return [
            o
            for o in objects
            if o["metadata"].get("labels", {}).get(made) == "shoal" or o["apiVersion"].startswith("shoal.dev")
        ]

    # A Deployment is made with no replicas; the scaler takes the field over a moment later.
    until(lambda: shared_fields(ours()) == [] and len(ours()) >= 14, 60, lambda: shared_fields(ours()))
    # The check can fail: a second writer of one field is found.
    label = "shoal.dev/model"
    budgets = [o["metadata"] for o in ours() if o["kind"] == "PodDisruptionBudget"]
    (budget,) = [b for b in budgets if b["labels"][label] == "tiny-chat"]
    metadata = {"name": budget["name"], "labels": {label: budget["labels"][label]}}
    body = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata}
    somebody = ("--server-side", "--field-manager=somebody", *TRUSTED)
    fleet.kubectl("apply", *somebody, "-n", "demo", "-f", "-", stdin=json.dumps(body))
    assert any("somebody" in line for line in shared_fields(ours()))
    fleet.kubectl("delete", "poddisruptionbudget", budget["name"], "-n", "demo", *TRUSTED)
    until(lambda: shared_fields(ours()) == [] and len(ours()) >= 14, 60, lambda: shared_fields(ours()))


def test_a_quiet_fleet_costs_zero_writes(fleet: Fleet) -> None:
    """Invariant 8: nothing that Shoal owns moves, and the operators' own counters of writes stand still."""

    def versions() -> dict[str, str]:
        objects = fleet.get(f"{SHOAL_KINDS},{CHILD_KINDS}", "-A")
        return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in objects}

    def writes() -> float:
        total = 0.0
        for pod in fleet.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator"):
            text = page(fleet, pod["status"]["podIP"])
            samples = [line for line in text.splitlines() if line.startswith("shoal_kube_requests_total{")]
            assert samples, "the operator does not count its requests"
            reads = ('verb="get"', 'verb="list"', 'verb="watch"')
            # Leases are renewed; the reviews are of this test's own token, which is checked again after a minute.
            not_counted = ('resource="leases"', 'resource="tokenreviews"', 'resource="subjectaccessreviews"')
            total += sum(
                float(line.split()[-1])
                for line in samples
                if not any(kind in line for kind in not_counted) and not any(verb in line for verb in reads)
            )
        return total

    def around() -> dict[str, str]:
        """What is not Shoal's doing and gives it something to write: a pod whose probe failed on a busy machine, a Job
        that was kept long enough, another leader."""
        pods = {p["metadata"]["uid"]: p["metadata"]["resourceVersion"] for p in fleet.get("pods", "-A")}
        (lease,) = fleet.get("leases", "-n", NAMESPACE, "--field-selector=metadata.name=shoal-operator")
        return pods | {"leader": lease["spec"]["holderIdentity"]}

    def still() -> bool:
        found = around(), versions(), writes()
        time.sleep(10)
        return found == (around(), versions(), writes())

    # What earlier tests set in motion comes to rest: a pod that goes gives its GPUs back, and its class says so.
    engines = "app.kubernetes.io/component=engine"
    until(lambda: not [p for p in fleet.get("pods", "-A", "-l", engines) if "deletionTimestamp" in p["metadata"]], 120)
    until(still, 120)
    for _ in range(4):
        world, before, written = around(), versions(), writes()
        time.sleep(30)
        if around() == world:
            break
    else:
        pytest.fail("the fleet was never quiet for half a minute")
    assert versions() == before
    assert writes() == written
    # The check can fail: one thing put right moves both.
    fleet.kubectl("delete", "poddisruptionbudgets", "--all", "-n", "demo", *TRUSTED)
    until(lambda: writes() > written, 60)
    assert versions() != before


def test_no_prompt_key_or_answer_leaks(fleet: Fleet, client: openai.OpenAI) -> None:
    """Invariant 14: a canary in the prompt, in a rejected key and in the answer is found nowhere."""
    canary = "canary-7f3b9e-prompt"

    def unsettled() -> list[str]:
        """Pods that start or go: their logs are not there yet, or not any more. Those that read metadata end."""
        pods = fleet.get("pods", "-A")
        over = ("Succeeded", "Failed")
        return [p["metadata"]["name"] for p in pods if p["status"].get("phase") not in over and not serves(p)]

    until(lambda: not unsettled(), 120, unsettled)
    response = client.chat.completions.with_raw_response.create(
        model="tiny-chat", messages=[{"role": "user", "content": canary}], max_tokens=24
    )
    answer = response.parse().choices[0].message.content or ""
    assert len(answer) > 10
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-canary-7f3b9e-key").models.list()
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body={"model": "tiny-chat", "messages": canary}, cast_to=object)

    keys: list[str] = [steps.DEMO_KEY]
    for secret in fleet.get("secrets", "-A"):
        keys += [
            value
            for name, raw in secret.get("data", {}).items()
            if name in ("current", "previous", "key") and len(value := base64.b64decode(raw).decode()) > 16
        ]
    assert len(keys) >= 2
    haystacks: dict[str, str] = {}
    resources = fleet.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    for resource in resources:
        if resource == "secrets":
            continue
        haystacks[resource] = fleet.kubectl("get", resource, "-A", "-o", "json", "--show-managed-fields")
    for pod in fleet.get("pods", "-A"):
        where = (pod["metadata"]["name"], "-n", pod["metadata"]["namespace"])
        try:
            haystacks[f"log {where[0]}"] = fleet.kubectl("logs", *where, "--all-containers", "--tail=-1")
        except click.ClickException:
            # A Job and its pod may go at any moment, once they were kept long enough.
            assert fleet.kubectl("get", "pod", *where, "--ignore-not-found") == ""
            continue
        if pod["metadata"]["namespace"] == NAMESPACE:
            address = pod["status"]["podIP"]
            haystacks[f"metrics {where[0]}"] = page(fleet, address)
            asked = ("-H", f"Authorization: Bearer {token(fleet)}", f"http://{address}:9090/v1/decisions")
            haystacks[f"decisions {where[0]}"] = fleet.lab.exec("curl", "-sS", *asked)

    assert any("demo/tiny-chat" in text for place, text in haystacks.items() if place.startswith("decisions "))

    def found() -> list[str]:
        needles = (canary, "canary-7f3b9e", answer, *keys)
        return [f"{n[:12]}... in {place}" for place, text in haystacks.items() for n in needles if n in text]

    assert found() == []
    # The check can fail: a key in an object's annotation is found.
    fleet.kubectl("annotate", "namespace", "demo", f"leak={keys[-1]}")
    haystacks["namespaces"] = fleet.kubectl("get", "namespaces", "-o", "json")
    fleet.kubectl("annotate", "namespace", "demo", "leak-")
    assert found()


def test_metrics_speak_opentelemetry_genai(fleet: Fleet, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny-code", prompt="x", max_tokens=2)

    def text() -> str:
        pods = fleet.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=gateway")
        return "\n".join(page(fleet, pod["status"]["podIP"]) for pod in pods)

    until(lambda: 'demo/tiny-code"' in text(), 20, text)  # counted a moment after the client has its answer
    assert "gen_ai_server_request_duration_seconds" in text()


def test_gateway_port_is_open_on_the_hosts_loopback_only_for_the_lab(fleet: Fleet) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{fleet.lab.forward_port()}/v1/models")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    body = json.loads(refused.value.read())
    refused.value.close()
    assert refused.value.code == 401
    assert set(body["error"]) == {"message", "type", "param", "code"}
