"""`shoal keys`: what is printed for Git, what is written where, and that a key is only shown to the person."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.api.keys import hash_api_key
from shoal.api.tenant import Tenant
from shoal.cli.keys.command import mint
from shoal.cli.main import main
from tests.support.cannedapi import CannedApi

HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
OTHER = "1f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
FILE = f"""\
# Tenants of the east.
apiVersion: shoal.dev/v1alpha1
kind: Tenant
metadata:
  name: acme  # the first
spec:
  externalID: "cus_9"
  keys:
    - name: prod  # in use
      sha256: {HASH}

    # soon gone
    - name: old
      sha256: {OTHER}
      expires: 2999-06-01T00:00:00Z
  models:
    - {{namespace: chat, name: llama-8b}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: "beside"}}
"""
KEY = re.compile(r"sk-shoal-[A-Za-z0-9]{43}")
PATH = "/apis/shoal.dev/v1alpha1/tenants/acme"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    return path


def keys(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["keys", *map(str, args)], input=stdin)


def the_key(result: Result) -> str:
    (key,) = KEY.findall(result.output)
    return key


def tenant(path: Path) -> Tenant:
    return Tenant.model_validate(next(yaml.safe_load_all(path.read_text())))


def patched(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def test_a_key_is_long_random_and_known_by_its_prefix() -> None:
    made = {mint() for _ in range(100)}
    assert len(made) == 100
    assert all(KEY.fullmatch(key) for key in made)


def test_create_prints_the_key_beside_the_patch_and_never_in_it(file: Path) -> None:
    done = keys("create", "-f", file, "--name", "prod-2026-11", "--expires", "2999-01-01")

    # What `> patch.yaml` takes along goes to Git.
    key = the_key(done)
    assert key not in done.stdout
    value = {"name": "prod-2026-11", "sha256": hash_api_key(key), "expires": "2999-01-01T00:00:00Z"}
    assert patched(done) == [{"op": "add", "path": "/spec/keys/-", "value": value}]
    assert file.read_text() == FILE


def test_create_can_be_read_by_a_program(file: Path) -> None:
    said = json.loads(keys("create", "-f", file, "--name", "ci", "-o", "json").stdout)

    assert said["patch"][0]["value"] == {"name": "ci", "sha256": hash_api_key(said["key"])}
    assert (said["tenant"], said["keyName"], said["expires"]) == ("acme", "ci", None)
    made = keys("create", "-f", file, "--name", "ci", "-o", "csv")
    assert "do not commit it" in made.stderr
    (row,) = csv.DictReader(io.StringIO(made.stdout))
    assert (row["keyName"], bool(KEY.fullmatch(row["key"]))) == ("ci", True)
    disabled = yaml.safe_load(keys("disable", "prod", "-f", file, "-o", "yaml").stdout)
    assert (disabled["keyName"], disabled["patch"][-1]["value"]) == ("prod", True)
    (row,) = csv.DictReader(io.StringIO(keys("expire", "prod", "2999-01-01", "-f", file, "-o", "csv").stdout))
    assert row == {"tenant": "acme", "keyName": "prod", "expires": "2999-01-01T00:00:00Z", "key": ""}


def test_a_key_can_go_into_a_file_that_only_its_owner_reads(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "key"
    done = keys("create", "-f", file, "--key-file", path)

    assert not KEY.search(done.output)
    assert path.stat().st_mode & 0o777 == 0o600
    assert patched(done)[0]["value"]["sha256"] == hash_api_key(path.read_text().strip())
    again = keys("create", "-f", file, "--key-file", path)
    assert again.exit_code == 2
    assert "only written to a new file" in again.output


def test_the_file_keeps_its_comments_and_other_documents(file: Path) -> None:
    done = keys("create", "-f", file, "--name", "new", "--write")

    assert done.exit_code == 0, done.output
    added = f"    - name: new\n      sha256: {hash_api_key(the_key(done))}\n"
    assert file.read_text() == FILE.replace("  models:", added + "  models:")


def test_rotate_lets_both_keys_work_for_a_while(file: Path) -> None:
    done = keys("rotate", "prod", "-f", file, "--write", "--name", "prod-2", "--overlap", "7d")

    assert done.exit_code == 0, done.output
    old, _, new = tenant(file).spec.keys
    assert (new.name, new.sha256, new.expires) == ("prod-2", hash_api_key(the_key(done)), None)
    assert old.expires is not None
    assert f"both are valid until {old.expires:%Y-%m-%dT%H:%M:%SZ}" in done.stderr
    assert "after that remove the old one: kubectl shoal keys remove prod --tenant acme" in done.stderr


def test_rotation_never_lengthens_the_old_keys_life(file: Path) -> None:
    patch = patched(keys("rotate", "old", "-f", file, "--overlap", "99999w"))
    assert patch[-1] == {"op": "add", "path": "/spec/keys/1/expires", "value": "2999-06-01T00:00:00Z"}


def test_each_change_of_an_entry_is_guarded_by_its_name(file: Path) -> None:
    guard = {"op": "test", "path": "/spec/keys/1/name", "value": "old"}

    assert patched(keys("disable", "old", "-f", file)) == [
        guard,
        {"op": "add", "path": "/spec/keys/1/disabled", "value": True},
    ]
    assert patched(keys("remove", "old", "-f", file)) == [guard, {"op": "remove", "path": "/spec/keys/1"}]
    (first, second) = patched(keys("expire", "old", "2998-01-01T02:00:00+02:00", "-f", file))
    assert first == guard
    assert second["value"] == "2998-01-01T00:00:00Z"


def test_it_warns_who_locks_a_tenant_out(file: Path) -> None:
    assert "every request is refused" not in keys("disable", "prod", "-f", file, "--write").stderr
    assert "it is the last valid key of Tenant acme" in keys("disable", "old", "-f", file).stderr


def test_a_tenant_without_keys_gets_a_list(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("apiVersion: shoal.dev/v1alpha1\nkind: Tenant\nmetadata:\n  name: acme\nspec: {}\n")

    done = keys("create", "-f", path, "--name", "first", "--write")

    assert done.exit_code == 0, done.output
    assert [k.name for k in tenant(path).spec.keys] == ["first"]


def test_a_key_made_elsewhere_comes_by_the_standard_input(file: Path) -> None:
    key = "sk-from-another-gateway-0123456789abcdef"
    done = keys("create", "-f", file, "--name", "moved", "--from-stdin", stdin=key + "\n")

    assert key not in done.output
    assert patched(done)[0]["value"]["sha256"] == hash_api_key(key)
    short = keys("create", "-f", file, "--from-stdin", stdin="sk-123\n")
    assert short.exit_code == 2
    assert "at least 32 characters" in short.output
    assert "sk-123" not in short.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["create"], "name the Tenant with --tenant, or a file with -f"),
        (["create", "--name", "prod"], "has a key 'prod' already: choose another --name, or rotate it"),
        (["create", "--name", "Prod!"], "Tenant acme would not be valid: spec.keys.2.name"),
        (["create", "--expires", "soon"], "'soon' is not a time: give a time from now (90d, 12h, 2w)"),
        (["create", "--expires", "2020-01-01"], "2020-01-01 is in the past"),
        (["create", "--apply"], "--apply changes the cluster, -f is for a file"),
        (["create", "--tenant", "globex"], "no Tenant globex found, only acme"),
        (["rotate", "nope"], "Tenant acme has no key 'nope'; it has: prod, old"),
    ],
)
def test_what_is_wrong_is_told(file: Path, args: list[str], words: str) -> None:
    where = [] if "name the Tenant" in words else ["-f", str(file)]
    done = keys(*args, *where)

    assert done.exit_code != 0
    assert words in done.output
    assert not KEY.search(done.output), "a key that nothing lists must not be handed out"
    assert file.read_text() == FILE


def test_the_list_says_which_work(file: Path) -> None:
    rows = json.loads(keys("list", "-f", file, "-o", "json").stdout)
    assert [(r["keyName"], r["state"], r["expires"]) for r in rows] == [
        ("prod", "active", None),
        ("old", "active", "2999-06-01T00:00:00Z"),
    ]
    keys("disable", "prod", "-f", file, "--write")
    keys("expire", "old", "now", "-f", file, "--write")
    table = keys("list", "-f", file).stdout
    assert re.search(r"acme +prod +disabled +never", table)
    assert re.search(r"acme +old +expired .* ago: remove it", table)
    assert HASH not in table


# --- with a cluster --------------------------------------------------------------------------------------------------


def stored(name: str = "acme", created: str = "2026-01-01T00:00:00Z", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "uid": name, "resourceVersion": "41", "creationTimestamp": created} | metadata,
        "spec": {"keys": [{"name": "prod", "sha256": HASH, "later": "field"}]},
    }


def test_without_apply_the_cluster_is_only_read(tmp_path: Path) -> None:
    api = CannedApi({PATH: stored()})
    with api.kubeconfig(tmp_path) as kubeconfig:
        done = keys("create", "--tenant", "acme", "--kubeconfig", kubeconfig)

    assert patched(done)[0]["path"] == "/spec/keys/-"
    assert api.patches == []


@pytest.mark.parametrize("command", ["disable prod", "rotate prod", "create --name k1 --expires 90d", "remove prod"])
def test_without_apply_it_says_first_that_nothing_is_changed(tmp_path: Path, command: str) -> None:
    with CannedApi({PATH: stored()}).kubeconfig(tmp_path) as kubeconfig:
        done = keys(*command.split(), "--tenant", "acme", "--kubeconfig", kubeconfig)

    first, *rest = done.stderr.splitlines()
    patch = "kubectl patch tenant acme --type=json --patch-file FILE"
    assert first.startswith(f"Nothing is changed yet: apply the patch ({patch}), or run this command with --apply")
    assert first.endswith(", which makes another key." if KEY.search(done.stderr) else "--apply.")
    said = [line for line in rest if line.startswith(("key ", "it is ", "after that ", "once applied: "))]
    assert said
    assert all(line.startswith("once applied: ") for line in said)


def test_of_a_file_it_says_what_is_changed(file: Path) -> None:
    printed = keys("disable", "prod", "-f", file)
    assert printed.stderr.splitlines()[0].endswith("or run this command with --write.")
    written = keys("disable", "prod", "-f", file, "--write")
    assert "Nothing is changed" not in written.stderr
    assert f"{file} is changed, the cluster is not yet" in written.stderr
    assert "once applied: key 'prod' is refused" in written.stderr
    csv_output = keys("disable", "old", "-f", file, "-o", "csv")
    assert csv_output.stderr.splitlines()[0] == "Nothing is changed yet: run this command with --write."


def test_apply_writes_on_what_was_read_and_says_who_may_undo_it(tmp_path: Path) -> None:
    api = CannedApi({PATH: stored(annotations={"argocd.argoproj.io/tracking-id": "x"})})
    with api.kubeconfig(tmp_path) as kubeconfig:
        done = keys("create", "--tenant", "acme", "--name", "ci", "--apply", "--kubeconfig", kubeconfig)

    assert done.exit_code == 0, done.output
    ((path, body),) = api.patches
    assert path.startswith(PATH)
    assert "fieldManager=kubectl-shoal" in path
    assert body["metadata"] == {"resourceVersion": "41"}
    # What a later version put there stays.
    assert body["spec"]["keys"] == [
        {"name": "prod", "sha256": HASH, "later": "field"},
        {"name": "ci", "sha256": hash_api_key(the_key(done))},
    ]
    assert "Argo CD writes it too and may undo that: commit the patch as well" in done.stderr
    assert "key 'ci' is valid until it is disabled or removed\n" in done.stderr
    assert "once applied" not in done.stderr
    assert "Nothing is changed" not in done.stderr
    assert "kubectl patch" not in done.output


def test_a_conflict_writes_nothing_and_shows_no_key(tmp_path: Path) -> None:
    api = CannedApi({PATH: stored()})

    def refuse(*args: str) -> Result:
        with api.kubeconfig(tmp_path) as kubeconfig:
            return keys(*args, "--tenant", "acme", "--apply", "--kubeconfig", kubeconfig)

    api.on_patch = (409, "the object has been modified")
    done = refuse("create")
    assert done.exit_code == 1
    assert "changed concurrently: nothing was written, try again" in done.output
    assert not KEY.search(done.output)


@pytest.mark.parametrize("spec", [None, {"keys": [], "budget": {"amount": "5"}}], ids=["status", "spec"])
def test_a_status_that_the_operator_writes_meanwhile_is_no_conflict(
    tmp_path: Path, spec: dict[str, Any] | None
) -> None:
    api = CannedApi({PATH: stored()})
    later = stored(resourceVersion="42") | {"status": {"observedGeneration": 1}} | ({"spec": spec} if spec else {})
    api.changes = [(PATH, later)]
    with api.kubeconfig(tmp_path) as kubeconfig:
        done = keys("create", "--tenant", "acme", "--name", "ci", "--apply", "--kubeconfig", kubeconfig)
    if spec is not None:
        assert "changed concurrently: nothing was written" in done.output
        assert len(api.patches) == 1
        return
    assert done.exit_code == 0, done.output
    first, second = (body for _, body in api.patches)
    assert second == first | {"metadata": {"resourceVersion": "42"}}
    assert [key["name"] for key in second["spec"]["keys"]] == ["prod", "ci"]


def test_a_tenant_that_is_not_there(tmp_path: Path) -> None:
    missing = {"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}
    with CannedApi({PATH: (404, missing)}).kubeconfig(tmp_path) as kubeconfig:
        done = keys("create", "--tenant", "acme", "--kubeconfig", kubeconfig)

    assert done.exit_code == 1
    assert "there is no Tenant acme: kubectl get tenants lists them" in done.output


def test_a_key_that_an_older_tenant_lists_is_not_this_ones(tmp_path: Path) -> None:
    items = [stored("newer", "2026-02-01T00:00:00Z"), stored("older")]
    listed = {"kind": "TenantList", "metadata": {"resourceVersion": "1"}, "items": items}
    with CannedApi({"/apis/shoal.dev/v1alpha1/tenants": listed}).kubeconfig(tmp_path) as kubeconfig:
        rows = json.loads(keys("list", "-o", "json", "--kubeconfig", kubeconfig).stdout)

    assert [(r["tenant"], r["state"]) for r in rows] == [("newer", "claimed"), ("older", "active")]
    assert rows[0]["note"] == "it is a key of Tenant older, which comes first"


def test_the_list_says_which_keys_nobody_uses_any_more(tmp_path: Path) -> None:
    """Before a key is removed: of the last month, by the ledger."""
    item = stored()
    item["spec"]["keys"].append({"name": "old", "sha256": OTHER})
    listed = {"kind": "TenantList", "metadata": {"resourceVersion": "1"}, "items": [item]}
    rows = [{"tenant": "acme", "key": "prod", "day": day, "requests": 1} for day in ("2026-11-20", "2026-11-21")]
    page = {"from": "2026-10-22", "to": "2026-12-01", "by": ["tenant", "key", "day"], "rows": rows}
    api = CannedApi({"/apis/shoal.dev/v1alpha1/tenants": listed, "/v1/usage": page})
    with api.kubeconfig(tmp_path) as kubeconfig:
        ledger = ("--ledger-url", yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
        table = keys("list", "--used", "--kubeconfig", kubeconfig, *ledger, "--ledger-key", "k").stdout

    assert re.search(r"acme +prod +active +never +2026-11-21", table), table
    assert re.search(r"(?m)acme +old +active +never +- *$", table), table
    (asked,) = [path for path in api.asked if path.startswith("/v1/usage")]
    assert "by=tenant,key,day" in asked


def test_without_a_ledger_the_list_says_what_is_missing(tmp_path: Path) -> None:
    with CannedApi({"/apis/shoal.dev/v1alpha1/tenants": {"items": []}}).kubeconfig(tmp_path) as kubeconfig:
        done = keys(
            "list", "--used", "--kubeconfig", kubeconfig, "--ledger-url", "http://127.0.0.1:1", "--ledger-key", "k"
        )

    assert done.exit_code == 1
    assert "the ledger at http://127.0.0.1:1 does not answer" in done.output
