"""The request logs' disk in the chart: its bound, its object store, its keys."""

from typing import Any

import pytest

from shoal.api import names
from tests.support.charts import CHART, EVERYTHING, helm, rendered


def gateway(values: dict[str, Any]) -> dict[str, Any]:
    (found,) = [o for o in rendered(values) if (o["kind"], o["metadata"]["name"]) == ("StatefulSet", "shoal-gateway")]
    return found["spec"]


def env(values: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in gateway(values)["template"]["spec"]["containers"][0]["env"]}


def logs(**said: Any) -> dict[str, Any]:
    return {"gateway": {"requestLog": said}}


def test_request_logs_have_a_volume_of_their_own_beside_the_spools() -> None:
    templates = gateway(EVERYTHING)["volumeClaimTemplates"]

    assert {t["metadata"]["name"]: t["spec"]["resources"]["requests"]["storage"] for t in templates} == {
        "spool": "10Gi",
        "logs": "100Gi",
    }
    # An upgrade may not add a claim to a StatefulSet that is there: by default it asks for none.
    templates = gateway({})["volumeClaimTemplates"]
    assert [t["metadata"]["name"] for t in templates] == ["spool"]


@pytest.mark.parametrize(
    ("size", "most"),
    [("20Gi", 19_327_352_832), ("500Mi", 471_859_200), ("2Ti", 1_979_120_929_996), ("10G", 9_000_000_000)],
)
def test_logs_stay_under_the_bound_at_which_a_pod_is_evicted(size: str, most: int) -> None:
    assert env(logs(persistence={"size": size}))["SHOAL_GATEWAY_LOG_MAX_BYTES"] == str(most)


def test_an_object_store_and_keys_come_from_secrets() -> None:
    spec = gateway(EVERYTHING)["template"]["spec"]
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    said = env(EVERYTHING)

    assert mounts["logs"] == names.LOGS_DIR
    assert said["SHOAL_GATEWAY_LOG_URL"] == "s3://logs/east"
    assert said["SHOAL_GATEWAY_LOG_SECRET_DIR"] == mounts["log-bucket"]
    assert said["SHOAL_GATEWAY_LOG_KEY_DIR"] == mounts["log-keys"]
    assert secrets.items() >= {"log-bucket": "log-bucket", "log-keys": "log-keys"}.items()
    assert "SHOAL_GATEWAY_LOG_KEY_DIR" not in env({})


def test_a_bucket_needs_a_scheme() -> None:
    done = helm("template", "shoal", str(CHART), values=logs(bucket={"url": "my-bucket"}))
    assert done.returncode != 0
    assert "does not match pattern" in done.stderr
