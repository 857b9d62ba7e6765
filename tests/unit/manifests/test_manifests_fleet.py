"""What a pod carries of the plan, of its source's facts and of the node cache; and the Job that reads the facts."""

from typing import Any

import pytest
from inline_snapshot import snapshot

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import Cache, OperatorConfig, Pods, PriorityBand
from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model, ModelSpec
from shoal.core.artifacts import source_key
from shoal.core.enginerevision import EngineRevision, engine_revision
from shoal.core.facts import EngineBuild
from shoal.kube import projections
from shoal.manifests import cache
from shoal.manifests import model as manifests
from shoal.manifests.facts import facts_job
from shoal.manifests.shape import VariantShape
from tests.support.operators import CONFIG

CLASS = GPUClass.model_validate(
    {"metadata": {"name": "l4"}, "spec": {"nodeSelector": {"nvidia.com/gpu.product": "L4"}, "memoryPerGPU": "24Gi"}}
)
FACTS = ArtifactFacts.model_validate(
    {"source": "hf://org/model", "revision": "c0ffee", "digest": f"sha256:{'1' * 64}", "fileBytes": 16 * 2**30}
)
CACHED = CONFIG.model_copy(update={"cache": Cache(enabled=True)})
BANDS = (
    PriorityBand(name="low", minimum=-1000, value=0),
    PriorityBand(name="mid", minimum=0, value=0),
    PriorityBand(name="hi", minimum=9, value=0),
)


def model(**spec: object) -> Model:
    metadata = {"name": "chat", "namespace": "ns", "uid": "u-1", "generation": 1}
    return Model.model_validate({"metadata": metadata, "spec": {"source": {"uri": "hf://org/model"}, **spec}})


def pod(config: OperatorConfig = CONFIG, *, gpus: int = 1, facts: ArtifactFacts | None = FACTS, **spec: object) -> dict:
    shape = VariantShape(model(**spec), CLASS, gpus, "0.5.23", config, "abcd1234", facts)
    return manifests.deployment(shape, surge=False)["spec"]["template"]["spec"]


def environment(container: dict) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container["env"]}


def stage(spec: dict) -> dict:
    return spec["initContainers"][1]


@pytest.mark.parametrize(
    ("uri", "pinned"),
    [
        ("hf://org/model", True),
        ("s3://bucket/model", True),
        ("pvc://claim/model", False),  # the user's folder, the user's to change
        ("file:///opt/models/tiny", False),
    ],
)
def test_replicas_fetch_exactly_what_the_facts_were_read_of(uri: str, *, pinned: bool) -> None:
    found = environment(stage(pod(source={"uri": uri})))
    assert found.get("SHOAL_STAGE_REVISION") == ("c0ffee" if pinned else None)
    assert found.get("SHOAL_STAGE_MANIFEST") == (FACTS.digest if pinned else None)


def build(**given: Any) -> EngineBuild:
    """As the operator reads it from a ready replica's pod."""
    labels = {
        names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        names.LABEL_MODEL_UID: "u-1",
        names.LABEL_GPU_CLASS: "l4",
    }
    metadata = {"namespace": "ns", "name": "p", "uid": "p", "labels": labels}
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    read = projections.pod({"metadata": metadata, "spec": pod(**given), "status": status})
    assert read is not None
    assert read.engine is not None
    return read.engine


def test_what_answers_depend_on_is_read_from_the_pod() -> None:
    usual = build()
    assert (usual.weights, usual.pinned) == (FACTS.digest, True)
    assert usual.image == pod()["containers"][0]["image"]
    other_weights = FACTS.model_copy(update={"digest": f"sha256:{'2' * 64}"})
    others = [
        build(facts=other_weights),
        build(gpus=2),
        build(engine={"quantization": {"weights": "FP8"}}),
        build(engine={"extraArgs": ["--attention-backend=triton"]}),
        build(pod={"env": [{"name": "A", "value": "b"}]}),
    ]
    assert len({usual.digest, *(each.digest for each in others)}) == 1 + len(others)
    # Neither the agent nor what concerns the scheduler alone.
    newer = CONFIG.model_copy(update={"agent": CONFIG.agent.model_copy(update={"image": "shoal:next"})})
    same = [build(config=newer), build(pod={"annotations": {"a": "b"}}), build(drainSeconds=5)]
    assert {each.digest for each in same} == {usual.digest}


_REACHES_THE_ENGINE: dict[str, object] = {
    "source": {"uri": "hf://org/other"},
    "engine": {"extraArgs": ["--attention-backend=triton"]},
    "variants": [{"class": "l4", "quantization": "FP8"}],
    "prefix_cache": {"isolation": "Shared"},
    "pod": {"resources": {"limits": {"memory": "99Gi"}}},
}
_REACHES_NO_ENGINE: dict[str, object] = {
    "served_names": ["other"],
    "route_namespaces": ["other"],
    "priority": 5,
    "scaling": {"minReplicas": 2},
    "prefetch": {"nodes": 1},
    "hold": {"timeoutSeconds": 5},
    "interruptible_percent": 50,
    "sizing": {"weightBytes": "15Gi"},
    "drain_seconds": 5,
    "stall_seconds": 60,
    "limits": {"requestSeconds": 5},
    "media": {"allowedHosts": ["images.example.com"]},
}


@pytest.mark.parametrize("field", ModelSpec.model_fields)
def test_a_model_is_another_revision_where_its_engine_or_its_weights_are_others(field: str) -> None:
    """Otherwise a class where its engine crashed would stay its last choice after the user has mended it."""
    change = (_REACHES_THE_ENGINE | _REACHES_NO_ENGINE)[field]
    facts = FACTS.model_copy(update={"task": "Embed"})  # such an engine keeps prefixes only where they are shared

    def runs(**spec: Any) -> tuple[list[dict], EngineRevision]:
        found = pod(facts=facts, **spec)
        return [stage(found), found["containers"][0]], engine_revision(model(**spec).spec, "l4", facts, None)

    (before, former), (after, new) = runs(), runs(**{ModelSpec.model_fields[field].alias or field: change})
    assert (before != after) == (former != new) == (field in _REACHES_THE_ENGINE)


def test_other_weights_of_the_same_source_are_another_revision() -> None:
    spec = model().spec
    other = FACTS.model_copy(update={"digest": f"sha256:{'2' * 64}"})
    assert engine_revision(spec, "l4", FACTS, None) != engine_revision(spec, "l4", other, None)


@pytest.mark.parametrize(
    ("source", "pinned"),
    [
        ({"uri": "pvc://claim/model"}, False),
        ({"uri": "oci://registry.example/model:1"}, False),
        ({"uri": "pvc://claim/model", "digest": f"sha256:{'3' * 64}"}, True),
        ({"uri": "file:///opt/models/tiny"}, True),
    ],
)
def test_weights_that_may_change_in_place_are_not_pinned(source: dict[str, str], *, pinned: bool) -> None:
    assert build(source=source).pinned is pinned


def test_a_replica_has_its_drain_time_and_a_minute() -> None:
    assert pod()["terminationGracePeriodSeconds"] == 960
    assert pod(drainSeconds=0)["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize(("priority", "name"), [(-1000, "low"), (-1, "low"), (0, "mid"), (8, "mid"), (9, "hi")])
def test_a_priority_falls_into_the_highest_band_that_it_reaches(priority: int, name: str) -> None:
    config = CONFIG.model_copy(update={"pods": Pods(priority_bands=BANDS)})
    assert pod(config, priority=priority)["priorityClassName"] == name


def test_one_priority_class_for_all_wins_and_without_bands_there_is_none() -> None:
    config = CONFIG.model_copy(update={"pods": Pods(priority_bands=BANDS, priority_class_name="mine")})
    assert pod(config, priority=9)["priorityClassName"] == "mine"
    assert "priorityClassName" not in pod()


def test_small_replicas_are_drawn_together_and_those_of_one_model_apart() -> None:
    spec = pod(gpus=2)
    assert spec["affinity"]["podAffinity"] == snapshot(
        {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "labelSelector": {
                            "matchLabels": {"app.kubernetes.io/component": "engine", "shoal.dev/gpu-class": "l4"}
                        },
                        "namespaceSelector": {},
                        "topologyKey": "kubernetes.io/hostname",
                    },
                }
            ]
        }
    )
    assert spec["topologySpreadConstraints"] == snapshot(
        [
            {
                "labelSelector": {
                    "matchLabels": {"app.kubernetes.io/component": "engine", "shoal.dev/model-uid": "u-1"}
                },
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ]
    )
    assert "podAffinity" not in pod(gpus=8)["affinity"]


def test_a_variants_quantization_reaches_its_engine_and_no_other() -> None:
    variants = [{"class": "l4", "quantization": "FP8"}]
    assert "--quantization=fp8" in pod(variants=variants)["containers"][0]["args"]
    assert "--quantization=fp8" not in pod(variants=[{"class": "h100", "quantization": "FP8"}])["containers"][0]["args"]


def test_with_the_cache_all_three_containers_see_it_and_only_the_claim_gives_it() -> None:
    spec = pod(CACHED)
    agent, staging = spec["initContainers"]
    for container in (agent, staging, spec["containers"][0]):
        assert cache.POD_MOUNT in container["volumeMounts"]
    assert environment(staging)["SHOAL_STAGE_CACHE"] == environment(agent)["SHOAL_AGENT_CACHE"]
    assert cache.pod_volume(CACHED.cache) in spec["volumes"]
    assert "ephemeral-storage" not in staging["resources"]["requests"]
    assert not any("hostPath" in v for v in spec["volumes"])


def test_without_the_cache_a_pod_asks_for_room_for_its_weights() -> None:
    assert stage(pod())["resources"]["requests"]["ephemeral-storage"] == "18023Mi"
    assert "cache" not in {v["name"] for v in pod()["volumes"]}
    in_place = pod(source={"uri": "pvc://claim/model"})
    assert "ephemeral-storage" not in stage(in_place)["resources"]["requests"]
    assert "cache" not in {v["name"] for v in pod(CACHED, source={"uri": "file:///opt/m"})["volumes"]}


def test_an_image_of_weights_is_mounted_and_not_fetched() -> None:
    spec = pod(CACHED, source={"uri": "oci://registry.example/models/llama:1"})
    assert {
        "name": "source",
        "image": {"reference": "registry.example/models/llama:1", "pullPolicy": "IfNotPresent"},
    } in (spec["volumes"])
    assert "--model-path=/shoal/source" in spec["containers"][0]["args"]


def test_the_job_reads_what_the_stage_container_would_fetch_and_ends() -> None:
    given = model(source={"uri": "hf://org/model", "secretRef": {"name": "hub"}})
    job = facts_job(given, CONFIG, keep_seconds=60)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert job["metadata"]["name"] == source_key(given)
    assert job["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert {k: v for k, v in job["spec"].items() if k != "template"} == snapshot(
        {"backoffLimit": 2, "activeDeadlineSeconds": 900, "ttlSecondsAfterFinished": 60}
    )
    staging = stage(pod(source={"uri": "hf://org/model", "secretRef": {"name": "hub"}}, facts=None))
    assert container["env"] == staging["env"]
    assert {"name": "source-secret", "mountPath": "/shoal/source-secret", "readOnly": True} in container["volumeMounts"]
    assert container["command"] == ["shoal", "agent", "facts"]
    assert not any("nvidia.com/gpu" in amounts for amounts in container["resources"].values())
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    # Not an engine: it is in nobody's count of replicas, and no policy or budget selects it.
    assert job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "facts"


def test_a_bucket_is_read_as_the_service_account_by_the_job_and_by_the_replicas() -> None:
    named = {"serviceAccountName": "weights"}
    bucket = {"uri": "az://models/llama"}
    job = facts_job(model(source=bucket, pod=named), CONFIG, keep_seconds=60)
    reading = job["spec"]["template"]
    replica = pod(source=bucket, pod=named)
    for spec in (reading["spec"], replica):
        assert spec["serviceAccountName"] == "weights"
        assert spec["automountServiceAccountToken"] is False
    assert environment(reading["spec"]["containers"][0])["SHOAL_STAGE_IDENTITY"] == "true"
    assert environment(stage(replica))["SHOAL_STAGE_IDENTITY"] == "true"
    assert reading["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    # Read as another one, it may not be readable.
    assert source_key(model(source=bucket, pod=named)) != source_key(model(source=bucket))


def test_a_source_that_knows_no_identity_is_read_as_ever() -> None:
    hub = {"uri": "hf://org/model"}
    named = model(source=hub, pod={"serviceAccountName": "weights"})
    assert source_key(named) == source_key(model(source=hub))
    reading = facts_job(named, CONFIG, keep_seconds=60)["spec"]["template"]["spec"]
    assert "serviceAccountName" not in reading
    assert "SHOAL_STAGE_IDENTITY" not in environment(reading["containers"][0])


def test_a_volumes_job_goes_wherever_the_volume_is() -> None:
    spec = facts_job(model(source={"uri": "pvc://weights/llama"}), CONFIG, keep_seconds=60)["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert {"name": "source", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in spec["volumes"]
