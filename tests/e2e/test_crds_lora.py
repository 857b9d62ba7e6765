"""LoRAPool and LoRAAdapter on a real API server: what is stored, what is refused, and what a person reads then."""

from typing import Any

import pytest
import yaml

from tests.e2e.test_crds import changed
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.apiserver

POOL: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "LoRAPool",
    "metadata": {"name": "p", "namespace": "default"},
    "spec": {"modelRef": {"name": "m"}},
}
ADAPTER: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "LoRAAdapter",
    "metadata": {"name": "support", "namespace": "default"},
    "spec": {"poolRef": {"name": "p"}, "source": {"uri": "s3://adapters/acme/support/v7"}, "tenants": ["acme"]},
}


def pool(path: str, value: Any) -> dict[str, Any]:
    return changed(POOL, path, value)


def adapter(path: str, value: Any) -> dict[str, Any]:
    return changed(ADAPTER, path, value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # --- LoRAPool
    ("no Model", pool("spec", {}), "spec.modelRef: Required value"),
    ("a name too long for a label", pool("metadata.name", "p" * 64), "may not be longer than 63 characters"),
    ("a module of no model", pool("spec.targetModules", ["w_pack"]), "must be q_proj, k_proj, v_proj, o_proj"),
    ("all beside others", pool("spec.targetModules", ["all", "q_proj"]), "`all` in `targetModules` stands alone"),
    ("no module", pool("spec.targetModules", []), "should have at least 1 items"),
    ("one slot, which is the base's", pool("spec.slotsPerReplica", 1), "greater than or equal to 2"),
    ("a cache below the slots", pool("spec.cachedPerReplica", 7), "`cachedPerReplica` may not be smaller than"),
    (
        "a selector that nobody asked for",
        pool("spec.allowedNamespaces", {"from": "All", "selector": {"matchLabels": {"team": "a"}}}),
        "`selector` is set with `from: Selector`, and only then",
    ),
    (
        "credentials for everything",
        pool("spec.credentials", [{"uriPrefix": "adapters/", "secretRef": {"name": "s"}}]),
        "must be a source's scheme and host",
    ),
    # --- LoRAAdapter
    ("nobody may use it", adapter("spec.tenants", []), "should have at least 1 items"),
    ("no tenants", changed(ADAPTER, "spec", {"poolRef": {"name": "p"}}), "spec.tenants: Required value"),
    ("a tenant that is none", adapter("spec.tenants", ["Acme Inc"]), "must be the name of a Tenant, or '*'"),
    ("a volume as its source", adapter("spec.source.uri", "pvc://claim/a"), "must be 'hf://owner/repo[@revision]'"),
    ("half a digest", adapter("spec.source.digest", "sha256:1234"), "must be 'sha256:' and 64 lower-case hex digits"),
    ("a name as SGLang would read it", adapter("spec.servedNames", ["m:support"]), "have a meaning of their own"),
    ("another object's name", adapter("spec.servedNames", ["default/m"]), "have a meaning of their own"),
    ("a look-alike", adapter("spec.servedNames", ["ѕupport"]), "must be letters, digits"),
    ("copies on demand", adapter("spec.minCopies", 2), "`minCopies` needs `residency` Warm or Pinned"),
    ("a name too long for a file", adapter("metadata.name", "a" * 129), "may not be longer than 128 characters"),
]


@pytest.mark.parametrize(("one", "words"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused_with_words_that_help(apiserver: ApiServer, one: dict[str, Any], words: str) -> None:
    done = apiserver.apply(one, dry_run=True)

    assert done.returncode != 0
    assert words in done.stderr


def test_the_least_is_stored_as_it_was_written(apiserver: ApiServer) -> None:
    assert apiserver.apply(POOL, ADAPTER).returncode == 0

    assert apiserver.json("get", "lorapool", "p")["spec"] == POOL["spec"]
    assert apiserver.json("get", "lora", "support")["spec"] == ADAPTER["spec"]


def test_columns_say_what_matters(apiserver: ApiServer) -> None:
    apiserver.apply(POOL, ADAPTER)
    why = "128 > 64 of pool p"
    ready = {"type": "Ready", "status": "False", "reason": "RankTooHigh", "message": why}
    available = {"type": "Available", "status": "True", "reason": "Resident", "message": "on 2 replicas"}
    conditions = [c | {"lastTransitionTime": "2026-01-01T00:00:00Z"} for c in (ready, available)]
    digest = "sha256:" + "4f1c" * 16
    status(apiserver, "lora", "support", {"conditions": conditions, "revision": digest, "rank": 16})
    status(
        apiserver, "lorapool", "p", {"conditions": conditions, "adapters": {"total": 3, "available": 2, "failed": 1}}
    )

    head, row = apiserver.kubectl("get", "lora", "support").splitlines()
    assert head.split() == ["NAME", "AVAILABLE", "REASON", "POOL", "RANK", "REVISION", "AGE"]
    assert row.split()[:6] == ["support", "True", "RankTooHigh", "p", "16", digest]
    assert why in apiserver.kubectl("get", "lora", "support", "-o", "wide")

    head, row = apiserver.kubectl("get", "lorapools", "p").splitlines()
    assert head.split() == ["NAME", "READY", "REASON", "MODEL", "ADAPTERS", "AVAILABLE", "FAILED", "AGE"]
    assert row.split()[:7] == ["p", "False", "RankTooHigh", "m", "3", "2", "1"]
    assert apiserver.run("wait", "--for=condition=Available", "lora/support", "--timeout=5s").returncode == 0
    shoal = apiserver.kubectl("api-resources", "--categories=shoal", "-o", "name")
    assert "lorapools" in shoal
    assert "loraadapters" in shoal


def status(server: ApiServer, kind: str, name: str, found: dict[str, Any]) -> None:
    patch = yaml.safe_dump({"status": found})
    server.kubectl("patch", kind, name, "--subresource=status", "--type=merge", f"-p={patch}")
