"""The charts, rendered by the real helm: what they contain, what they refuse, and whether it agrees with the code."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api import names, permissions
from shoal.api.config import OperatorConfig
from shoal.cache.settings import CacheSettings
from shoal.gateway import mediafetch
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.settings import GatewaySettings
from tests.support.charts import CHART, CRDS, EVERYTHING, ROOT, SETS, SMALL, helm, rendered

GOLDEN = Path(__file__).with_name("golden")


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod_spec(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    kind = "Deployment" if component == "operator" else "StatefulSet"
    return one(objects, kind, f"shoal-{component}")["spec"]["template"]["spec"]


def config(objects: list[dict[str, Any]]) -> OperatorConfig:
    text = one(objects, "ConfigMap", "shoal-operator")["data"]["config.yaml"]
    return OperatorConfig.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("chart", [CHART, CRDS], ids=lambda c: c.name)
def test_helm_lint(chart: Path) -> None:
    done = helm("lint", "--strict", str(chart))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SETS)
def test_rendering_is_what_was_reviewed(name: str) -> None:
    """Golden files: a change of the chart shows in the diff as what reaches the cluster. Write them anew with
    `SHOAL_WRITE_GOLDEN=1 pytest tests/charts`."""
    text = helm("template", "shoal", str(CHART), "--namespace", "shoal-system", values=SETS[name]).stdout
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("SHOAL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize(("timeout", "timeouts"), [(None, "0s"), ("30m", "30m"), ("", None)])
def test_a_route_of_the_gateway_api_ends_no_long_request(timeout: str | None, timeouts: str | None) -> None:
    route: dict[str, Any] = {"enabled": True, "parentRefs": [{"name": "public"}]}
    if timeout is not None:
        route["requestTimeout"] = timeout
    (rule,) = one(rendered({"gateway": {"httpRoute": route}}), "HTTPRoute", "shoal-gateway")["spec"]["rules"]
    assert rule.get("timeouts") == (None if timeouts is None else {"request": timeouts})


@pytest.mark.parametrize("name", SETS)
def test_two_renderings_are_the_same_text(name: str) -> None:
    """Otherwise GitOps tools report a change for ever."""
    first, second = (helm("template", "shoal", str(CHART), values=SETS[name]).stdout for _ in range(2))
    assert first
    assert first == second


@pytest.mark.parametrize("name", SETS)
def test_claim_templates_are_as_the_api_server_stores_them(name: str) -> None:
    """It adds the kind, and a list is compared as a whole: Argo CD with ServerSideApply reports a change for ever."""
    sets = [o for o in rendered(SETS[name]) if o["kind"] == "StatefulSet"]
    claims = [claim for one in sets for claim in one["spec"].get("volumeClaimTemplates", [])]
    assert {(claim.get("apiVersion"), claim.get("kind")) for claim in claims} <= {("v1", "PersistentVolumeClaim")}
    assert bool(claims) == (name != "small")


def test_the_notes_say_before_an_uninstall_that_models_keep_their_pods() -> None:
    done = helm("install", "shoal", str(CHART), "--namespace", "shoal-system", "--dry-run=client", values={})
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    (line,) = [line.strip() for line in notes.splitlines() if "kubectl delete" in line]
    install = (ROOT / "docs" / "install.md").read_text()
    assert line in install
    assert "docs/install.md#removing" in notes
    assert "\n## Removing\n" in install


def test_gateways_scale_by_their_load() -> None:
    values = {"gateway": {"autoscaling": {"enabled": True, "maxReplicas": 8, "inFlight": 300}}}
    objects = rendered(values)
    hpa = one(objects, "HorizontalPodAutoscaler", "shoal-gateway")["spec"]
    assert hpa["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "shoal-gateway"}
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (2, 8)
    cpu, in_flight = hpa["metrics"]
    assert cpu["resource"]["target"] == {"type": "AverageValue", "averageValue": "700m"}
    assert in_flight["pods"]["metric"]["name"] == "shoal_gateway_requests_in_flight"
    # A number in the StatefulSet would take the autoscaler's away at each upgrade.
    assert "replicas" not in one(objects, "StatefulSet", "shoal-gateway")["spec"]
    assert [o for o in rendered({}) if o["kind"] == "HorizontalPodAutoscaler"] == []


def test_the_rule_for_prometheus_adapter_is_of_the_metric_that_the_autoscaler_reads() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "chart.md").read_text(), re.MULTILINE | re.DOTALL)
    ((rule,),) = [yaml.safe_load(block)["rules"]["custom"] for block in blocks if "seriesQuery" in block]
    series, _, labels = rule["seriesQuery"].partition("{")
    values = {"gateway": {"autoscaling": {"enabled": True, "inFlight": 300}}}
    hpa = one(rendered(values), "HorizontalPodAutoscaler", "shoal-gateway")["spec"]
    assert series == hpa["metrics"][1]["pods"]["metric"]["name"]
    assert [m.type for m in GatewayMetrics().registry.collect() if m.name == series] == ["gauge"]
    # The labels that Prometheus gives what a ServiceMonitor selects.
    assert labels == 'namespace!="",pod!=""}'
    assert rule["resources"]["overrides"] == {each: {"resource": each} for each in ("namespace", "pod")}
    assert rule["metricsQuery"] == "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)"


def test_gateways_with_bounds_that_contradict_each_other_are_refused() -> None:
    values = {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 2}}}
    done = helm("template", "shoal", str(CHART), values=values)
    assert "gateway.autoscaling.minReplicas is larger than maxReplicas" in done.stderr


@pytest.mark.parametrize("name", SETS)
def test_the_operators_configuration_is_what_the_code_reads(name: str) -> None:
    read = config(rendered(SETS[name]))

    assert read.engines.default_version in read.engines.versions
    if name == "everything":
        assert read.engines.versions["0.5.24"].args == ("--device=cuda",)
        assert read.agent.image == "registry.example.com/shoal@sha256:" + "0" * 64
        assert read.pods.run_as_user == 1000
        assert read.proxy.https == "http://proxy.example.com:3128"
        assert read.ca_bundle.config_map == "ca"
        assert read.hub_endpoint == "https://hub.example.com"
        assert read.pods.scraper_namespaces == ("monitoring",)
        assert read.signals.prometheus.url == "http://prometheus.monitoring.svc:9090"


def test_the_simulator_takes_the_place_of_every_engine() -> None:
    read = config(rendered(SMALL))

    row = read.engines.versions["0.5.23"]
    assert row.command == ("shoal", "sim", "engine")
    assert row.image == read.agent.image == "ghcr.io/shoal-dev/shoal:0.1.0"
    assert row.args == ("--sim-speed=4",)
    assert [(e.name, e.value) for e in row.env] == [("A", "b")]


def test_prometheus_as_the_source_needs_its_address() -> None:
    done = helm("template", "shoal", str(CHART), values={"operator": {"signals": {"source": "Prometheus"}}})
    assert done.returncode != 0
    assert "operator.signals.source Prometheus needs operator.signals.prometheus.url" in done.stderr


def test_scrapers_do_not_shut_operators_and_gateways_out_of_the_demand() -> None:
    policy = one(rendered(EVERYTHING), "NetworkPolicy", "shoal-gateway")
    (ops,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == names.OPS_PORT]
    allowed = [peer["podSelector"]["matchLabels"] for peer in ops["from"] if "podSelector" in peer]
    assert [labels[names.LABEL_COMPONENT] for labels in allowed] == ["operator", "gateway"]
    # Nor `kubectl shoal`, which comes through the API servers.
    for component in ("operator", "gateway", "ledger"):
        rules = one(rendered(EVERYTHING), "NetworkPolicy", f"shoal-{component}")["spec"]["ingress"]
        (ops,) = [rule for rule in rules if rule["ports"][0]["port"] == names.OPS_PORT]
        assert {"ipBlock": {"cidr": "10.0.0.0/28"}} in ops["from"]


def test_pages_are_for_those_whose_token_may_read_them_or_behind_the_network() -> None:
    readers = [{"name": "prometheus-k8s", "namespace": "monitoring"}]
    objects = rendered({"metrics": {"auth": {"readers": readers}}, "serviceMonitor": {"enabled": True}})
    for component, variable in (("gateway", "GATEWAY"), ("ledger", "LEDGER"), ("cache", "CACHE")):
        kinds = {"gateway": "StatefulSet", "ledger": "StatefulSet", "cache": "DaemonSet"}
        pod = one(objects, kinds[component], f"shoal-{component}")["spec"]["template"]["spec"]
        assert {"name": f"SHOAL_{variable}_METRICS_AUTH", "value": "true"} in pod["containers"][0]["env"]
    assert config(objects).metrics_auth
    subjects = one(objects, "ClusterRoleBinding", "shoal-metrics-reader")["subjects"]
    assert subjects == [{"kind": "ServiceAccount", **readers[0]}]
    monitor = one(objects, "ServiceMonitor", "shoal")["spec"]
    assert monitor["endpoints"][0]["bearerTokenFile"].endswith("/serviceaccount/token")
    # A token is shown to pods of Shoal's own namespace, never to one that somebody labelled elsewhere.
    assert "namespaceSelector" not in monitor
    agents = rendered({"podMonitor": {"enabled": True}, "pods": {"scraperNamespaces": ["monitoring"]}})
    (endpoint,) = one(agents, "PodMonitor", "shoal-engines")["spec"]["podMetricsEndpoints"]
    assert not {"bearerTokenFile", "authorization", "bearerTokenSecret"} & set(endpoint)

    # The wall switched off: then the network is the wall of metrics, and no scraper is named here.
    off = rendered({"metrics": {"auth": {"enabled": False}}, "rbac": {"roles": {"enabled": False}}})
    assert not config(off).metrics_auth
    assert not [o for o in off if o["metadata"]["name"] == "shoal-metrics-reader"]
    # The operator goes on to ask who may see decisions, and `kubectl shoal top` to get a token for them.
    (operator,) = one(off, "ClusterRoleBinding", "shoal-access")["subjects"]
    assert operator["name"] == "shoal-operator"
    (reader,) = one(off, "ClusterRoleBinding", "shoal-decisions-reader")["subjects"]
    assert one(off, "ServiceAccount", "shoal-decisions")["metadata"]["name"] == reader["name"]
    for component in ("operator", "gateway", "ledger", "cache"):
        rules = one(off, "NetworkPolicy", f"shoal-{component}")["spec"]["ingress"]
        (ops,) = [rule for rule in rules if rule["ports"][0]["port"] == names.OPS_PORT]
        assert [peer["podSelector"]["matchLabels"][names.LABEL_COMPONENT] for peer in ops["from"]] == [
            "operator",
            "gateway",
        ]


def rights(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {
        (g, r, v) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }


def test_for_some_namespaces_the_cluster_grants_only_what_is_in_none() -> None:
    scoped, everywhere = rendered({"scope": {"namespaces": ["team-a"]}}), rendered({})
    assert config(scoped).scope_namespaces == ("shoal-system", "team-a")
    events = one(scoped, "Role", "shoal-operator-events")
    assert (events["metadata"]["namespace"], "list" in events["rules"][0]["verbs"]) == ("default", True), (
        "of NodeClaims"
    )
    for component in ("operator", "gateway", "ledger"):
        (whole,) = [
            rights(o) for o in everywhere if (o["kind"], o["metadata"]["name"]) == ("ClusterRole", f"shoal-{component}")
        ]
        (cluster,) = [
            rights(o) for o in scoped if (o["kind"], o["metadata"]["name"]) == ("ClusterRole", f"shoal-{component}")
        ]
        assert {resource.partition("/")[0] for _, resource, _ in cluster} <= permissions.CLUSTER_SCOPED
        roles = {
            o["metadata"]["namespace"]: rights(o)
            for o in scoped
            if (o["kind"], o["metadata"]["name"]) == ("Role", f"shoal-{component}-scope")
        }
        # Its own namespace is among them: gateways are there.
        assert set(roles) == {"shoal-system", "team-a"}
        assert all(found | cluster == whole and not found & cluster for found in roles.values())
        # The wall down: everything in every namespace.
        assert component != "operator" or ("", "secrets", "get") in whole - cluster
    environment = {e["name"]: e.get("value") for e in pod_spec(scoped, "gateway")["containers"][0]["env"]}
    assert json.loads(environment["SHOAL_GATEWAY_SCOPE_NAMESPACES"] or "") == ["shoal-system", "team-a"]


def test_a_pod_monitor_without_a_namespace_that_may_scrape_is_refused() -> None:
    done = helm("template", "shoal", str(CHART), values={"podMonitor": {"enabled": True}})
    assert done.returncode != 0
    assert "podMonitor.enabled needs pods.scraperNamespaces" in done.stderr


def test_a_changed_configuration_rolls_the_operator() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = one(rendered(values), "Deployment", "shoal-operator")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"gateway": {"replicas": 5}})
    assert checksum({}) != checksum({"hubEndpoint": "https://hub.example.com"})


def test_names_ports_and_paths_agree_with_the_code() -> None:
    objects = rendered({})
    gateway, operator = pod_spec(objects, "gateway"), pod_spec(objects, "operator")
    container = gateway["containers"][0]

    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
        "api": names.GATEWAY_PORT,
        "ops": names.OPS_PORT,
        "ops-tls": names.OPS_TLS_PORT,
    }
    assert operator["containers"][0]["ports"][0]["containerPort"] == names.OPS_PORT
    assert {m["name"]: m["mountPath"] for m in container["volumeMounts"]} == {
        "spool": names.SPOOL_DIR,
        "logs": names.LOGS_DIR,
        "keys": names.ROLE_KEYS_DIR,
        "install-key": names.INSTALL_KEY_DIR,
        "mtls": names.TLS_DIR,
        "ledger-token": str(Path(names.LEDGER_TOKEN_FILE).parent),
        "tmp": "/tmp",
    }
    for volume, name in (("keys", names.key_secret("gateway")), ("install-key", names.INSTALL_KEY_SECRET)):
        secret = next(v["secret"] for v in gateway["volumes"] if v["name"] == volume)
        assert secret == {"secretName": name, "optional": True}
    lease = one(objects, "Role", "shoal-operator")["rules"][1]["resourceNames"]
    assert lease == [names.LEASE_NAME]
    for component in (names.COMPONENT_GATEWAY, names.COMPONENT_OPERATOR, names.COMPONENT_LEDGER):
        kind = "Deployment" if component == "operator" else "StatefulSet"
        labels = one(objects, kind, f"shoal-{component}")["spec"]["template"]["metadata"]["labels"]
        # By these the engine pods' NetworkPolicies know operator and gateways.
        assert labels[names.LABEL_COMPONENT] == component
        assert labels[names.LABEL_PART_OF] == "shoal"
    policy = one(objects, "NetworkPolicy", "shoal-gateway")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in policy] == [names.GATEWAY_PORT, names.OPS_PORT]


@pytest.mark.parametrize("name", SETS)
def test_the_gateways_settings_are_ones_that_it_reads(name: str) -> None:
    spec = pod_spec(rendered(SETS[name]), "gateway")
    prefix = "SHOAL_GATEWAY_"
    given = {
        e["name"].removeprefix(prefix).lower(): e["value"]
        for e in spec["containers"][0]["env"]
        if e["name"].startswith(prefix)
    }

    assert set(given) <= set(GatewaySettings.model_fields)
    settings = GatewaySettings.model_validate(given)
    # Long enough for the longest request and the longest wait for a replica, and for what comes before and after.
    longest = settings.settle_seconds + settings.hold_seconds + settings.request_seconds + settings.body_seconds
    longest += settings.ship_seconds + (2 * mediafetch.SECONDS if settings.media_egress else 0)
    assert spec["terminationGracePeriodSeconds"] > longest


def test_mutual_tls_reaches_every_process() -> None:
    off = rendered({"transport": {"mtls": {"enabled": False}}})
    assert not config(off).transport.mtls.enabled
    assert names.ANNOTATION_TRANSPORT not in str(off)
    # Roles name the ports of both, so that a change of the transport is no change of anybody's rights.
    assert str(names.OPS_TLS_PORT) not in str([o for o in off if "rules" not in o])
    objects = rendered({})
    assert config(objects).transport.mtls.enabled
    ports = {"gateway": names.OPS_TLS_PORT, "ledger": names.LEDGER_TLS_PORT}
    for component in ("operator", "gateway", "ledger"):
        kind = "Deployment" if component == "operator" else "StatefulSet"
        template = one(objects, kind, f"shoal-{component}")["spec"]["template"]
        assert template["metadata"]["annotations"][names.ANNOTATION_TRANSPORT] == names.TRANSPORT_MTLS
        if component not in ports:
            continue
        container = template["spec"]["containers"][0]
        assert ports[component] in [port["containerPort"] for port in container["ports"]]
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounts["mtls"] == names.TLS_DIR
        (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == "mtls"]
        assert volume["secret"] == {"secretName": f"shoal-{component}-tls", "optional": True}
        allowed = one(objects, "NetworkPolicy", f"shoal-{component}")["spec"]["ingress"]
        assert ports[component] in [port["port"] for rule in allowed for port in rule["ports"]]
    env = {e["name"]: e.get("value") for e in pod_spec(objects, "gateway")["containers"][0]["env"]}
    url = f"https://shoal-ledger.shoal-system.svc:{names.LEDGER_TLS_PORT}"
    assert (env["SHOAL_GATEWAY_MTLS"], env["SHOAL_GATEWAY_LEDGER_URL"]) == ("true", url)
    assert names.LEDGER_TLS_PORT in [p["port"] for p in one(objects, "Service", "shoal-ledger")["spec"]["ports"]]


def test_tls_reaches_gateway_and_service() -> None:
    objects = rendered(EVERYTHING)
    container = pod_spec(objects, "gateway")["containers"][0]
    env = {e["name"]: e.get("value") for e in container["env"]}
    mount = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tls")

    assert env["SHOAL_GATEWAY_TLS_CERT"] == f"{mount}/tls.crt"
    assert env["SHOAL_GATEWAY_TLS_KEY"] == f"{mount}/tls.key"
    (port,) = one(objects, "Service", "shoal-gateway")["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"]) == ("https", 443, "api")


def test_without_persistence_there_is_no_claim() -> None:
    spec = one(rendered(SMALL), "StatefulSet", "shoal-gateway")["spec"]

    assert "volumeClaimTemplates" not in spec
    assert {"name": "spool", "emptyDir": {}} in spec["template"]["spec"]["volumes"]
    assert {"name": "logs", "emptyDir": {"sizeLimit": "5Gi"}} in spec["template"]["spec"]["volumes"]


def test_roles_are_the_codes_own_tables() -> None:
    objects = rendered({})

    assert one(objects, "ClusterRole", "shoal-operator")["rules"] == permissions.rules(permissions.OPERATOR)
    assert one(objects, "ClusterRole", "shoal-gateway")["rules"] == permissions.rules(permissions.GATEWAY)
    assert one(objects, "ClusterRole", "shoal-ledger")["rules"] == permissions.rules(permissions.LEDGER)
    own = one(objects, "Role", "shoal-operator")
    assert own["metadata"]["namespace"] == "shoal-system"
    assert own["rules"] == permissions.rules(permissions.OPERATOR_OWN_NAMESPACE)
    for kind, component in (
        ("ClusterRoleBinding", "operator"),
        ("ClusterRoleBinding", "gateway"),
        ("ClusterRoleBinding", "ledger"),
        ("RoleBinding", "operator"),
    ):
        binding = one(objects, kind, f"shoal-{component}")
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": f"shoal-{component}", "namespace": "shoal-system"}
        ]
        assert pod_spec(objects, component)["serviceAccountName"] == f"shoal-{component}"


@pytest.mark.parametrize("table", [permissions.GATEWAY, permissions.LEDGER], ids=["gateway", "ledger"])
def test_gateway_and_ledger_may_read_no_secret_and_write_nothing(table: tuple[permissions.Permission, ...]) -> None:
    rules = permissions.rules(table)

    assert not any("secrets" in rule["resources"] for rule in rules)
    assert {verb for rule in rules for verb in rule["verbs"]} <= {"get", "list", "watch"}


def test_the_node_cache_is_the_only_one_with_a_host_path() -> None:
    objects = rendered({"networkPolicy": {"enabled": True}})
    templates = {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in objects
        if o["kind"] in ("Deployment", "StatefulSet", "DaemonSet")
    }
    paths = {n: [v["hostPath"]["path"] for v in t["volumes"] if "hostPath" in v] for n, t in templates.items()}

    assert paths.pop("shoal-cache") == ["/var/lib/shoal/cache"]
    assert paths == {"shoal-operator": [], "shoal-gateway": [], "shoal-ledger": []}
    container = templates["shoal-cache"]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert one(objects, "ClusterRole", "shoal-cache")["rules"] == permissions.rules(permissions.CACHE)
    assert not any(o["kind"] == "Service" and "cache" in o["metadata"]["name"] for o in objects)
    assert all("cache" not in o["metadata"]["name"] for o in rendered(SMALL))


@pytest.mark.parametrize("name", SETS)
def test_cache_and_operator_agree_on_what_is_cached_where(name: str) -> None:
    objects = rendered(SETS[name])
    said = config(objects).cache
    found = [o for o in objects if o["kind"] == "DaemonSet"]

    assert said.enabled is bool(found)
    for daemons in found:
        spec = daemons["spec"]["template"]["spec"]
        volume = next(v["hostPath"] for v in spec["volumes"] if v["name"] == "cache")
        assert volume == {"path": said.host_path, "type": "DirectoryOrCreate"}
        env = {e["name"]: e["value"] for e in spec["containers"][0]["env"]}
        prefix = "SHOAL_CACHE_"
        given = {k.removeprefix(prefix).lower(): v for k, v in env.items() if k.startswith(prefix)}
        assert set(given) <= set(CacheSettings.model_fields)
        given["sources"] = json.loads(given["sources"])
        settings = CacheSettings.model_validate(given)
        assert settings.sources == config(objects).sources
        assert settings.size == said.size
        assert spec["containers"][0]["volumeMounts"][0] == {"name": "cache", "mountPath": str(settings.root)}
        assert spec["nodeSelector"] == (said.node_selector or {"kubernetes.io/os": "linux"})
        if name == "everything":
            assert settings.hub_endpoint == "https://hub.example.com"
            assert env["HTTPS_PROXY"] == "http://proxy.example.com:3128"
            assert settings.ca_bundle == "/etc/shoal/ca/ca.crt"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cache": {"size": "lots"}}, "does not match pattern"),
        ({"cache": {"hostPath": "relative"}}, "does not match pattern"),
        ({"gatway": {}}, "additional properties 'gatway' not allowed"),
        ({"gateway": {"replica": 2}}, "additional properties 'replica' not allowed"),
        ({"ledger": {"prices": {"gold": "x: 1"}}}, 'ledger.prices: "gold" is not the name of a YAML file'),
        (
            {"ledger": {"prices": {"a.yaml": "x: 1"}, "pricesConfigMap": "mine"}},
            "give either ledger.prices or ledger.pricesConfigMap",
        ),
        ({"ledger": {"hoursRetentionDays": 7}}, "minimum: got 7, want 32"),
        ({"ledger": {"persistence": {"size": "much"}}}, "does not match pattern"),
        ({"gateway": {"persistence": {"size": "2"}}}, "does not match pattern"),
        ({"gateway": {"persistence": {"size": "1.5Gi"}}}, "does not match pattern"),
        ({"gateway": {"replicas": 0}}, "minimum: got 0, want 1"),
        ({"hubEndpoint": "hub.example.com"}, "does not match pattern"),
        ({"gateway": {"tls": {"secretName": "Not_Valid"}}}, "does not match pattern"),
        ({"gateway": {"replicas": "two"}}, "got string, want integer"),
        ({"image": {"digest": "latest"}}, "does not match pattern"),
        ({"image": {"pullPolicy": "Sometimes"}}, "must be one of 'Always', 'IfNotPresent', 'Never'"),
        ({"engines": {"versions": {"0.5.23": {"img": "x"}}}}, "additional properties 'img' not allowed"),
        ({"engines": {"versions": {"0.6.0": {"args": []}}}}, "missing property 'image'"),
        ({"engines": {"defaultVersion": "9.9.9"}}, 'engines.defaultVersion "9.9.9" is not a row of engines.versions'),
        ({"gateway": {"httpRoute": {"requestTimeout": "15"}}}, "does not match pattern"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs must name the Gateway"),
    ],
    ids=lambda v: v if isinstance(v, str) else json.dumps(v)[:40],
)
def test_wrong_values_are_refused(values: dict[str, Any], words: str) -> None:
    done = helm("template", "shoal", str(CHART), values=values)

    assert done.returncode != 0
    assert words in done.stderr


def test_the_crd_chart_holds_what_crds_holds() -> None:
    objects = {o["metadata"]["name"]: o for o in rendered({}, CRDS)}

    for path in sorted((ROOT / "crds").glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        chart = objects.pop(crd["metadata"]["name"])
        assert chart["spec"] == crd["spec"]
        assert chart["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not objects
    assert all("annotations" not in o["metadata"] for o in rendered({"keep": False}, CRDS))


@pytest.mark.parametrize("chart", [CHART, CRDS], ids=lambda c: c.name)
def test_every_value_has_a_comment(chart: Path) -> None:
    previous = ""
    for line in (chart / "values.yaml").read_text().splitlines():
        key = line.strip().split(":")[0]
        in_default = line.startswith(("    ", "  - ")) and not previous.strip().startswith("#")
        if line.strip() and not line.strip().startswith("#") and not in_default:
            assert previous.strip().startswith("#"), f"{chart.name}: {key} has no comment"
        previous = line


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for chart in (CHART, CRDS):
        said = yaml.safe_load((chart / "Chart.yaml").read_text())
        assert f'version = "{said["appVersion"]}"' in project
        assert said["version"] == said["appVersion"]
