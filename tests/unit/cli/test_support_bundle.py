"""`shoal support bundle`: what is in it, what is not, and what happens where something cannot be read."""

import json
import stat
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.cli.main import main
from shoal.cli.support.clean import clean, clean_text
from tests.support.cannedapi import CannedApi
from tests.support.secretforms import KEYS, PLACES
from tests.support.secretforms import SECRET as PLACED

SYSTEM = "/api/v1/namespaces/shoal-system"
SHOAL = "/apis/shoal.dev/v1alpha1"
SECRET = "hunter2-very-secret"
HASH = "e06a69431abde5802a533ebff4b6adbd7a5e600268dc57c9c6d79e894f44e6a8"


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def pod(name: str, namespace: str = "shoal-system") -> dict[str, Any]:
    container = {"name": "operator", "env": [{"name": "HTTPS_PROXY", "value": f"http://u:{SECRET}@proxy:3128"}]}
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": name, "managedFields": [{"manager": "x"}]},
        "spec": {"containers": [container]},
        "status": {"phase": "Running"},
    }


@pytest.fixture
def api() -> CannedApi:
    tenant = {"metadata": {"name": "acme"}, "spec": {"keys": [{"name": "prod", "sha256": HASH}]}}
    model = {
        "metadata": {"name": "llama", "namespace": "chat", "annotations": {"note": f"token={SECRET}"}},
        "spec": {"source": {"uri": "hf://owner/llama"}, "env": {"HF_ENDPOINT": SECRET}},
    }
    return CannedApi(
        {
            f"{SHOAL}/tenants": listed(tenant),
            f"{SHOAL}/models": listed(model),
            f"{SHOAL}/namespaces/chat/models": listed(model),
            f"{SYSTEM}/pods": listed(pod("shoal-operator-1")),
            f"{SYSTEM}/pods/shoal-operator-1/log": f"asked http://me:{SECRET}@hub with Bearer {SECRET}\nready\n",
            "/api/v1/pods": listed(pod("llama-1", "chat")),
            "/api/v1/namespaces/chat/pods": listed(pod("llama-1", "chat")),
            "/apis/events.k8s.io/v1/namespaces/chat/events": listed(),
            "/api/v1/nodes": (403, 'nodes is forbidden: User "me" cannot list nodes'),
        }
    )


def run(api: CannedApi, folder: Path, *more: str) -> Result:
    with api.kubeconfig(folder) as kubeconfig:
        where = ["--kubeconfig", str(kubeconfig), "--file", str(folder / "b.tar.gz")]
        return CliRunner().invoke(main, ["support", "bundle", *where, *more])


def files(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "b.tar.gz") as archive:
        found: dict[str, str] = {}
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            found[member.name.removeprefix("b/")] = content.read().decode()
        return found


def test_objects_and_logs_are_in_it_and_no_secret_is(api: CannedApi, tmp_path: Path) -> None:
    done = run(api, tmp_path)
    assert done.exit_code == 0, done.output
    found = files(tmp_path)
    assert yaml.safe_load(found["models/models.yaml"])["items"][0]["spec"]["source"]["uri"] == "hf://owner/llama"
    assert found["logs/shoal-system/shoal-operator-1/operator.log"].endswith("ready\n")
    assert yaml.safe_load(found["cluster/tenants.yaml"])["items"][0]["spec"]["keys"][0]["name"] == "prod"
    everything = "\n".join(found.values())
    assert SECRET not in everything
    assert HASH not in everything
    assert "managedFields" not in everything
    assert "HTTPS_PROXY" in everything, "which variables are set is no secret"
    assert "/secrets" not in " ".join(api.asked)
    assert "Not in it: Secrets" in found["README.txt"]


@pytest.mark.parametrize("form", ["{}", "used {}, then it failed", r'{{"msg": "keys:\n{}\n"}}', "https://x/y?k={}&z=1"])
def test_no_form_of_a_key_is_left_in_a_bundle(form: str, api: CannedApi, tmp_path: Path) -> None:
    api.answers[f"{SYSTEM}/pods/shoal-operator-1/log"] = "\n".join(form.format(key) for key in KEYS)
    model = {
        "metadata": {"name": "llama", "namespace": "chat", "annotations": {"note": form.format(" ".join(KEYS))}},
        "spec": {"engine": {"extraArgs": [form.format(key) for key in KEYS]}},
    }
    api.answers[f"{SHOAL}/models"] = listed(model)
    run(api, tmp_path)
    found = files(tmp_path)
    for text in (found["logs/shoal-system/shoal-operator-1/operator.log"], found["models/models.yaml"]):
        assert [key for key in KEYS if key[-10:] in text] == []
        assert text.count("(removed)") >= len(KEYS)


@pytest.mark.parametrize("text", [*PLACES, f"pass: {PLACED}", f"DB_PASS={PLACED}", f"dbPass={PLACED}"])
def test_no_secret_is_left_in_a_bundle_where_one_stands(text: str, api: CannedApi, tmp_path: Path) -> None:
    api.answers[f"{SYSTEM}/pods/shoal-operator-1/log"] = f"began {text}\nready\n"
    model = {"metadata": {"name": "llama", "namespace": "chat"}, "spec": {"engine": {"extraArgs": [text]}}}
    api.answers[f"{SHOAL}/models"] = listed(model)
    run(api, tmp_path)
    found = files(tmp_path)
    assert PLACED not in "\n".join(found.values())
    assert found["logs/shoal-system/shoal-operator-1/operator.log"].endswith("\nready\n")


def test_of_tenants_only_what_an_issue_needs_is_in_it(api: CannedApi, tmp_path: Path) -> None:
    spec = {
        "externalID": "cus_9s6XKzkNRiz8i3",
        "plan": "gold",
        "keys": [{"name": "prod", "sha256": HASH}],
        "logging": {"mode": "Full", "redact": [{"name": "project", "pattern": "Bluebird"}, {"builtin": "Email"}]},
    }
    annotations = {"crm/contact": "Ada Lovelace", "kapp.k14s.io/original": json.dumps(spec), "shoal.dev/note": "kept"}
    labels = {"industry": "aviation", "app.kubernetes.io/managed-by": "Helm"}
    metadata = {"name": "acme", "annotations": annotations, "labels": labels}
    api.answers[f"{SHOAL}/tenants"] = listed({"metadata": metadata, "spec": spec})
    run(api, tmp_path)
    found = files(tmp_path)
    (tenant,) = yaml.safe_load(found["cluster/tenants.yaml"])["items"]
    assert tenant == {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {
            "name": "acme",
            "annotations": {
                "crm/contact": "(removed)", "kapp.k14s.io/original": "(removed)", "shoal.dev/note": "kept"
            },
            "labels": {"industry": "(removed)", "app.kubernetes.io/managed-by": "Helm"},
        },
        "spec": {
            "externalID": "(removed)",
            "plan": "gold",
            "keys": [{"name": "prod", "sha256": "(removed)"}],
            "logging": {"mode": "Full", "redact": [{"name": "project", "pattern": "(removed)"}, {"builtin": "Email"}]},
        },
    }  # fmt: skip
    told = " ".join(found["README.txt"].split())
    assert "of Tenants `externalID`, patterns of redaction rules, and values of labels and annotations" in told
    assert "Tenants' plans, limits, budgets and grants are in it" in told


def test_what_cannot_be_read_is_named_and_the_rest_is_there(api: CannedApi, tmp_path: Path) -> None:
    done = run(api, tmp_path)
    missing = files(tmp_path)["missing.txt"]
    assert 'nodes: nodes is forbidden: User "me" cannot list nodes' in missing
    assert "parts could not be read" in done.stderr


def event(name: str, /, **regarding: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": regarding.get("namespace", "default")}, "regarding": regarding}


def test_events_of_nodes_and_of_models_without_pods_are_in_it(api: CannedApi, tmp_path: Path) -> None:
    route = {"metadata": {"name": "front", "namespace": "doors"}, "spec": {}}
    api.answers[f"{SHOAL}/modelroutes"] = listed(route)
    api.answers["/api/v1/pods"] = listed()
    events = "/apis/events.k8s.io/v1/namespaces"
    api.answers[f"{events}/default/events"] = listed(
        event("bad-gpu", kind="Node", name="n1"), event("of-others", kind="Pod", name="p", namespace="default")
    )
    api.answers[f"{events}/chat/events"] = listed(event("unplaced", kind="Model", name="llama", namespace="chat"))
    api.answers[f"{events}/doors/events"] = listed(
        event("no-target", kind="ModelRoute", name="front", namespace="doors")
    )
    run(api, tmp_path)
    found = files(tmp_path)
    assert names_of(found["cluster/events.yaml"]) == ["bad-gpu"]
    assert names_of(found["models/events/chat.yaml"]) == ["unplaced"]
    assert names_of(found["models/events/doors.yaml"]) == ["no-target"]


def names_of(file: str) -> list[str]:
    return [each["metadata"]["name"] for each in yaml.safe_load(file)["items"]]


def test_the_log_of_a_container_before_its_restart_is_in_it(api: CannedApi, tmp_path: Path) -> None:
    restarted = pod("shoal-operator-1")
    restarted["status"]["containerStatuses"] = [{"name": "operator", "restartCount": 2}]
    api.answers[f"{SYSTEM}/pods"] = listed(restarted, pod("shoal-gateway-0"))
    api.answers[f"{SYSTEM}/pods/shoal-gateway-0/log"] = "fine\n"
    before = f"{SYSTEM}/pods/shoal-operator-1/log?container=operator&tailLines=2000&previous=true"
    api.answers[before] = f"panic: password={SECRET}\n"
    run(api, tmp_path)
    found = files(tmp_path)
    assert found["logs/shoal-system/shoal-operator-1/operator.previous.log"] == "panic: password=(removed)\n"
    assert found["logs/shoal-system/shoal-operator-1/operator.log"].endswith("ready\n")
    assert "logs/shoal-system/shoal-gateway-0/operator.previous.log" not in found
    api.answers[before] = (400, "previous terminated container not found")
    (tmp_path / "b.tar.gz").unlink()
    run(api, tmp_path)
    assert (
        "previous log of operator in pod shoal-system/shoal-operator-1: previous terminated container not found"
        in files(tmp_path)["missing.txt"]
    )


def named(name: str, namespace: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, **more}


def test_autoscalers_and_disruption_budgets_are_in_it(api: CannedApi, tmp_path: Path) -> None:
    target = {"kind": "Deployment", "name": "llama-l4"}
    managed = named("kept", "chat")
    managed["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "shoal"}
    other = {"scaleTargetRef": {"kind": "Deployment", "name": "web"}}
    api.answers |= {
        "/apis/apps/v1/deployments": listed(named("llama-l4", "chat")),
        "/apis/autoscaling/v2/horizontalpodautoscalers": listed(
            named("by-hand", "chat", spec={"scaleTargetRef": target}), managed, named("of-others", "web", spec=other)
        ),
        "/apis/autoscaling/v2/namespaces/shoal-system/horizontalpodautoscalers": listed(
            named("gateway", "shoal-system")
        ),
        "/apis/policy/v1/poddisruptionbudgets": listed(named("llama", "chat")),
        "/apis/policy/v1/namespaces/shoal-system/poddisruptionbudgets": listed(named("shoal-gateway", "shoal-system")),
    }
    run(api, tmp_path)
    found = files(tmp_path)
    assert names_of(found["models/horizontalpodautoscalers.yaml"]) == ["by-hand", "kept"]
    assert names_of(found["installation/horizontalpodautoscalers.yaml"]) == ["gateway"]
    assert names_of(found["models/poddisruptionbudgets.yaml"]) == ["llama"]
    assert names_of(found["installation/poddisruptionbudgets.yaml"]) == ["shoal-gateway"]
    assert "labelSelector=app.kubernetes.io/managed-by=shoal" in next(
        path for path in api.asked if path.startswith("/apis/policy/v1/poddisruptionbudgets")
    )


KEDA = "/apis/keda.sh/v1alpha1"
KUEUE = "/apis/kueue.x-k8s.io/v1beta1"


def test_objects_of_keda_and_kueue_are_in_it_where_the_cluster_has_them(api: CannedApi, tmp_path: Path) -> None:
    run(api, tmp_path)
    found = files(tmp_path)
    assert "scaledobjects" not in found["missing.txt"] + " ".join(found)
    assert "workloads" not in found["missing.txt"] + " ".join(found)
    (tmp_path / "b.tar.gz").unlink()

    waiting = named("pod-llama-1", "chat")
    waiting["metadata"]["ownerReferences"] = [{"kind": "Pod", "uid": "llama-1"}]
    api.answers |= {
        KEDA: {"resources": [{"name": "scaledobjects"}]},
        f"{KEDA}/scaledobjects": listed(named("llama", "chat")),
        f"{KEDA}/namespaces/shoal-system/scaledobjects": (403, "scaledobjects is forbidden"),
        KUEUE: {"resources": [{"name": "workloads"}]},
        f"{KUEUE}/workloads": listed(named("job-of-others", "chat"), waiting),
    }
    run(api, tmp_path)
    found = files(tmp_path)
    assert names_of(found["models/scaledobjects.yaml"]) == ["llama"]
    assert names_of(found["models/workloads.yaml"]) == ["pod-llama-1"]
    assert "scaledobjects in namespace shoal-system: scaledobjects is forbidden" in found["missing.txt"]


def test_engines_logs_are_in_it_only_where_they_are_wanted(api: CannedApi, tmp_path: Path) -> None:
    api.answers["/api/v1/namespaces/chat/pods/llama-1/log"] = "a prompt\n"
    run(api, tmp_path)
    assert "a prompt" not in "\n".join(files(tmp_path).values())
    (tmp_path / "b.tar.gz").unlink()
    run(api, tmp_path, "--engine-logs", "-n", "chat")
    assert files(tmp_path)["logs/chat/llama-1/operator.log"] == "a prompt\n"


def test_programs_are_told_what_was_written(api: CannedApi, tmp_path: Path) -> None:
    done = run(api, tmp_path, "-o", "json")
    told = json.loads(done.stdout)
    assert told["file"] == str(tmp_path / "b.tar.gz")
    assert told["files"] == len(files(tmp_path))
    assert told["bytes"] == (tmp_path / "b.tar.gz").stat().st_size
    assert any("nodes is forbidden" in each for each in told["missing"])


BEGIN, END = (f"-----{word} PRIVATE KEY-----" for word in ("BEGIN", "END"))
PGP_END = "-----END PGP PRIVATE KEY BLOCK-----"
"""Above it, and below a last line of any length, such a key has a checksum."""
LINE = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7/Abc+def0123"
"""As long as the lines of a key."""


def test_only_its_owner_may_read_it_and_no_file_is_overwritten(api: CannedApi, tmp_path: Path) -> None:
    assert run(api, tmp_path).exit_code == 0
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    again = run(api, tmp_path)
    assert again.exit_code == 1
    assert "exists already: name another file with --file" in again.output


@pytest.mark.parametrize(
    ("text", "clear"),
    [
        ("GET http://user:pa55@hub.example.com/x", "GET http://(removed)@hub.example.com/x"),
        ("key sk-abcdef0123456789 was used", "key sk-(removed) was used"),
        ('{"password": "hunter2", "tokens": 5}', '{"password": "(removed)", "tokens": 5}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer (removed)"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "(removed)"),
        ("AIzaSyA0123456789abcdef nvapi-abcdefghijklmnop", "AIza(removed) nvapi-(removed)"),
        ("gsk_abcdefghijklmnop npm_0123456789abcdef", "gsk_(removed) npm_(removed)"),
        ("hvs.CAESIabcdefghijkl ya29.a0AfH6SMBabcdefgh", "hvs.(removed) ya29.(removed)"),
        ("GOCSPX-abcdefghijklmnop glsa_abcdefghijklmnop_1", "GOCSPX-(removed) glsa_(removed)"),
        ("pypi-AgEIcHlwaS5vcmcC SG.abcdefghijklmnop.abc", "pypi-(removed) SG.(removed)"),
        ("sk_live_0123456789abcdef rk_live_0123456789abcdef", "sk_live_(removed) rk_live_(removed)"),
        ("ABIAABCDEFGHIJKLMNOP ACCAABCDEFGHIJKLMNOP", "ABIA(removed) ACCA(removed)"),
        ("https://hooks.slack.com/services/T0/B0/abc ok", "https://hooks.slack.com/services/(removed) ok"),
        (r'"msg": "keys:\nsk-abcdef0123456789\n"', r'"msg": "keys:\nsk-(removed)\n"'),
        ("hf_abcdefghijklmnop and AKIAABCDEFGHIJKLMNOP", "hf_(removed) and AKIA(removed)"),
        ("ghp_0123456789abcdef, github_pat_11AAAAAAA0_b", "ghp_(removed), github_pat_(removed)"),
        ("glpat-abcdefghijk xoxb-123456789-a ASIAABCDEFGHIJKL", "glpat-(removed) xoxb-(removed) ASIA(removed)"),
        ("a\n-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\nb", "a\n(removed)\nb"),
        ("a\n-----BEGIN PRIVATE KEY-----\nMHc", "a\n(removed)"),
        # A key without its end: what looks like a key's lines.
        (f"a\n{BEGIN}\n{LINE}\n{LINE}\nMHc=\nengine: ready in 5 s", "a\n(removed)\nengine: ready in 5 s"),
        (f"a\r\n  {BEGIN}\r\n  {LINE}\r\n  MHc=\r\nload: ok", "a\r\n  (removed)\r\nload: ok"),
        (f"12:00 {BEGIN}\n12:00 {LINE}\n12:01 MHc=\n12:02 ready\n", "12:00 (removed)\n12:02 ready\n"),
        (f"{BEGIN}\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A\n\n{LINE}\n\nload: ok", "(removed)\n\nload: ok"),
        (f'{{"m": "{BEGIN}\\n{LINE}\\nMHc=\\n"}}\n{{"m": "ready"}}', '{"m": "(removed)"}\n{"m": "ready"}'),
        (f"{BEGIN} is needed: (see the docs)\nload: ok", "(removed): (see the docs)\nload: ok"),
        (f"{BEGIN}\n{LINE}\nload: ok\n{BEGIN}\nM.,\n{END}\nb", "(removed)\nload: ok\n(removed)\nb"),
        # A key without its beginning, as the last lines of a log may have it.
        (f"{LINE}\n{LINE}\nMHc=\n{END}\nengine: ready in 5 s", "(removed)\nengine: ready in 5 s"),
        (f"Fg12\n{LINE}\nMHc=\n{END}\n", "(removed)\n"),
        (f"12:00 {LINE}\r\n12:00 {LINE}\r\n12:01 {END}\r\n12:02 ready\r\n", "12:00 (removed)\r\n12:02 ready\r\n"),
        (f"Version: 1\n\n{LINE}\n{END}\n", "Version: 1\n\n(removed)\n"),
        (f'{LINE}\\nMHc=\\n{END}\\n"}}\n{{"m": "ready"}}', '(removed)\\n"}\n{"m": "ready"}'),
        (f"{LINE}\n{LINE}\nMHc=\n=Ab1d\n{PGP_END}\nready", "(removed)\nready"),
        (f"12:00 {LINE}\n12:00 MHc=\n12:01 =Ab1d\n12:01 {PGP_END}\n12:02 ready", "12:00 (removed)\n12:02 ready"),
        (f"engine: load\nready\n{LINE}\nMHc=\n{END}\nb", "engine: load\nready\n(removed)\nb"),
        (f"engine is ready\n{LINE}\nMHc=\n{END}\nb", "engine is ready\n(removed)\nb"),
        (f"load: ok\n{BEGIN}\n{LINE}\n{END}\n{LINE}\n{END}\nb", "load: ok\n(removed)\n(removed)\nb"),
        (f"ready\nload: ok, no {END} found\nb", "ready\nload: ok, no (removed) found\nb"),
        # Names that end like a secret's, whatever precedes.
        ("HF_TOKEN=hunter2 DB_PASSWORD=hunter2", "HF_TOKEN=(removed) DB_PASSWORD=(removed)"),
        ("access_token=hunter2&x=1", "access_token=(removed)&x=1"),
        ("clientSecret: hunter2", "clientSecret: (removed)"),
        ("AWS_SECRET_ACCESS_KEY=hun/ter+2", "AWS_SECRET_ACCESS_KEY=(removed)"),
        ("x-api-key: hunter2", "x-api-key: (removed)"),
        ("AccountKey=hunter2==", "AccountKey=(removed)"),
        ("invalid token: password: hunter2", "invalid token: (removed)"),
        ("password=\nready", "password=\nready"),
        ("pwd=hunter2 pass: hunter2, DB_PASS=hunter2", "pwd=(removed) pass: (removed), DB_PASS=(removed)"),
        ("dbPass=hunter2 userPwd: hunter2", "dbPass=(removed) userPwd: (removed)"),
        ("DB_PASSWORD=hun,ter,2 ok", "DB_PASSWORD=(removed) ok"),
        ("password=hun,ter2,port=5, x", "password=(removed),port=5, x"),
        # Addresses that are signed.
        (
            "b/x?X-Amz-Credential=A%2FB&X-Amz-Date=5&X-Amz-Security-Token=c&X-Amz-Signature=d 200",
            "b/x?X-Amz-Credential=(removed)&X-Amz-Date=5&X-Amz-Security-Token=(removed)&X-Amz-Signature=(removed) 200",
        ),
        ("b/x?sv=1&sig=abc%3D&se=2", "b/x?sv=1&sig=(removed)&se=2"),
        # Strings, also in a string of JSON, and cut off.
        ("password='hunter2 and more' ok", "password='(removed)' ok"),
        ("password=b'hunter2' ok", "password=b'(removed)' ok"),
        ('"password": "hun\\"ter2, more", "n": 1', '"password": "(removed)", "n": 1'),
        (r'"msg": "{\"password\": \"hunter 2\", \"n\": 1}"', r'"msg": "{\"password\": \"(removed)\", \"n\": 1}"'),
        (r'"msg": "{\"password\": \"a\\\"b c\"}"', r'"msg": "{\"password\": \"(removed)\"}"'),
        (r'"msg": "password=hunter2\" was"', r'"msg": "password=(removed)\" was"'),
        ('password="hunter2 and mo', 'password="(removed)'),
        # Headers, the whole of them.
        ("Authorization: Basic aHVudGVy Mg==", "Authorization: Basic (removed)"),
        ("Proxy-Authorization: Negotiate abc", "Proxy-Authorization: (removed)"),
        ("Authorization: AWS4 Credential=a/b, Signature=c", "Authorization: (removed)"),
        ('Authorization: Digest username="me", response="abc"', "Authorization: (removed)"),
        ("Cookie: a=hunter2; b=hunter3\nready", "Cookie: (removed)\nready"),
        ("curl -H 'Authorization: Basic abc' http://x", "curl -H 'Authorization: Basic (removed)' http://x"),
        ("(b'authorization', b'Basic abc')", "(b'authorization', b'Basic (removed)')"),
        ("[b'x-api-key', b'hunter2']", "[b'x-api-key', b'(removed)']"),
        ("Ocp-Apim-Subscription-Key: hunter2", "Ocp-Apim-Subscription-Key: (removed)"),
        ("'x-functions-key': 'hunter2'", "'x-functions-key': '(removed)'"),
        ("(b'x-functions-key', b'hunter2')", "(b'x-functions-key', b'(removed)')"),
        # Command lines.
        ("run --password hunter2 --port 5", "run --password (removed) --port 5"),
        ("run --hf-token 'hunter 2' x", "run --hf-token '(removed)' x"),
        ('["--password", "hunter2", "--port", "5"]', '["--password", "(removed)", "--port", "5"]'),
        ("['--api-key','hunter2']", "['--api-key','(removed)']"),
        ("run --db-pass hunter2 --pwd hunter2", "run --db-pass (removed) --pwd (removed)"),
        ("curl -u me:hunter2 http://x", "curl -u me:(removed) http://x"),
        ("curl --user=me:hun:ter2 http://x", "curl --user=me:(removed) http://x"),
        ("curl -u 'me:hunter 2' http://x", "curl -u 'me:(removed)' http://x"),
        ('["curl", "-u", "me:hunter2", "x"]', '["curl", "-u", "me:(removed)", "x"]'),
        (r'"msg": "curl -u \"me:hunter2\" x"', r'"msg": "curl -u \"me:(removed)\" x"'),
    ],
)
def test_credentials_in_texts_are_removed(text: str, clear: str) -> None:
    assert clean_text(text) == clear


@pytest.mark.parametrize(
    "text",
    [
        "secretRef: hub, secretName: hub",
        'Secret "hub" has no key token',
        "firstToken=0.3 per_token: 12, secondsPerToken=4e-05, token=0.3s",
        '{"kvBytesPerToken": 131072, "tokens": 5, "max_tokens": 7, "tokenizer": "a/b"}',
        "automountServiceAccountToken: false",
        '"token": null, "password": "", "credentials": []',
        '"credentials": [{"uriPrefix": "s3://a/", "secretRef": {"name": "hub"}}]',
        "credentials: {name: provider}",
        "--use-token --port 5 --api-key=$(KEY)",
        "HF_TOKEN is not set",
        "firstToken=0.3,0.4 token=1,024",
        "password=none,",
        "pod shoal-gateway-7d9f8b6c5d-x2x4z of hf-mirror-7d9f8b6c5d-x2x4z, shoal_model_seconds_p99",
        "bypass: 5, compass=north, all passed: yes, encompass=1",
        "docker run -u 1000:1000 x, curl -u $(USER):$(PASS) -u https://x",
    ],
)
def test_measurements_and_names_of_secrets_stay_readable(text: str) -> None:
    assert clean_text(text) == text


def test_fields_and_arguments_of_objects_are_cleaned_by_their_names() -> None:
    found = clean(
        {
            "hfToken": SECRET,
            "clientSecret": SECRET,
            "secretAccessKey": SECRET,
            "POSTGRES_PASSWORD": SECRET,
            "args": [
                "serve",
                "--api-key",
                SECRET,
                "--max-token",
                "5",
                "--hf-token",
                "--port",
                "80",
                f"--api-key={SECRET}",
            ],
            "command": ["sh", "-c", f"serve --password {SECRET}"],
            "exec": ["curl", "-u", f"me:{SECRET}", "--user", "me"],
            "dbPass": SECRET,
            "httpGet": {"httpHeaders": [{"name": "Authorization", "value": f"Basic {SECRET}"}]},
        }
    )
    assert SECRET not in str(found)
    assert found["exec"] == ["curl", "-u", "me:(removed)", "--user", "me"]
    assert found["args"][3:8] == ["--max-token", "5", "--hf-token", "--port", "80"]


def test_references_to_secrets_and_settings_of_objects_stay_readable() -> None:
    whole = {
        "source": {"secretRef": {"name": "hub"}},
        "external": {"credentials": {"name": "provider", "auth": "XApiKey"}},
        "volumes": [{"secret": {"secretName": "shoal-key"}}, {"csi": {"tlsSecret": "tls"}}],
        "projected": {"serviceAccountToken": {"path": "token", "audience": "shoal"}},
        "automountServiceAccountToken": False,
        "kvBytesPerToken": 131072,
        "imagePullSecrets": [{"name": "registry"}],
    }
    assert clean(whole) == whole


@pytest.mark.parametrize(
    "part",
    [
        "eyJ-",
        "-----BEGIN PRIVATE KEY-----",
        "-----END PRIVATE KEY-----",
        f"{LINE}\n",
        f"{LINE}\n-----END PRIVATE KEY-----\n",
        "\n-----END PRIVATE KEY-----",
        "token",
        "token ",
        "token: : ",
        'token="',
        "token=a,a,",
        "token=a,aaaaaaaa",
        "token=\\'\"",
        'token=\\\\"',
        'authorization="=',
        "-u a:",
        "-u 'a:",
        "curl -u ",
        "\\n",
        "hooks.slack.com/services/a ",
        "--a-",
        '--token","',
        "sk-hf_://?sig=bearer ",
    ],
)
def test_the_work_is_linear_in_the_text(part: str) -> None:
    text = part * (2**20 // len(part))
    began = time.process_time()
    clean_text(text)
    # About half a second; it would be hours if each place of the text were tried to its end.
    assert time.process_time() - began < 10


def test_an_object_of_any_depth_is_cleaned_in_bounded_time() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = {"a": deep}
    assert "(removed)" in str(clean(deep))
