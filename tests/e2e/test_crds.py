"""The custom resources on a real API server: what is stored, what is refused, and what a person reads then."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.apiserver

REPOSITORY = Path(__file__).resolve().parents[2]

GPU_CLASS: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "GPUClass",
    "metadata": {"name": "h100"},
    "spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "memoryPerGPU": "80Gi"},
}
MODEL: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "m", "namespace": "default"},
    "spec": {"source": {"uri": "hf://owner/repo"}},
}
TENANT: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Tenant",
    "metadata": {"name": "acme"},
    "spec": {"keys": [{"name": "a", "sha256": "0" * 64}], "models": [{"namespace": "default", "name": "m"}]},
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one field set; `path` is dotted, relative to the object."""
    found = copy.deepcopy(base)
    *parents, last = path.split(".")
    node: Any = found
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    node[int(last) if isinstance(node, list) else last] = value
    return found


def model(path: str, value: Any) -> dict[str, Any]:
    return changed(MODEL, path, value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # --- GPUClass: devices
    (
        "both worlds",
        changed(
            changed(GPU_CLASS, "spec.device", {"deviceClassName": "gpu.nvidia.com"}), "spec.resourceName", "x.io/gpu"
        ),
        "`device` and `resourceName` exclude each other",
    ),
    (
        "no memory",
        changed(GPU_CLASS, "spec", {"nodeSelector": {"a": "b"}}),
        "`memoryPerGPU` must be set; only a class with `device` may leave it out",
    ),
    (
        "devices and an autoscaler",
        changed(
            changed(GPU_CLASS, "spec.device", {"deviceClassName": "gpu.nvidia.com"}),
            "spec.nodes",
            {"autoscaled": {"max": 1, "gpusPerNode": 1}},
        ),
        "`nodes.autoscaled` cannot be combined with `device` yet",
    ),
    (
        "name of a DeviceClass",
        changed(GPU_CLASS, "spec.device", {"deviceClassName": "GPU"}),
        "must be lower-case letters, digits, '-' and '.'",
    ),
    (
        "long selector",
        changed(GPU_CLASS, "spec.device", {"deviceClassName": "x", "selectors": [{"cel": {"expression": "x" * 4097}}]}),
        "may not be more than 4096",
    ),
    # --- Model: source
    ("no source", changed(MODEL, "spec", {}), "spec.source: Required value"),
    (
        "unknown scheme",
        model("spec.source.uri", "ftp://host/model"),
        "must be 'hf://owner/repo[@revision]', 's3://bucket/prefix' (or gs://, az://), "
        "'https://host/archive.tar[.gz]', 'oci://registry/image:tag', 'pvc://claim[/path]' or 'file:///path'",
    ),
    (
        "password in the URI",
        model("spec.source.uri", "https://user:secret@host/m.tar"),
        "spec.source.uri: Invalid value",
    ),
    ("path out of the claim", model("spec.source.uri", "pvc://claim/../other"), "a path of `uri` may not contain '..'"),
    ("long URI", model("spec.source.uri", "https://h/" + "x" * 1100), "may not be more than 1024"),
    ("digest", model("spec.source.digest", "sha256:ABC"), "must be 'sha256:' and 64 lower-case hex digits"),
    # --- Model: engine
    (
        "unknown engine",
        model("spec.engine.type", "TGI"),
        'Unsupported value: "TGI": supported values: "SGLang", "vLLM"',
    ),
    (
        "image without version",
        model("spec.engine.image", "registry.example.com/sglang:x"),
        "`version` must be set when `image` is: arguments differ by version",
    ),
    ("version", model("spec.engine.version", "latest"), "must be a version, such as '0.5.23'"),
    ("no GPU", model("spec.engine.parallelism.tensor", 0), "should be greater than or equal to 1"),
    ("too many GPUs", model("spec.engine.parallelism.tensor", 65), "should be less than or equal to 64"),
    ("words for numbers", model("spec.engine.contextLength", "32k"), "must be of type integer"),
    ("short context", model("spec.engine.contextLength", 1), "should be greater than or equal to 128"),
    (
        "bare argument",
        model("spec.engine.extraArgs", ["tp=2"]),
        "each of `extraArgs` must be '--name=value' or '--flag'",
    ),
    (
        "an argument of a field",
        model("spec.engine.extraArgs", ["--served-model-name=other"]),
        "`extraArgs` of SGLang may not have --served-model-name: use spec.servedNames",
    ),
    (
        "an argument of a field of vLLM",
        model("spec.engine", {"type": "vLLM", "extraArgs": ["--max-model-len=4096"]}),
        "`extraArgs` of vLLM may not have --max-model-len: use spec.engine.contextLength",
    ),
    (
        "an argument that does not go with stages",
        model("spec.engine", {"parallelism": {"pipeline": 2}, "extraArgs": ["--enable-pdmux"]}),
        "`parallelism.pipeline` does not go with --enable-pdmux in SGLang",
    ),
    *(
        (
            f"{method} in groups",
            model("spec.engine", {"speculation": {"method": method, **more}, "parallelism": {"attentionData": 2}}),
            "spec.engine: Invalid value: `speculation` by NGram or DraftModel does not go with "
            "`parallelism.attentionData` in SGLang",
        )
        for method, more in (("NGram", {"isolation": "Shared"}), ("DraftModel", {"draftPath": "draft"}))
    ),
    *(
        (
            f"guesses from all tenants' text, {named}",
            model("spec.engine", {"speculation": {"method": "NGram", **more}}),
            "`speculation` by NGram of SGLang guesses from the answers to all tenants",
        )
        for named, more in (("by default", {}), ("isolated", {"isolation": "Tenant"}))
    ),
    (
        "guesses in stages",
        model("spec.engine", {"speculation": {"method": "MTP"}, "parallelism": {"pipeline": 2}}),
        "SGLang guesses no tokens in stages: leave out `speculation` or `parallelism.pipeline`",
    ),
    ("parser", model("spec.engine.toolCallParser", "llama3 --api-key=x"), "must be the name of a parser of the engine"),
    # --- Model: names, variants, replicas, pod
    ("colon in a name", model("spec.servedNames", ["base:adapter"]), "':' and '/' have a meaning of their own"),
    ("slash in a name", model("spec.servedNames", ["other/model"]), "':' and '/' have a meaning of their own"),
    ("the same name twice", model("spec.servedNames", ["a", "a"]), 'Duplicate value: "a"'),
    ("too many names", model("spec.servedNames", [f"n{i}" for i in range(17)]), "must have at most 16 items"),
    *(
        (f"host of media {host}", model("spec.media.allowedHosts", [host]), "must be a host's whole name in lower case")
        for host in ("Images.example.com", "*.example.com", "10.0.0.1", "[::1]", "a.example.com:443", "localhost")
    ),
    ("the same host twice", model("spec.media.allowedHosts", ["a.example"] * 2), 'Duplicate value: "a.example"'),
    (
        "too many hosts",
        model("spec.media.allowedHosts", [f"a{i}.example" for i in range(33)]),
        "must have at most 32 items",
    ),
    (
        "the same class twice",
        model("spec.variants", [{"class": "a"}, {"class": "a"}]),
        "spec.variants[1]: Duplicate value",
    ),
    (
        "class in capitals",
        model("spec.variants", [{"class": "H100"}]),
        "must be lower-case letters, digits, '-' and '.'",
    ),
    # --- Model: scaling, hold, drain
    ("negative replicas", model("spec.scaling.minReplicas", -1), "should be greater than or equal to 0"),
    (
        "more at least than at most",
        model("spec.scaling", {"minReplicas": 5, "maxReplicas": 2}),
        "`minReplicas` may not be larger than `maxReplicas`",
    ),
    ("at most none", model("spec.scaling.maxReplicas", 0), "should be greater than or equal to 1"),
    ("no KV cache", model("spec.scaling.kvUtilizationPercent", 0), "should be greater than or equal to 1"),
    ("more than the KV cache", model("spec.scaling.kvUtilizationPercent", 101), "should be less than or equal to 100"),
    ("no queue", model("spec.scaling.queuedRequestsPerReplica", 0), "should be greater than or equal to 1"),
    ("idle for no time", model("spec.scaling.idleSeconds", 0), "should be greater than or equal to 1"),
    ("a window back in time", model("spec.scaling.stabilizationSeconds", -1), "should be greater than or equal to 0"),
    ("another driver", model("spec.scaling.driver", "HPA"), 'supported values: "BuiltIn", "KEDA"'),
    ("fewer than nobody waits", model("spec.hold.maxRequests", -1), "should be greater than or equal to 0"),
    ("no share of the hold", model("spec.hold.maxTenantPercent", 0), "should be greater than or equal to 1"),
    ("more than all of the hold", model("spec.hold.maxTenantPercent", 101), "should be less than or equal to 100"),
    ("held for no time", model("spec.hold.timeoutSeconds", 0), "should be greater than or equal to 1"),
    ("held for a day", model("spec.hold.timeoutSeconds", 86_400), "should be less than or equal to 3600"),
    ("bytes of the hold", model("spec.hold.maxBytes", "lots"), "must be a quantity, such as '80Gi'"),
    ("a drain without end", model("spec.drainSeconds", 86_401), "should be less than or equal to 86400"),
    ("stalled at once", model("spec.stallSeconds", 5), "should be greater than or equal to 30"),
    ("our label", model("spec.pod.labels", {"shoal.dev/model": "x"}), "`labels` may not use keys of 'shoal.dev/'"),
    ("our annotation", model("spec.pod.annotations", {"shoal.dev/x": "y"}), "`annotations` may not use keys of"),
    ("a label's value", model("spec.pod.labels", {"team": "a b"}), "must be a label's value"),
    (
        "GPUs as a resource",
        model("spec.pod.resources.limits", {"nvidia.com/gpu": 2}),
        "GPUs may not be set here: they come from the GPUClass and `engine.parallelism`",
    ),
    ("not an amount", model("spec.pod.resources.requests", {"memory": "lots"}), "must be a quantity, such as '80Gi'"),
    ("a variable's name", model("spec.pod.env", [{"name": "1A"}]), "must be letters, digits and '_'"),
    ("long name", changed(MODEL, "metadata.name", "m" * 64), "`metadata.name` may not be longer than 63 characters"),
    ("unknown field", model("spec.replicas", 3), 'unknown field "spec.replicas"'),
    # --- GPUClass
    ("no selector", changed(GPU_CLASS, "spec.nodeSelector", {}), "only a class with `device` may leave it out"),
    (
        "memory without a unit",
        changed(GPU_CLASS, "spec.memoryPerGPU", 80),
        "`memoryPerGPU` must be at least '1Gi'; write the unit, as in '80Gi'",
    ),
    ("memory", changed(GPU_CLASS, "spec.memoryPerGPU", "80 GB"), "must be a quantity, such as '80Gi'"),
    (
        "toleration without a key",
        changed(GPU_CLASS, "spec.tolerations", [{"effect": "NoSchedule"}]),
        "a toleration with operator 'Equal' must have a `key`",
    ),
    ("resource name", changed(GPU_CLASS, "spec.resourceName", "gpu"), "must be a domain, '/' and a name"),
    ("interconnect", changed(GPU_CLASS, "spec.interconnect", "nvlink"), 'supported values: "NVLink", "PCIe"'),
    ("currency", changed(GPU_CLASS, "spec.hourlyCost", {"amount": "1", "currency": "usd"}), "must be an ISO 4217 code"),
    (
        "capability as a number",
        changed(GPU_CLASS, "spec.computeCapability", 9.0),
        "spec.computeCapability: Invalid value",
    ),
    # --- Tenant
    (
        "the key instead of its hash",
        changed(TENANT, "spec.keys.0.sha256", "sk-very-secret"),
        "must be the SHA-256 of the key, 64 lower-case hex digits, never the key itself",
    ),
    (
        "two keys of one name",
        changed(TENANT, "spec.keys", [{"name": "a", "sha256": "0" * 64}, {"name": "a", "sha256": "1" * 64}]),
        "spec.keys[1]: Duplicate value",
    ),
    (
        "one key under two names",
        changed(TENANT, "spec.keys", [{"name": "a", "sha256": "0" * 64}, {"name": "b", "sha256": "0" * 64}]),
        "two of `keys` have the same `sha256`",
    ),
    ("expiry", changed(TENANT, "spec.keys.0.expires", "next year"), "must be of type date-time"),
    (
        "the same grant twice",
        changed(TENANT, "spec.models", [{"namespace": "d", "name": "m"}, {"namespace": "d", "name": "m"}]),
        "spec.models[1]: Duplicate value",
    ),
]


@pytest.mark.parametrize(("bad", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_object_is_refused_with_words_that_help(apiserver: ApiServer, bad: dict[str, Any], message: str) -> None:
    done = apiserver.apply(bad, dry_run=True)

    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    "engine",
    [
        {"type": "vLLM", "speculation": {"method": "NGram"}, "parallelism": {"attentionData": 2}},
        {"speculation": {"method": "NGram", "isolation": "Shared"}},
        {"speculation": {"method": "MTP"}, "parallelism": {"attentionData": 2}},
        {"speculation": {"method": "NGram", "isolation": "Shared"}, "parallelism": {"attentionData": 1, "pipeline": 1}},
        {"type": "vLLM", "speculation": {"method": "MTP"}, "parallelism": {"pipeline": 2}},
        {"parallelism": {"attentionData": 2, "pipeline": 2}},
    ],
)
def test_guesses_that_an_engine_makes_in_groups_and_stages_are_accepted(
    apiserver: ApiServer, engine: dict[str, Any]
) -> None:
    done = apiserver.apply(model("spec.engine", engine), dry_run=True)

    assert done.returncode == 0, done.stderr


def test_a_tenants_key_that_stands_in_place_of_its_hash_is_not_repeated(apiserver: ApiServer) -> None:
    """The message goes to terminals and CI logs."""
    done = apiserver.apply(changed(TENANT, "spec.keys.0.sha256", "sk-very-secret"), dry_run=True)

    assert done.returncode != 0
    assert "sk-very-secret" not in done.stderr


EXAMPLES = sorted(p for p in (REPOSITORY / "examples").rglob("*.yaml") if p.parent.name != "prices")
"""Price lists are files of the ledger's, no objects."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_example_is_accepted(apiserver: ApiServer, path: Path) -> None:
    for namespace in ("demo", "chat", "fleet", "elastic", "tunes", "engines", "routes", "devices"):
        apiserver.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})

    done = apiserver.run("apply", "--server-side", "--dry-run=server", "-f", str(path))

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len([o for o in yaml.safe_load_all(path.read_text()) if o])


@pytest.mark.parametrize("how", [(), ("--server-side",)], ids=["apply", "server-side"])
def test_facts_in_a_manifest_of_the_catalogue_are_not_stored(apiserver: ApiServer, how: tuple[str, ...]) -> None:
    """They are for `shoal explain`: a Model's status is what the operator read from the source."""
    path = REPOSITORY / "examples" / "catalogue" / "qwen3-8b.yaml"
    assert yaml.safe_load(path.read_text())["status"]["artifact"]["weightBytes"]

    apiserver.kubectl("apply", *how, "-f", str(path))
    stored = apiserver.json("get", "model", "qwen3-8b")
    apiserver.kubectl("delete", "-f", str(path))

    assert stored["spec"]["source"]["uri"] == "hf://Qwen/Qwen3-8B"
    assert "artifact" not in stored.get("status", {})


def test_the_shortest_model_is_stored_as_it_was_written(apiserver: ApiServer) -> None:
    """Nothing that a later version may decide is written into people's objects."""
    apiserver.apply(MODEL)

    assert apiserver.json("get", "model", "m")["spec"] == MODEL["spec"]


def test_a_scale_is_read_once_the_model_has_its_lower_limit(apiserver: ApiServer) -> None:
    """As docs/scaling.md says, with the API server's words: no default is stored for it."""
    apiserver.apply(MODEL)
    get = ("get", "model", "m", "--subresource=scale", "-o", "jsonpath={.spec.replicas}")
    compared = ("scale", "model/m", "--replicas=2", "--current-replicas=0")
    absent = 'the spec replicas field ".spec.scaling.minReplicas" does not exist'
    assert absent in apiserver.run(*get).stderr
    assert absent in apiserver.run(*compared).stderr
    assert absent in " ".join((REPOSITORY / "docs" / "scaling.md").read_text().split())

    apiserver.kubectl("scale", "model/m", "--replicas=0")
    assert apiserver.json("get", "model", "m")["spec"]["scaling"] == {"minReplicas": 0}
    apiserver.kubectl(*get)
    apiserver.kubectl(*compared)
    assert apiserver.kubectl(*get) == "2"
    apiserver.kubectl("delete", "model", "m")


def test_static_defaults_are_stored(apiserver: ApiServer) -> None:
    apiserver.apply(
        changed(
            changed(GPU_CLASS, "spec.tolerations", [{"key": "nvidia.com/gpu"}]), "spec.hourlyCost", {"amount": "2.49"}
        )
    )

    spec = apiserver.json("get", "gpuc", "h100")["spec"]

    assert "resourceName" not in spec, "a class with `device` has none, so its default is in the code"
    assert spec["interconnect"] == "PCIe"
    assert spec["interruptible"] is False
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Equal"}]
    assert spec["hourlyCost"] == {"amount": "2.49", "currency": "USD"}


def test_status_is_a_subresource(apiserver: ApiServer) -> None:
    apiserver.apply(changed(TENANT, "status", {"activeKeys": 7}))
    assert "status" not in apiserver.json("get", "tenant", "acme")

    apiserver.kubectl(
        "patch", "tenant", "acme", "--subresource=status", "--type=merge", '-p={"status":{"activeKeys":1}}'
    )
    assert apiserver.json("get", "tenant", "acme")["status"] == {"activeKeys": 1}


def test_a_model_of_before_a_rule_may_change_otherwise(apiserver: ApiServer, tmp_path: Path) -> None:
    """An upgrade brings rules that stored Models break: what the operator and people write besides still goes in."""
    crd = REPOSITORY / "crds" / "models.shoal.dev.yaml"
    earlier = yaml.safe_load(crd.read_text())
    engine = earlier["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["engine"]
    del engine["x-kubernetes-validations"]
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(earlier))
    apiserver.kubectl("replace", "-f", str(tmp_path / "crd.yaml"))
    old = changed(model("spec.engine.extraArgs", ["--served-model-name=other"]), "metadata.name", "old")
    until_taken = time.monotonic() + 30
    while (done := apiserver.apply(old)).returncode != 0:
        assert time.monotonic() < until_taken, done.stderr
    try:
        apiserver.kubectl("replace", "-f", str(crd))
        other = changed(model("spec.engine.extraArgs", ["--host=x"]), "metadata.name", "other")
        until_refused = time.monotonic() + 30
        while "may not have --host" not in apiserver.apply(other, dry_run=True).stderr:
            assert time.monotonic() < until_refused
        scaled = '-p={"spec":{"scaling":{"maxReplicas":3}}}'
        apiserver.kubectl("patch", "model", "old", "--type=merge", scaled)
        told = '-p={"status":{"observedGeneration":2}}'
        apiserver.kubectl("patch", "model", "old", "--subresource=status", "--type=merge", told)
        worse = '-p={"spec":{"engine":{"contextLength":4096}}}'
        assert (
            "may not have --served-model-name" in apiserver.run("patch", "model", "old", "--type=merge", worse).stderr
        )
    finally:
        apiserver.kubectl("replace", "-f", str(crd))
        apiserver.kubectl("delete", "model", "old")


def test_columns_say_what_matters(apiserver: ApiServer) -> None:
    apiserver.apply(MODEL)
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "ReplicasReady",
        "message": "1 of 1 replicas serve",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {
        "conditions": [condition],
        "replicas": {"desired": 2, "ready": 1},
        "capabilities": ["generate", "tools"],
        "variants": [{"class": "l4-24gb", "excluded": "no room"}, {"class": "l40s-48gb", "desired": 2, "ready": 1}],
    }
    apiserver.kubectl(
        "patch", "model", "m", "--subresource=status", "--type=merge", f"-p={yaml.safe_dump({'status': status})}"
    )

    head, row = apiserver.kubectl("get", "mdl", "m").splitlines()
    assert head.split() == ["NAME", "READY", "REASON", "DESIRED", "UP", "CLASS", "AGE", "MESSAGE"]
    assert row.split()[:6] == ["m", "True", "ReplicasReady", "2", "1", "l40s-48gb"]
    assert row.endswith("1 of 1 replicas serve")
    wide = apiserver.kubectl("get", "mdl", "m", "-o", "wide")
    assert "hf://owner/repo" in wide
    assert '["generate","tools"]' in wide
    assert apiserver.run("wait", "--for=condition=Ready", "model/m", "--timeout=5s").returncode == 0

    assert apiserver.kubectl("get", "gpuclasses,tenants", "--ignore-not-found") is not None
    assert "model" in apiserver.kubectl("api-resources", "--categories=shoal", "-o", "name")


def test_explain_tells_fields(apiserver: ApiServer) -> None:
    text = " ".join(apiserver.kubectl("explain", "model.spec.source.uri").split())

    assert "hf://owner/repo[@revision]" in text


def test_two_managers_own_different_keys_of_one_tenant(apiserver: ApiServer) -> None:
    """A list map: one team's apply does not remove the other's key."""
    for team, digit in (("a", "0"), ("b", "1")):
        tenant = changed(TENANT, "metadata.name", "shared")
        tenant["spec"] = {"keys": [{"name": team, "sha256": digit * 64}]}
        manager = f"--field-manager=team-{team}"
        apiserver.kubectl("apply", "--server-side", manager, "-f", "-", text=yaml.safe_dump(tenant))

    assert [key["name"] for key in apiserver.json("get", "tenant", "shared")["spec"]["keys"]] == ["a", "b"]
