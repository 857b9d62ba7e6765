"""The ledger in the chart: its database, its disk, its price lists, who reaches it, what gateways hear of it."""

from pathlib import Path
from typing import Any

import pytest

from shoal.api import names, permissions
from shoal.ledger.settings import LedgerSettings
from tests.support.charts import CHART, EVERYTHING, SETS, SMALL, helm, rendered


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod(objects: list[dict[str, Any]], of: str = "shoal-ledger") -> dict[str, Any]:
    return one(objects, "StatefulSet", of)["spec"]["template"]["spec"]


def env(spec: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in spec["containers"][0]["env"]}


def named(objects: list[dict[str, Any]], name: str) -> set[str]:
    return {o["kind"] for o in objects if o["metadata"]["name"].startswith(name)}


def test_it_is_one_pod_with_sqlite_on_a_volume_that_outlives_the_release() -> None:
    objects = rendered({})
    spec = pod(objects)
    claim = one(objects, "PersistentVolumeClaim", "shoal-ledger")

    assert one(objects, "StatefulSet", "shoal-ledger")["spec"]["replicas"] == 1
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    volume = next(v for v in spec["volumes"] if v["name"] == "ledger")
    assert volume["persistentVolumeClaim"] == {"claimName": "shoal-ledger"}
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    assert mounts == {
        "ledger": names.LEDGER_DIR,
        "keys": names.ROLE_KEYS_DIR,
        "install-key": names.INSTALL_KEY_DIR,
        "mtls": names.TLS_DIR,
        "prices": names.PRICES_DIR,
        "tmp": "/tmp",
    }
    assert spec["containers"][0]["command"] == ["shoal", "ledger", "run"]
    assert {p["name"]: p["containerPort"] for p in spec["containers"][0]["ports"]} == {
        "api": names.LEDGER_PORT,
        "ops": names.OPS_PORT,
        "api-tls": names.LEDGER_TLS_PORT,
    }
    port, _ = one(objects, "Service", "shoal-ledger")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (names.LEDGER_PORT, "api")


@pytest.mark.parametrize("name", SETS)
def test_its_settings_are_ones_that_it_reads(name: str) -> None:
    objects = rendered(SETS[name])
    prefix = "SHOAL_LEDGER_"
    given = {k.removeprefix(prefix).lower(): v for k, v in env(pod(objects)).items() if k.startswith(prefix)}
    if isinstance(given.get("database_url"), dict):  # from the Secret
        given["database_url"] = "postgresql://shoal@postgres.db.svc/shoal"

    assert set(given) <= set(LedgerSettings.model_fields)
    settings = LedgerSettings.model_validate(given)
    gateway = env(pod(objects, "shoal-gateway"))
    assert settings.installation == gateway["SHOAL_GATEWAY_INSTALLATION"]
    longest = float(gateway["SHOAL_GATEWAY_REQUEST_SECONDS"]) + float(gateway["SHOAL_GATEWAY_HOLD_SECONDS"])
    assert settings.close_open_seconds > longest


def test_gateways_hear_where_it_is() -> None:
    said = env(pod(rendered({}), "shoal-gateway"))
    assert said["SHOAL_GATEWAY_LEDGER_URL"] == f"https://shoal-ledger.shoal-system.svc:{names.LEDGER_TLS_PORT}"


def test_gateways_prove_from_which_pod_they_send() -> None:
    objects = rendered({"metrics": {"auth": {"enabled": False}}})
    assert env(pod(objects))["SHOAL_LEDGER_GATEWAY_TOKENS"] == "true"
    gateway = pod(objects, "shoal-gateway")
    assert gateway["serviceAccountName"] == LedgerSettings().gateway_account
    (volume,) = [v["projected"] for v in gateway["volumes"] if v["name"] == "ledger-token"]
    (token,) = [source["serviceAccountToken"] for source in volume["sources"]]
    assert token["audience"] == names.LEDGER_AUDIENCE
    assert token["path"] == Path(names.LEDGER_TOKEN_FILE).name
    # The ledger may ask, also where nobody asks who reads metrics.
    role = one(objects, "ClusterRole", "shoal-ledger-senders")
    assert role["rules"] == permissions.rules(permissions.SENDERS)
    (subject,) = one(objects, "ClusterRoleBinding", "shoal-ledger-senders")["subjects"]
    assert subject["name"] == pod(objects)["serviceAccountName"]

    off = rendered({"ledger": {"gatewayTokens": {"enabled": False}}})
    assert env(pod(off))["SHOAL_LEDGER_GATEWAY_TOKENS"] == "false"
    assert not named(off, "shoal-ledger-senders")
    # Gateways have it all the same: it can be switched on while they serve.
    assert "ledger-token" in {v["name"] for v in pod(off, "shoal-gateway")["volumes"]}


def test_with_postgresql_there_is_no_disk_and_the_url_comes_from_the_secret() -> None:
    objects = rendered(EVERYTHING)
    spec = pod(objects)

    assert "PersistentVolumeClaim" not in named(objects, "shoal-ledger")
    assert not any(v["name"] == "ledger" for v in spec["volumes"])
    assert env(spec)["SHOAL_LEDGER_DATABASE_URL"] == {"secretKeyRef": {"name": "ledger-db", "key": "dsn"}}
    assert env(spec)["SHOAL_LEDGER_RETENTION_DAYS"] == "800"


def test_without_persistence_it_warns() -> None:
    objects = rendered(SMALL)

    assert "PersistentVolumeClaim" not in named(objects, "shoal-ledger")
    assert {"name": "ledger", "emptyDir": {}} in pod(objects)["volumes"]
    done = helm("install", "shoal", str(CHART), "--dry-run=client", values=SMALL)
    assert "usage records and bills are lost with the ledger's pod" in done.stdout, done.stderr


def test_price_lists_are_files_as_they_were_written() -> None:
    text = "currency: USD\n# a comment that an error's line number counts\nrates: []\n"
    objects = rendered({"ledger": {"prices": {"2026.yaml": text, "2027.yml": "currency: EUR\n"}}})

    assert one(objects, "ConfigMap", "shoal-prices")["data"] == {"2026.yaml": text, "2027.yml": "currency: EUR\n"}
    volume = next(v for v in pod(objects)["volumes"] if v["name"] == "prices")
    assert volume["configMap"] == {"name": "shoal-prices", "optional": True}


def test_price_lists_may_be_in_a_config_map_of_ones_own() -> None:
    objects = rendered({"ledger": {"pricesConfigMap": "mine"}})

    assert "ConfigMap" not in named(objects, "shoal-prices")
    volume = next(v for v in pod(objects)["volumes"] if v["name"] == "prices")
    assert volume["configMap"] == {"name": "mine", "optional": True}


def test_who_reaches_it() -> None:
    def api(values: dict[str, Any]) -> dict[str, Any]:
        rules = one(rendered(values), "NetworkPolicy", "shoal-ledger")["spec"]["ingress"]
        (found,) = [r for r in rules if r["ports"][0]["port"] == names.LEDGER_PORT]
        return found

    # The API servers' proxy has no selector: where its networks are not given, the key alone decides.
    assert "from" not in api({})
    gateways, proxy = api(EVERYTHING)["from"]
    assert gateways["podSelector"]["matchLabels"][names.LABEL_COMPONENT] == names.COMPONENT_GATEWAY
    assert proxy == {"ipBlock": {"cidr": "10.0.0.0/28"}}


def test_switched_off_nothing_of_it_is_left() -> None:
    values = {"ledger": {"enabled": False, "prices": {"a.yaml": "x: 1"}}, "serviceMonitor": {"enabled": True}}
    objects = rendered(values)

    assert named(objects, "shoal-ledger") == set()
    assert named(objects, "shoal-prices") == set()
    assert "SHOAL_GATEWAY_LEDGER_URL" not in env(pod(objects, "shoal-gateway"))
    done = helm("install", "shoal", str(CHART), "--dry-run=client", values=values)
    assert "usage records stay on the gateways' volumes" in done.stdout, done.stderr


def test_metrics_are_scraped_by_the_one_service_monitor() -> None:
    objects = rendered({"serviceMonitor": {"enabled": True}})
    wanted = one(objects, "ServiceMonitor", "shoal")["spec"]["selector"]["matchLabels"]
    labels = {o["metadata"]["name"]: o["metadata"]["labels"] for o in objects if o["kind"] == "Service"}
    services = {name for name, of in labels.items() if wanted.items() <= of.items()}

    assert services == {"shoal-operator-pods", "shoal-gateway-pods", "shoal-ledger-pods", "shoal-cache-pods"}
