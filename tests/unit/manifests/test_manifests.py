"""The objects of a Model: their contract with the agent, the engine and the cluster."""

import base64
import json
from ipaddress import ip_address, ip_network

import pytest
import yaml
from inline_snapshot import snapshot

from shoal.api import keys, names
from shoal.api.config import MTLS, CABundle, OperatorConfig, Pods, Proxy, Sources, TransportConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model
from shoal.core import children
from shoal.kube.projections import pod_requests
from shoal.manifests import model as manifests
from shoal.manifests.facts import facts_job
from shoal.manifests.pod import HAND_ON, drain_script, start_script
from shoal.manifests.shape import VariantShape
from tests.support.operators import CONFIG

CLASS = GPUClass.model_validate(
    {
        "metadata": {"name": "l4"},
        "spec": {
            "nodeSelector": {"nvidia.com/gpu.product": "L4"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "memoryPerGPU": "24Gi",
        },
    }
)


def shape(config: OperatorConfig = CONFIG, *, gpus: int = 1, **spec) -> VariantShape:
    model = Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u-1", "generation": 1},
            "spec": {"source": {"uri": "hf://org/model"}, **spec},
        }
    )
    return VariantShape(model, CLASS, gpus, "0.5.23", config, "abcd1234")


def pod_spec(given: VariantShape) -> dict:
    return manifests.deployment(given, surge=False)["spec"]["template"]["spec"]


def containers(given: VariantShape) -> dict[str, dict]:
    spec = pod_spec(given)
    return {c["name"]: c for c in spec["initContainers"] + spec["containers"]}


def test_the_deployment_is_the_same_every_time_and_keeps_replicas_to_others() -> None:
    first, second = manifests.deployment(shape(), surge=False), manifests.deployment(shape(), surge=False)
    assert json.dumps(first) == json.dumps(second)
    assert "replicas" not in first["spec"]
    assert manifests.deployment(shape(), surge=False, replicas=0)["spec"]["replicas"] == 0
    assert first["metadata"] == snapshot(
        {
            "name": "chat-l4",
            "namespace": "ns",
            "labels": {
                "app.kubernetes.io/name": "shoal-engine",
                "app.kubernetes.io/instance": "chat",
                "app.kubernetes.io/component": "engine",
                "app.kubernetes.io/part-of": "shoal",
                "app.kubernetes.io/managed-by": "shoal",
                "shoal.dev/model": "chat",
                "shoal.dev/model-uid": "u-1",
                "shoal.dev/gpu-class": "l4",
            },
            "ownerReferences": [
                {
                    "apiVersion": "shoal.dev/v1alpha1",
                    "kind": "Model",
                    "name": "chat",
                    "uid": "u-1",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        }
    )
    assert first["spec"]["selector"] == snapshot(
        {
            "matchLabels": {
                "app.kubernetes.io/component": "engine",
                "shoal.dev/model-uid": "u-1",
                "shoal.dev/gpu-class": "l4",
            }
        }
    )


def test_a_rollout_surges_only_where_there_is_room() -> None:
    def rolling(*, surge: bool) -> dict:
        return manifests.deployment(shape(), surge=surge)["spec"]["strategy"]["rollingUpdate"]

    assert rolling(surge=True) == {"maxSurge": 1, "maxUnavailable": 0}
    assert rolling(surge=False) == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize("read_only", [True, False])
def test_containers_write_to_volumes_alone(read_only: bool) -> None:
    """An engine image that writes elsewhere has a way out; Shoal's own image needs none."""
    config = CONFIG.model_copy(update={"pods": Pods(read_only_root=read_only)})
    given = shape(config)
    pods = [pod_spec(given), facts_job(given.model, config, keep_seconds=60)["spec"]["template"]["spec"]]
    for spec in pods:
        writable = {v["name"] for v in spec["volumes"] if "emptyDir" in v}
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            engine = container["name"] == names.CONTAINER_ENGINE
            assert container["securityContext"].get("readOnlyRootFilesystem", False) == (read_only or not engine)
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"] if not m.get("readOnly")}
            assert mounts["/tmp"] in writable
            home = next((e["value"] for e in container.get("env", ()) if e["name"] == "HOME"), "/tmp")
            assert mounts[home] in writable


def test_the_order_in_the_pod_is_agent_stage_engine() -> None:
    spec = pod_spec(shape())
    assert [(c["name"], c.get("restartPolicy")) for c in spec["initContainers"]] == [
        ("agent", "Always"),
        ("stage", None),
    ]
    assert "startupProbe" not in spec["initContainers"][1]
    assert [c["name"] for c in spec["containers"]] == ["engine"]


def test_the_engine_container() -> None:
    assert containers(shape(gpus=2))["engine"] == snapshot(
        {
            "name": "engine",
            "image": "lmsysorg/sglang:v0.5.23",
            "imagePullPolicy": "IfNotPresent",
            "command": [
                "sh",
                "-c",
                start_script("/shoal/run/boot", "/shoal/run/stalled", "/shoal/run/drain", "/shoal/run/draining"),
                "engine",
                "python3",
                "-m",
                "sglang.launch_server",
            ],
            "args": [
                "--model-path=/shoal/models/model",
                "--served-model-name=ns/chat",
                "--host=0.0.0.0",
                "--port=30000",
                "--tp-size=2",
                "--config",
                "/shoal/keys/engine.yaml",
                "--enable-metrics",
                "--enable-cache-report",
            ],
            "env": [
                {"name": "HOME", "value": "/shoal/home"},
                {"name": "SGLANG_SANITIZE_NAN_LOGITS", "value": "1"},
            ],
            "ports": [{"name": "engine", "containerPort": 30000, "protocol": "TCP"}],
            "startupProbe": {
                "httpGet": {"path": "/ready", "port": 30000, "scheme": "HTTP"},
                "periodSeconds": 2,
                "timeoutSeconds": 5,
                "failureThreshold": 1800,
            },
            "readinessProbe": {
                "httpGet": {"path": "/ready", "port": 30000, "scheme": "HTTP"},
                "periodSeconds": 5,
                "timeoutSeconds": 5,
                "failureThreshold": 3,
            },
            "livenessProbe": {
                "exec": {"command": ["test", "!", "-e", "/shoal/run/stalled"]},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
                "failureThreshold": 2,
                "terminationGracePeriodSeconds": 30,
            },
            "lifecycle": {
                "preStop": {"exec": {"command": ["sh", "-c", drain_script("/shoal/run/drain", "/shoal/run/draining")]}}
            },
            "resources": {
                "requests": {"cpu": "2", "memory": "2Gi", "nvidia.com/gpu": "2"},
                "limits": {"memory": "2Gi", "nvidia.com/gpu": "2"},
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "models", "mountPath": "/shoal/models", "readOnly": True},
                {"name": "run", "mountPath": "/shoal/run"},
                {"name": "home", "mountPath": "/shoal/home"},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": "engine-key", "mountPath": "/shoal/keys", "readOnly": True},
            ],
        }
    )


def test_the_agent_container() -> None:
    assert containers(shape())["agent"] == snapshot(
        {
            "name": "agent",
            "image": "shoal:test",
            "imagePullPolicy": "IfNotPresent",
            "restartPolicy": "Always",
            "command": ["sh", "-c", HAND_ON, "agent", "shoal", "agent", "serve"],
            "ports": [{"name": "agent", "containerPort": 8400, "protocol": "TCP"}],
            "env": [
                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
                {
                    "name": "POD_NAMESPACE",
                    "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}},
                },
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
                {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}},
                {"name": "SHOAL_AGENT_DRAIN_SECONDS", "value": "900"},
                {"name": "SHOAL_AGENT_STALL_SECONDS", "value": "180"},
            ],
            "startupProbe": {
                "httpGet": {"path": "/healthz", "port": 8400, "scheme": "HTTP"},
                "periodSeconds": 1,
                "timeoutSeconds": 5,
                "failureThreshold": 60,
            },
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", "1"]}}},
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "128Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "run", "mountPath": "/shoal/run"},
                {"name": "agent-tmp", "mountPath": "/tmp"},
                {"name": "agent-key", "mountPath": "/shoal/keys", "readOnly": True},
            ],
        }
    )


def test_the_stage_container_gets_what_fetching_needs_and_no_engine_key() -> None:
    config = CONFIG.model_copy(
        update={
            "hub_endpoint": "https://hub.example",
            "proxy": Proxy(https="http://proxy:3128", no_proxy=".svc"),
            "ca_bundle": CABundle(config_map="corporate-ca"),
        }
    )
    source = {"uri": "hf://org/model", "secretRef": {"name": "hub"}}
    stage = containers(shape(config, source=source))["stage"]
    assert {e["name"]: e["value"] for e in stage["env"]} == snapshot(
        {
            "SHOAL_STAGE_URI": "hf://org/model",
            "HOME": "/shoal/home",
            "HF_ENDPOINT": "https://hub.example",
            "HTTPS_PROXY": "http://proxy:3128",
            "NO_PROXY": ".svc",
            "SSL_CERT_FILE": "/shoal/ca/ca.crt",
        }
    )
    assert {m["mountPath"]: m.get("readOnly", False) for m in stage["volumeMounts"]} == snapshot(
        {
            "/shoal/models": False,
            "/shoal/run": False,
            "/shoal/home": False,
            "/tmp": False,
            "/shoal/source-secret": True,
            "/shoal/ca": True,
        }
    )
    assert names.KEYS_DIR not in {m["mountPath"] for m in stage["volumeMounts"]}


def test_a_volume_source_is_mounted_where_the_engine_reads_it() -> None:
    found = containers(shape(source={"uri": "pvc://weights/llama"}))
    assert "--model-path=/shoal/source/llama" in found["engine"]["args"]
    for name in ("stage", "engine"):
        mounts = {m["mountPath"]: m for m in found[name]["volumeMounts"]}
        assert mounts[names.SOURCE_DIR]["readOnly"]
    volumes = {v["name"]: v for v in pod_spec(shape(source={"uri": "pvc://weights/llama"}))["volumes"]}
    assert volumes["source"]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}


def test_pods_keep_to_the_restricted_standard() -> None:
    spec = pod_spec(shape())
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == snapshot(
        {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    )
    for container in spec["initContainers"] + spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    assert not any("hostPath" in volume for volume in spec["volumes"])
    root = CONFIG.model_copy(update={"pods": Pods(run_as_root=True)})
    assert "runAsUser" not in pod_spec(shape(root))["securityContext"]


def test_the_pod_asks_for_the_gpus_of_its_parallelism_once() -> None:
    assert pod_requests(pod_spec(shape(gpus=4))) == {"nvidia.com/gpu": 4}


@pytest.mark.parametrize(
    ("own", "resources"),
    [
        (
            {},
            {
                "requests": {"cpu": "2", "memory": "2Gi", "nvidia.com/gpu": "2"},
                "limits": {"memory": "2Gi", "nvidia.com/gpu": "2"},
            },
        ),
        (
            {"requests": {"cpu": "1500m", "memory": "8192Mi"}},
            {
                "requests": {"cpu": "1500m", "memory": "8Gi", "nvidia.com/gpu": "2"},
                "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"},
            },
        ),
        (
            {"limits": {"memory": "1Gi"}},
            {
                "requests": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "2"},
                "limits": {"memory": "1Gi", "nvidia.com/gpu": "2"},
            },
        ),
    ],
)
def test_a_models_own_resources_win_and_never_contradict_each_other(own: dict, resources: dict) -> None:
    assert containers(shape(gpus=2, pod={"resources": own}))["engine"]["resources"] == resources


def test_a_models_own_image_and_environment() -> None:
    found = containers(
        shape(engine={"image": "mine:1", "version": "0.5.23"}, pod={"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]})
    )
    assert found["engine"]["image"] == "mine:1"
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in found["engine"]["env"]


def test_each_side_gets_its_keys_and_only_those() -> None:
    install = b"k" * 64
    secret = manifests.keys_secret(shape().model, keys.InstallKey(install))
    assert secret["immutable"] is True
    assert secret["metadata"]["name"] == f"chat-keys-{keys.fingerprint(install)}"
    engine = yaml.safe_load(base64.b64decode(secret["data"]["engine.yaml"]))
    agent = keys.AgentKeys.model_validate_json(base64.b64decode(secret["data"]["agent.json"]))
    assert engine == {
        "api-key": keys.derive(install, "gateway", "u-1"),
        "admin-api-key": keys.derive(install, "admin", "u-1"),
    }
    assert (agent.engine, agent.admin) == (engine["api-key"], engine["admin-api-key"])
    assert set(agent.callers) == {"gateway", "operator", "ledger"}
    volumes = {v["name"]: v["secret"]["items"] for v in pod_spec(shape())["volumes"] if "secret" in v}
    assert volumes == {
        "engine-key": [{"key": "engine.yaml", "path": "engine.yaml"}],
        "agent-key": [{"key": "agent.json", "path": "agent.json"}],
    }


def test_who_may_reach_the_pods() -> None:
    assert manifests.network_policy(shape().model, CONFIG, "shoal-system")["spec"] == snapshot(
        {
            "podSelector": {
                "matchLabels": {"shoal.dev/model": "chat", "app.kubernetes.io/managed-by": "shoal"},
                "matchExpressions": [
                    {
                        "key": "app.kubernetes.io/component",
                        "operator": "In",
                        "values": ["engine", "facts", "adapter-facts", "prefetch"],
                    }
                ],
            },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "ports": [{"protocol": "TCP", "port": 30000}, {"protocol": "TCP", "port": 30443}],
                    "from": [
                        {
                            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shoal-system"}},
                            "podSelector": {
                                "matchLabels": {
                                    "app.kubernetes.io/component": "gateway",
                                    "app.kubernetes.io/part-of": "shoal",
                                }
                            },
                        }
                    ],
                },
                {
                    "ports": [{"protocol": "TCP", "port": 8400}, {"protocol": "TCP", "port": 8443}],
                    "from": [
                        {
                            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shoal-system"}},
                            "podSelector": {
                                "matchLabels": {
                                    "app.kubernetes.io/component": "gateway",
                                    "app.kubernetes.io/part-of": "shoal",
                                }
                            },
                        },
                        {
                            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shoal-system"}},
                            "podSelector": {
                                "matchLabels": {
                                    "app.kubernetes.io/component": "operator",
                                    "app.kubernetes.io/part-of": "shoal",
                                }
                            },
                        },
                        {
                            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shoal-system"}},
                            "podSelector": {
                                "matchLabels": {
                                    "app.kubernetes.io/component": "ledger",
                                    "app.kubernetes.io/part-of": "shoal",
                                }
                            },
                        },
                    ],
                },
            ],
            "egress": [
                {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
                {
                    "ports": [{"protocol": "TCP", "port": 443}],
                    "to": [
                        {
                            "ipBlock": {
                                "cidr": "0.0.0.0/0",
                                "except": [
                                    "169.254.0.0/16",
                                    "168.63.129.16/32",
                                    "100.100.100.200/32",
                                    "192.0.0.192/32",
                                ],
                            }
                        },
                        {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::/64", "fd20:ce::/64"]}},
                        {"namespaceSelector": {}},
                    ],
                },
            ],
        }
    )
    config = CONFIG.model_copy(update={"pods": Pods(scraper_namespaces=("monitoring",))})
    rules = manifests.network_policy(shape().model, config, "shoal-system")["spec"]["ingress"]
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert all(scraper in rule["from"] for rule in rules)
    # Scrapers do not shut out who calls agents: the ledger reads what engines counted.
    (agent,) = [rule["from"] for rule in rules if rule["ports"][0]["port"] == names.AGENT_PORT]
    ours = {p["podSelector"]["matchLabels"][names.LABEL_COMPONENT] for p in agent if "podSelector" in p}
    assert ours == {"gateway", "operator", "ledger"}


def test_a_switch_of_mutual_tls_closes_no_port_of_pods_that_are_not_replaced_yet() -> None:
    pods = Pods(scraper_namespaces=("monitoring",))
    off, on = (
        CONFIG.model_copy(update={"transport": TransportConfig(mtls=MTLS(enabled=enabled)), "pods": pods})
        for enabled in (False, True)
    )
    policies = [manifests.network_policy(shape().model, config, "shoal-system") for config in (off, on)]
    assert policies[0] == policies[1]
    open_to_somebody = {port["port"] for rule in policies[0]["spec"]["ingress"] for port in rule["ports"]}
    assert open_to_somebody == {30000, 30001, 30443, 8400, 8443}


def test_the_pods_and_the_jobs_of_a_model_reach_sources_and_nothing_of_the_node() -> None:
    config = CONFIG.model_copy(
        update={
            "sources": Sources(ports=(443, 9000)),
            "hub_endpoint": "http://hub.example:8081",
            "proxy": Proxy(https="http://proxy.example:3128"),
        }
    )
    spec = manifests.network_policy(shape().model, config, "shoal-system")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (components,) = spec["podSelector"]["matchExpressions"]
    assert components["values"] == ["engine", "facts", "adapter-facts", "prefetch"]
    names_, sources = spec["egress"]
    assert {(p["protocol"], p["port"]) for p in names_["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert {p["port"] for p in sources["ports"]} == {443, 3128, 8081, 9000}
    blocks = {peer["ipBlock"]["cidr"]: peer["ipBlock"]["except"] for peer in sources["to"] if "ipBlock" in peer}
    for network, address in (("0.0.0.0/0", "169.254.169.254"), ("::/0", "fd00:ec2::254"), ("::/0", "fe80::1")):
        assert any(ip_address(address) in ip_network(never) for never in blocks[network])


def test_a_model_with_a_cloud_s_identity_may_ask_the_node_who_it_is() -> None:
    rules = manifests.network_policy(
        shape(source={"uri": "s3://weights/m"}, pod={"serviceAccountName": "reader"}).model, CONFIG, "shoal-system"
    )["spec"]["egress"]
    asked = {(peer["ipBlock"]["cidr"], rule["ports"][0]["port"]) for rule in rules[2:] for peer in rule["to"]}
    assert ("169.254.170.23/32", 80) in asked
    assert ("169.254.169.252/32", 988) in asked


def test_one_replica_at_a_time_may_be_disrupted() -> None:
    budget = manifests.disruption_budget(shape().model, 2)
    assert budget["spec"] == snapshot(
        {
            "minAvailable": 2,
            "selector": {"matchLabels": {"app.kubernetes.io/component": "engine", "shoal.dev/model-uid": "u-1"}},
        }
    )


def test_a_budget_says_what_it_would_be_without_the_wait_for_another_replica() -> None:
    raised = manifests.disruption_budget(shape().model, 0, waits=True)
    assert raised["spec"]["minAvailable"] == 1
    assert manifests.ready_min_available(raised) == 0
    assert manifests.ready_min_available(manifests.disruption_budget(shape().model, 2, waits=True)) == 2


@pytest.mark.parametrize("told", ["", "-1", "one", "9" * 5000, None])
def test_a_budget_that_says_nothing_readable_of_it_is_taken_as_it_stands(told: str | None) -> None:
    """One of an earlier version, or one that was edited."""
    budget = manifests.disruption_budget(shape().model, 2)
    budget["metadata"]["annotations"] = None if told is None else {names.ANNOTATION_MIN_AVAILABLE: told}
    assert manifests.ready_min_available(budget) == 2
    budget["spec"]["minAvailable"] = "50%"
    assert manifests.ready_min_available(budget) is None


def test_long_names_stay_within_a_label_and_apart() -> None:
    one, two = children.deployment("m" * 60, "h100-80gb"), children.deployment("m" * 60, "l40s-48gb")
    assert one != two
    assert len(one) <= 52
    assert children.deployment("chat", "h100.80gb") == "chat-h100-80gb"
