"""`shoal support bundle`: what is in it, what is not, and what happens where something cannot be read."""

import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.cli.main import main
from shoal.cli.support.clean import clean, clean_text
from tests.support.cannedapi import CannedApi

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


def test_what_cannot_be_read_is_named_and_the_rest_is_there(api: CannedApi, tmp_path: Path) -> None:
    done = run(api, tmp_path)
    missing = files(tmp_path)["missing.txt"]
    assert 'nodes: nodes is forbidden: User "me" cannot list nodes' in missing
    assert "parts could not be read" in done.stderr


def test_engines_logs_are_in_it_only_where_they_are_wanted(api: CannedApi, tmp_path: Path) -> None:
    api.answers["/api/v1/namespaces/chat/pods/llama-1/log"] = "a prompt\n"
    run(api, tmp_path)
    assert "a prompt" not in "\n".join(files(tmp_path).values())
    (tmp_path / "b.tar.gz").unlink()
    run(api, tmp_path, "--engine-logs", "-n", "chat")
    assert files(tmp_path)["logs/chat/llama-1/operator.log"] == "a prompt\n"


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
        ("hf_abcdefghijklmnop and AKIAABCDEFGHIJKLMNOP", "hf_(removed) and AKIA(removed)"),
        ("secretRef: hub", "secretRef: hub"),
    ],
)
def test_credentials_in_texts_are_removed(text: str, clear: str) -> None:
    assert clean_text(text) == clear


def test_an_object_of_any_depth_is_cleaned_in_bounded_time() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = {"a": deep}
    assert "(removed)" in str(clean(deep))
