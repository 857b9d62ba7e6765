"""A Model becomes Deployments, pods and a status; what is asked of the operator by people is asked here."""

import asyncio
import json

import pytest

from shoal.api import keys, names
from shoal.api.meta import JsonObject
from shoal.api.schema import KINDS
from shoal.kube.client import KubeClient
from shoal.kube.resources import (
    DEPLOYMENTS,
    EVENTS,
    GPUCLASSES,
    MODELS,
    NETWORKPOLICIES,
    PDBS,
    PODS,
    SECRETS,
    TENANTS,
)
from tests.support.controlplane import Fleet, add_node, install_crds, remove_crds
from tests.support.operators import (
    condition,
    eventually,
    gpu_class,
    model,
    model_with,
    running_operator,
    writes,
    writes_at_rest,
)
from tests.support.waiting import until_async

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]


async def test_a_model_runs_on_the_cheapest_class_and_leaves_nothing_behind(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        ready = await model_with(client, ns, "chat", "Ready", "True")
        assert ready["status"]["observedGeneration"] == 1
        assert ready["status"]["servedNames"] == ["chat"]
        assert ready["status"]["replicas"] == {"desired": 1, "ready": 1}
        assert [v["class"] for v in ready["status"]["variants"] if v["desired"]] == ["l4"]
        assert {c["type"] for c in ready["status"]["conditions"]} == {"Accepted", "Placed", "Available", "Ready"}
        said = fleet.plane.run_kubectl("wait", "--for=condition=Ready", "--timeout=50s", f"-n={ns}", "model/chat")
        assert "condition met" in said
        counted = await eventually(
            lambda: client.get(GPUCLASSES, "l4"),
            lambda c: ((c.get("status") or {}).get("gpus") or {}).get("allocated") == 1,
        )
        assert counted["status"]["gpus"] == {
            "capacity": 2,
            "allocatable": 2,
            "allocated": 1,
            "free": 1,
            "largestFreeOnOneNode": 1,
        }
        await client.delete(MODELS, "chat", ns)
        for resource in (DEPLOYMENTS, PODS, PDBS, NETWORKPOLICIES, SECRETS):
            # The garbage collector looks for new kinds every 30 s.
            await eventually(
                lambda r=resource: fleet.all(r, namespace=ns),
                lambda left: not left,
                seconds=180,
                what=f"{resource.plural} gone",
            )


async def test_a_quiet_fleet_costs_no_writes(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with (
        await KubeClient.from_environment(kubeconfig=fleet.kubeconfig) as own,
        running_operator(own, fleet.kubeconfig) as operator,
    ):
        kept = {"minReplicas": 1}  # else the Model says in the end that the signals of its engines are stale
        await fleet.apply(model("chat", ns, scaling=kept))
        parallel = {"parallelism": {"tensor": 4}}
        await fleet.apply(model("code", ns, variants=[{"class": "h100"}], engine=parallel, scaling=kept))
        await fleet.apply(_tenant("acme", ns, "chat"))
        for name in ("chat", "code"):
            await model_with(client, ns, name, "Ready", "True")
        before = await writes_at_rest(own)
        await until_async(lambda: all(queue.idle() for queue in operator.queues))
        lines = len(fleet.plane.audited())
        operator._compare_all()  # what a resync does
        await asyncio.sleep(5)
        await until_async(lambda: all(queue.idle() for queue in operator.queues))
        assert writes(own) == before
        ours = [
            f"{e['verb']} {e['requestURI']}"
            for e in fleet.plane.audited()[lines:]
            if e.get("userAgent") == "shoal" and e["objectRef"]["resource"] != "leases"
        ]
        assert ours == []


async def test_what_is_edited_or_deleted_by_hand_is_put_right(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        kubectl = fleet.plane.run_kubectl
        kubectl("set", "image", f"-n={ns}", "deployment/chat-l4", "engine=evil:latest")
        kubectl("scale", f"-n={ns}", "deployment/chat-l4", "--replicas=2")

        def as_decided(found: JsonObject) -> bool:
            spec = found["spec"]
            engine = spec["template"]["spec"]["containers"][0]
            return engine["image"] == "lmsysorg/sglang:v0.5.23" and spec["replicas"] == 1

        await eventually(lambda: client.get(DEPLOYMENTS, "chat-l4", ns), as_decided)
        for resource, name in ((PDBS, "chat-engine"), (NETWORKPOLICIES, "chat-engine"), (DEPLOYMENTS, "chat-l4")):
            old = await client.get(resource, name, ns)
            kubectl("delete", resource.plural, f"-n={ns}", name)
            await eventually(
                lambda r=resource: fleet.all(r, namespace=ns),
                lambda found, uid=old["metadata"]["uid"]: [o["metadata"]["uid"] for o in found] not in ([], [uid]),
                what=f"{resource.kind} made again",
            )
        await model_with(client, ns, "chat", "Ready", "True")


async def test_every_field_has_one_writer(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
    objects = [await client.get(MODELS, "chat", ns), await client.get(GPUCLASSES, "l4")]
    for resource in (DEPLOYMENTS, PDBS, NETWORKPOLICIES, SECRETS):
        objects += await fleet.all(resource, namespace=ns)
    for obj in objects:
        owners: dict[str, set[str]] = {}
        for entry in obj["metadata"]["managedFields"]:
            for path in _paths(entry["fieldsV1"]):
                owners.setdefault(path, set()).add(entry["manager"])
        shared = {path: who for path, who in owners.items() if len(who) > 1}
        assert shared == {}, obj["kind"]
    deployment = next(o for o in objects if o["kind"] == "Deployment")
    managers = {e["manager"]: set(_paths(e["fieldsV1"])) for e in deployment["metadata"]["managedFields"]}
    assert managers["shoal-scaler"] == {"f:spec/f:replicas"}
    assert "f:spec/f:replicas" not in managers["shoal-model"]


async def test_gpus_are_not_promised_twice(fleet: Fleet) -> None:
    """Ten Models at once, two cheap GPUs: the others go where there is room, and nobody waits on a full class."""
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await asyncio.gather(*(fleet.apply(model(f"m{i}", ns)) for i in range(11)))
        await eventually(
            lambda: fleet.all(MODELS, namespace=ns),
            lambda found: sum(condition(m, "Ready").get("status") == "True" for m in found) == 10,
            what="ten of eleven Models ready",
        )
        deployments = await fleet.all(DEPLOYMENTS, namespace=ns)
        asked: dict[str, int] = {}
        for d in deployments:
            name = d["metadata"]["labels"][names.LABEL_GPU_CLASS]
            asked[name] = asked.get(name, 0) + d["spec"]["replicas"]
        assert asked == {"l4": 2, "h100": 8}
        left = [m for m in await fleet.all(MODELS, namespace=ns) if condition(m, "Ready")["status"] != "True"]
        waiting = left[0]["metadata"]["name"]
        full = "no room for a replica of 1 GPU: l4: 0 of 2 GPUs free; h100: 0 of 8 GPUs free"
        placed = await eventually(
            lambda: client.get(MODELS, waiting, ns), lambda m: condition(m, "Placed").get("message") == full
        )
        assert condition(placed, "Placed")["reason"] == "NoCapacity"
        assert condition(placed, "Ready")["message"] == full
        await add_node(client, "l4-1", {"nvidia.com/gpu.product": "L4"}, 2)
        await model_with(client, ns, waiting, "Ready", "True")


async def test_a_replica_of_an_autoscaled_class_is_a_pending_pod_that_brings_its_node(fleet: Fleet) -> None:
    """The part of Karpenter or Cluster Autoscaler, which need only an unschedulable pod, is played by the test."""
    client, ns = fleet.client, fleet.namespace
    cloud = gpu_class("cloud", "CLOUD", cost="0.10")
    cloud["spec"]["nodes"] = {"autoscaled": {"max": 1, "gpusPerNode": 2, "provisionSeconds": 60}}
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(cloud)
        await eventually(
            lambda: client.get(GPUCLASSES, "cloud"), lambda c: condition(c, "Ready").get("reason") == "Autoscaled"
        )
        on_cloud = [{"class": "cloud"}]
        await fleet.apply(model("chat", ns, variants=on_cloud))
        placed = await eventually(
            lambda: client.get(MODELS, "chat", ns), lambda m: "autoscaler" in condition(m, "Placed").get("message", "")
        )
        text = "1 on cloud, 1 GPU each; 1 on cloud waits for a node that an autoscaler adds"
        assert condition(placed, "Placed")["message"] == text
        [pod] = await eventually(
            lambda: fleet.all(PODS, namespace=ns),
            lambda pods: [condition(p, "PodScheduled").get("reason") for p in pods] == ["Unschedulable"],
        )
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        await asyncio.sleep(1.1)  # creation times have seconds
        await add_node(client, "cloud-1", {"nvidia.com/gpu.product": "CLOUD"}, 2)
        await model_with(client, ns, "chat", "Ready", "True")
        await eventually(
            lambda: client.get(GPUCLASSES, "cloud"),
            lambda c: c["status"].get("provisionSeconds", 0) >= 1,
            what="the class says how long its node took",
        )
        # The node has room for another one, and there is no further node.
        await fleet.apply(model("second", ns, variants=on_cloud))
        await model_with(client, ns, "second", "Ready", "True")
        await fleet.apply(model("third", ns, variants=on_cloud))
        third = await model_with(client, ns, "third", "Placed", "False", "NoCapacity")
        assert condition(third, "Placed")["message"] == "no room for a replica of 1 GPU: cloud: 0 of 2 GPUs free"


async def test_a_node_can_be_drained_while_the_model_scales_up(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace

    async def evicted(pod: JsonObject) -> bool:
        metadata = pod["metadata"]
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata["name"], "namespace": ns},
        }
        path = f"/api/v1/namespaces/{ns}/pods/{metadata['name']}/eviction"
        said = await asyncio.to_thread(
            fleet.plane.run_kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(eviction), check=False
        )
        return "Success" in said

    async with running_operator(client, fleet.kubeconfig):
        cloud = gpu_class("cloud", "CLOUD")
        cloud["spec"]["nodes"] = {"autoscaled": {"max": 4, "gpusPerNode": 2, "provisionSeconds": 600}}
        await fleet.apply(cloud)
        await add_node(client, "cloud-1", {"nvidia.com/gpu.product": "CLOUD"}, 2)
        on_cloud = [{"class": "cloud"}]
        await fleet.apply(model("chat", ns, variants=on_cloud, scaling={"minReplicas": 2}))

        async def replicas(**selected: str) -> list[JsonObject]:
            found = await fleet.all(PODS, namespace=ns, label_selector=f"{names.LABEL_GPU_CLASS}=cloud", **selected)
            return [p for p in found if "deletionTimestamp" not in p["metadata"]]

        def ready(pods: list[JsonObject]) -> list[JsonObject]:
            return [p for p in pods if condition(p, "Ready").get("status") == "True"]

        await eventually(replicas, lambda pods: len(ready(pods)) == 2)
        # For more there is no node yet.
        await fleet.apply(model("chat", ns, variants=on_cloud, scaling={"minReplicas": 5}))
        found = await eventually(replicas, lambda pods: len(pods) == 5)
        first, second = ready(found)
        await asyncio.to_thread(fleet.plane.run_kubectl, "cordon", "cloud-1")
        await eventually(lambda: evicted(first), bool, what="the first of two replicas evicted")
        assert not await evicted(second), "the only replica that is left"
        await add_node(client, "cloud-2", {"nvidia.com/gpu.product": "CLOUD"}, 2)
        await eventually(lambda: evicted(second), bool, what="the second evicted when another one is ready")


async def test_two_models_with_one_served_name(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("first", ns, servedNames=["llama"]))
        await model_with(client, ns, "first", "Ready", "True")
        await asyncio.sleep(1.1)  # creation times have seconds
        await fleet.apply(model("second", ns, servedNames=["llama", "second"]))
        second = await model_with(client, ns, "second", "Ready", "True")
        assert condition(second, "Accepted")["status"] == "True"
        assert condition(second, "Accepted")["reason"] == "NameClaimed"
        assert condition(second, "Accepted")["message"] == (
            f"for tenants that may use both, served name 'llama' belongs to the older Model {ns}/first; "
            f"'{ns}/second' always means this one"
        )
        assert second["status"]["servedNames"] == ["second"]
        await client.delete(MODELS, "first", ns)
        await model_with(client, ns, "second", "Accepted", "True", "Valid")


async def test_an_unknown_class_is_named_and_accepted_once_it_exists(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, variants=[{"class": "b200"}]))
        refused = await model_with(client, ns, "chat", "Accepted", "False", "ClassNotFound")
        assert condition(refused, "Ready")["message"] == (
            "spec.variants: there is no GPUClass 'b200'; there are: h100, l4"
        )
        assert condition(refused, "Stalled")["status"] == "True"
        assert await fleet.all(DEPLOYMENTS, namespace=ns) == []
        await fleet.apply(gpu_class("b200", "B200"))
        empty = await model_with(client, ns, "chat", "Placed", "False", "NoCapacity")
        assert condition(empty, "Ready")["message"] == (
            "no room for a replica of 1 GPU: b200: no node has the class's labels"
        )


async def test_arguments_that_a_version_does_not_have_are_refused(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        extra = ["--context-len=4096", "--no-such-thing"]
        await fleet.apply(model("chat", ns, engine={"extraArgs": extra}))
        refused = await model_with(client, ns, "chat", "Accepted", "False", "ArgumentsRefused")
        message = condition(refused, "Accepted")["message"]
        assert message.startswith("spec.engine.extraArgs: --context-len is an abbreviation of --context-length")
        assert "--no-such-thing" in message


async def test_a_missing_secret_is_named_and_found_when_it_comes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.controllers.model.controller.RECHECK_SECONDS", 0.5)
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        source = {"uri": "hf://meta-llama/Llama-3.1-8B", "secretRef": {"name": "hub"}}
        await fleet.apply(model("chat", ns, source=source))
        refused = await model_with(client, ns, "chat", "Accepted", "False", "SecretNotFound")
        assert condition(refused, "Accepted")["message"] == (
            f"spec.source.secretRef: there is no Secret {ns}/hub; create it with the key `token`"
        )
        fleet.plane.run_kubectl("create", "secret", "generic", "hub", f"-n={ns}", "--from-literal=token=t")
        await model_with(client, ns, "chat", "Ready", "True")


async def test_a_name_that_is_taken_is_left_alone(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    fleet.plane.run_kubectl("create", "deployment", "chat-l4", f"-n={ns}", "--image=other", "--replicas=0")
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        stuck = await model_with(client, ns, "chat", "Ready", "False", "NameTaken")
        assert condition(stuck, "Stalled")["message"] == (
            f"Deployment {ns}/chat-l4 exists and does not belong to this Model: rename or delete one of them"
        )
    theirs = await client.get(DEPLOYMENTS, "chat-l4", ns)
    assert theirs["spec"]["template"]["spec"]["containers"][0]["image"] == "other"
    await client.delete(DEPLOYMENTS, "chat-l4", ns)


async def test_a_paused_model_is_decided_and_not_applied(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, annotations={names.ANNOTATION_PAUSED: "true"}))
        paused = await model_with(client, ns, "chat", "Placed", "True")
        assert condition(paused, "Ready")["reason"] == "Paused"
        assert condition(paused, "Ready")["message"].startswith("annotation shoal.dev/paused is set: decided, nothing")
        assert await fleet.all(DEPLOYMENTS, namespace=ns) == []
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")


async def test_a_variant_that_is_no_longer_listed_goes(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, variants=[{"class": "l4"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}]))
        await eventually(
            lambda: fleet.all(DEPLOYMENTS, namespace=ns),
            lambda found: [d["metadata"]["name"] for d in found] == ["chat-h100"],
        )
        await model_with(client, ns, "chat", "Ready", "True")


async def test_what_the_stage_container_said_is_what_the_model_says(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    fleet.kubelet.hold = True
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        (pod,) = await eventually(lambda: _engine_pods(fleet), lambda found: found and found[0]["spec"].get("nodeName"))
        said = {"reason": "DigestMismatch", "message": "the archive's SHA-256 is sha256:11, not sha256:22"}
        ended = {"exitCode": 1, "message": json.dumps(said), "reason": "Error"}
        status = {
            "name": "stage",
            "image": "shoal:test",
            "imageID": "",
            "ready": False,
            "restartCount": 2,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}},
            "lastState": {"terminated": ended},
        }
        await client.merge_patch(
            PODS,
            pod["metadata"]["name"],
            ns,
            {"status": {"phase": "Pending", "initContainerStatuses": [status]}},
            manager="kubelet",
            subresource="status",
        )
        failed = await model_with(client, ns, "chat", "Ready", "False", "DigestMismatch")
        assert condition(failed, "Ready")["message"] == (
            f"the archive's SHA-256 is sha256:11, not sha256:22 (pod {ns}/{pod['metadata']['name']}, attempt 3)"
        )
        events = await eventually(
            lambda: fleet.all(EVENTS, namespace=ns),
            lambda found: any(e.get("reason") == "DigestMismatch" for e in found),
        )
        assert any(e["regarding"]["kind"] == "Model" for e in events)


async def test_quota_that_refuses_the_pods_is_told(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await _forbid(fleet, "requests.nvidia.com/gpu")
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        refused = await model_with(client, ns, "chat", "Ready", "False", "ResourceQuotaExceeded")
        assert "ResourceQuota none has no room" in condition(refused, "Ready")["message"]


async def test_quota_that_refuses_the_job_says_where_to_look(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await _forbid(fleet, "pods")
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        waits = await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: "no pod yet" in condition(m, "Placed").get("message", ""),
            seconds=120,
        )
        assert condition(waits, "Ready")["reason"] == "ReadingArtifact"
        assert f"see kubectl describe job -n {ns} facts-" in condition(waits, "Ready")["message"]


async def test_a_service_account_that_is_not_there_is_told(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    bucket = {"source": {"uri": "s3://weights/m"}, "pod": {"serviceAccountName": "nobody"}}
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, **bucket))
        await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: f"ServiceAccount nobody in namespace {ns}?" in condition(m, "Placed").get("message", ""),
            seconds=120,
        )
        fleet.plane.run_kubectl("create", "serviceaccount", "nobody", f"-n={ns}")
        pods = await eventually(
            lambda: fleet.all(PODS, namespace=ns),
            lambda found: any(p["spec"]["serviceAccountName"] == "nobody" for p in found),
            seconds=180,  # the Job controller waits twice as long each time, a minute at most
        )
        assert not any("projected" in v for p in pods for v in p["spec"].get("volumes", []))


async def test_a_new_install_key_rolls_the_pods_and_the_old_one_goes_with_the_last(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controllers.installkey.READ_SECONDS", 0.3)
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        secret = await client.get(SECRETS, names.ROOT_KEY_SECRET, "shoal-system")
        (old,) = [s["metadata"]["name"] for s in await fleet.all(SECRETS, namespace=ns)]
        fresh = b"f" * 64
        import base64

        data = {"current": base64.b64encode(fresh).decode(), "previous": secret["data"]["current"]}
        await client.merge_patch(SECRETS, names.ROOT_KEY_SECRET, "shoal-system", {"data": data}, manager="person")
        new = f"chat-keys-{keys.fingerprint(fresh)}"
        await eventually(
            lambda: fleet.all(SECRETS, namespace=ns),
            lambda found: [s["metadata"]["name"] for s in found] == [new],
            what=f"{old} replaced by {new}",
        )
        (pod,) = await eventually(lambda: _engine_pods(fleet), lambda found: len(found) == 1)
        assert pod["metadata"]["annotations"][names.ANNOTATION_INSTALL_KEY] == keys.fingerprint(fresh)
        made = (await client.get(SECRETS, new, ns))["data"]["agent.json"]
        uid = (await client.get(MODELS, "chat", ns))["metadata"]["uid"]
        assert json.loads(base64.b64decode(made))["engine"] == keys.derive(fresh, "gateway", uid)


async def test_tenants_say_whether_they_can_be_used(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(_tenant("acme", ns, "chat"))

        async def ready(name: str, reason: str) -> str:
            found = await eventually(
                lambda: client.get(TENANTS, name), lambda t: condition(t, "Ready").get("reason") == reason
            )
            return condition(found, "Ready")["message"]

        assert await ready("acme", "ModelNotFound") == f"there is no Model {ns}/chat; the others can be used"
        await fleet.apply(model("chat", ns))
        assert await ready("acme", "Active") == "1 key, 1 models"
        await asyncio.sleep(1.1)
        await fleet.apply(_tenant("thief", ns, "chat"))
        assert await ready("thief", "KeyClaimed") == "key 'k' belongs to the older Tenant 'acme'"
        await client.merge_patch(TENANTS, "acme", None, {"spec": {"suspended": True}}, manager="person")
        await ready("acme", "Suspended")


async def test_the_operator_waits_for_crds_and_says_so(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await remove_crds(client, "shoal.dev", *(kind.crd_name() for kind in KINDS))
    async with running_operator(client, fleet.kubeconfig) as operator:
        await until_async(lambda: operator.unready() != ["not every kind was listed yet"])
        assert operator.unready() == [
            "CustomResourceDefinitions are missing: gpuclasses.shoal.dev, loraadapters.shoal.dev, lorapools.shoal.dev, "
            "modelroutes.shoal.dev, models.shoal.dev, tenants.shoal.dev; install the chart shoal-crds"
        ]
        assert operator.unhealthy() == []
        await install_crds(client)
        await fleet.apply(gpu_class("l4", "L4"))
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True", seconds=120)
        assert operator.unready() == []


async def test_the_api_server_restarts_under_the_operator(fleet: Fleet) -> None:
    client, ns, plane = fleet.client, fleet.namespace, fleet.plane
    async with running_operator(client, fleet.kubeconfig) as operator:
        await fleet.apply(model("before", ns))
        await model_with(client, ns, "before", "Ready", "True")
        await asyncio.to_thread(plane.kill_api_server)
        try:
            await asyncio.sleep(3)
            assert operator.unhealthy() == []
            assert operator.world.models.get(f"{ns}/before") is not None
        finally:
            await asyncio.to_thread(plane.start_api_server)
        await fleet.apply(model("after", ns))
        await model_with(client, ns, "after", "Ready", "True", seconds=180)
        await client.delete(MODELS, "before", ns)
        await eventually(
            lambda: fleet.all(DEPLOYMENTS, namespace=ns),
            lambda found: [d["metadata"]["name"] for d in found] == ["after-l4"],
            seconds=180,
        )


async def _engine_pods(fleet: Fleet) -> list[JsonObject]:
    pods = await fleet.all(PODS, namespace=fleet.namespace)
    return [p for p in pods if p["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE]


async def _forbid(fleet: Fleet, resource: str) -> None:
    """A quota of none, once the API server counts by it: before that it refuses in other words, or not at all."""
    fleet.plane.run_kubectl("create", "quota", "none", f"-n={fleet.namespace}", f"--hard={resource}=0")
    said = ("get", "quota", "none", f"-n={fleet.namespace}", "-o", "jsonpath={.status.hard}")
    await eventually(lambda: asyncio.to_thread(fleet.plane.run_kubectl, *said), bool, what="the quota's own count")
    await asyncio.sleep(1)  # until it is in force nothing tells


def _tenant(name: str, namespace: str, model_name: str) -> JsonObject:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": {
            "keys": [{"name": "k", "sha256": keys.hash_api_key("sk-test")}],
            "models": [{"namespace": namespace, "name": model_name}],
        },
    }


def _paths(fields: JsonObject, prefix: str = "") -> list[str]:
    """Leaves of a fieldsV1 tree."""
    found: list[str] = []
    for name, below in fields.items():
        path = f"{prefix}/{name}" if prefix else name
        inner = {k: v for k, v in below.items() if k != "."}
        found += _paths(inner, path) if inner else [path]
    return found


async def test_kubectl_scale_sets_the_lower_limit(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        fleet.plane.run_kubectl("scale", "model/chat", "--replicas=2", f"-n={ns}")
        grown = await eventually(
            lambda: client.get(MODELS, "chat", ns), lambda m: m["status"]["replicas"] == {"desired": 2, "ready": 2}
        )
        assert grown["spec"]["scaling"] == {"minReplicas": 2}
        said = fleet.plane.run_kubectl("scale", "model/chat", "--replicas=2000", f"-n={ns}", check=False)
        assert "less than or equal to 1000" in said
        said = fleet.plane.run_kubectl(
            "scale", "model/chat", "--replicas=1", "--current-replicas=5", f"-n={ns}", check=False
        )
        assert "Expected replicas to be 5, was 2" in said
