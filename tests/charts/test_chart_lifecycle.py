"""helm install, upgrade, rollback and uninstall on a real API server (no nodes: what runs is for the lab to show)."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.apiserver import ApiServer, start
from tests.support.charts import CHART, CRDS
from tests.support.waiting import until

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that has never heard of Shoal."""
    yield from start(tmp_path_factory.mktemp("bare"))


def helm(server: ApiServer, *args: str, values: dict[str, Any] | None = None) -> str:
    done = subprocess.run(
        [server.tools.helm, f"--kubeconfig={server.kubeconfig}", *args, *(["-f", "-"] if values else [])],
        input=json.dumps(values) if values else None,
        env=os.environ | {"HOME": str(server.folder)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def release(server: ApiServer, verb: str, name: str, chart: Path, values: dict[str, Any] | None = None) -> str:
    return helm(server, verb, name, str(chart), "--namespace=shoal-system", "--create-namespace", values=values)


def policies(server: ApiServer) -> list[str]:
    kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
    return server.kubectl("get", kinds, "-l=app.kubernetes.io/part-of=shoal", "-o=name").split()


def test_install_upgrade_uninstall(bare: ApiServer) -> None:
    # The release does not need the definitions to be there; operator and gateway wait for them.
    told = release(bare, "install", "shoal", CHART)
    assert "helm install shoal-crds oci://ghcr.io/shoal-dev/charts/shoal-crds --version " in told
    release(bare, "install", "shoal-crds", CRDS)
    bare.kubectl("wait", "--for=condition=Established", "crd/models.shoal.dev", "--timeout=50s")
    # Established is not yet published: kubectl finds the kinds by discovery.
    until(lambda: "models" in bare.run("api-resources", "--api-group=shoal.dev", "-o", "name").stdout, 60)

    claims = bare.json("get", "statefulset", "shoal-gateway", "-n=shoal-system")["spec"]["volumeClaimTemplates"]
    assert claims[0]["spec"]["resources"]["requests"]["storage"] == "2Gi"
    bare.kubectl("create", "namespace", "demo")
    # Although the policies were there before the kinds that they compare.
    bare.kubectl("apply", "-f", str(CHART.parents[1] / "examples" / "models.yaml"))
    assert len(policies(bare)) == 10

    # What may be changed on a running release: everything but size and StorageClass of existing volumes.
    values: dict[str, Any] = {
        "gateway": {"replicas": 3, "tls": {"secretName": "cert"}, "requestSeconds": 60},
        "hubEndpoint": "https://hub.example.com",
    }
    release(bare, "upgrade", "shoal", CHART, values)
    release(bare, "upgrade", "shoal-crds", CRDS)
    same = {"gateway": {**values["gateway"], "persistence": {"size": "2048Mi"}}}
    release(bare, "upgrade", "shoal", CHART, same)
    with pytest.raises(AssertionError) as refused:
        release(bare, "upgrade", "shoal", CHART, {"gateway": {"persistence": {"size": "4Gi"}}})
    assert "gateway.persistence.size cannot change from 2Gi to 4Gi in place" in str(refused.value)
    assert "kubectl -n shoal-system delete statefulset shoal-gateway --cascade=orphan" in str(refused.value)
    with pytest.raises(AssertionError) as refused:
        release(bare, "upgrade", "shoal", CHART, {"gateway": {"persistence": {"storageClassName": "fast"}}})
    change = "gateway.persistence.storageClassName cannot change from the cluster's default to fast in place"
    assert change in str(refused.value)
    assert "kubectl -n shoal-system delete statefulset shoal-gateway --cascade=orphan" in str(refused.value)
    assert "PersistentVolumeClaims spool-shoal-gateway-* that are Pending" in str(refused.value)
    assert bare.json("get", "statefulset", "shoal-gateway", "-n=shoal-system")["spec"]["replicas"] == 3
    release(
        bare,
        "upgrade",
        "shoal",
        CHART,
        {"admission": {name: {"enabled": False} for name in ("loraPools", "children", "nodes")}},
    )
    assert policies(bare) == []
    helm(bare, "rollback", "shoal", "1", "--namespace=shoal-system")
    assert len(policies(bare)) == 10
    assert bare.json("get", "statefulset", "shoal-gateway", "-n=shoal-system")["spec"]["replicas"] == 2

    helm(bare, "uninstall", "shoal", "--namespace=shoal-system")
    helm(bare, "uninstall", "shoal-crds", "--namespace=shoal-system")
    left = bare.kubectl(
        "get",
        "deploy,statefulset,svc,pdb,netpol,cm,sa,role,rolebinding",
        "-n=shoal-system",
        "-l=app.kubernetes.io/part-of=shoal",
        "-o=name",
    )
    assert left == ""
    assert "shoal" not in bare.kubectl("get", "clusterroles,clusterrolebindings", "-o=name")
    assert policies(bare) == []
    # People's Models outlive the chart.
    assert len(bare.json("get", "models", "-n=demo")["items"]) == 2


def test_the_installed_chart_alone_refuses_what_engines_refuse(bare: ApiServer) -> None:
    """A pool on a Model whose engines run no adapters, and the other way round."""
    name = "refusals"
    bare.kubectl("create", "namespace", name)

    def own(kind: str, named: str, spec: dict[str, Any]) -> dict[str, Any]:
        metadata = {"name": named, "namespace": name}
        return {"apiVersion": "shoal.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}

    def model(named: str, *extra: str) -> dict[str, Any]:
        return own("Model", named, {"source": {"uri": "hf://o/r"}, "engine": {"extraArgs": list(extra)}})

    def pool(of: str) -> dict[str, Any]:
        return own("LoRAPool", f"of-{of}", {"modelRef": {"name": of}})

    def refused(one: dict[str, Any], words: str) -> None:
        # What was written a moment ago reaches a policy by a watch; which definitions there are, every 30 s.
        until(lambda: words in bare.apply(one, dry_run=True).stderr, 90, lambda: bare.apply(one, dry_run=True))

    bare.install_crds()
    release(bare, "install", "shoal", CHART)
    split = "with parallelism.attentionData (--attn-dp-size) SGLang runs only adapters that are never evicted"
    assert bare.apply(model("split", "--attn-dp-size=2"), pool("later")).returncode == 0
    refused(pool("split"), f"Model split: {split}")
    refused(model("later", "--attn-dp-size=2"), f"LoRAPool of-later gives this Model adapters: {split}")
    done = bare.apply(model("later", "--attn-dp-size=1"))
    assert done.returncode == 0, done.stderr

    # What was there before the policies stays anyone's to label; only its arguments may not become worse.
    switch = {"admission": {"loraPools": {"enabled": False}}}
    release(bare, "upgrade", "shoal", CHART, switch)
    until(lambda: bare.apply(pool("split"), dry_run=True).returncode == 0, 60)
    assert bare.apply(pool("split")).returncode == 0
    switch["admission"]["loraPools"]["enabled"] = True
    release(bare, "upgrade", "shoal", CHART, switch)
    refused(model("split", "--attn-dp-size=4"), f"LoRAPool of-split gives this Model adapters: {split}")
    bare.kubectl("label", "models.shoal.dev/split", "-n", name, "team=a")
    bare.kubectl("label", "lorapools.shoal.dev/of-split", "-n", name, "team=a")
    helm(bare, "uninstall", "shoal", "--namespace=shoal-system")


def test_what_tenants_used_outlives_every_change_of_the_release(bare: ApiServer) -> None:
    """To PostgreSQL and back, taken away, and installed again: no step needs a StatefulSet to be deleted by hand."""

    def claim() -> str:
        return bare.json("get", "pvc", "shoal-ledger", "-n=shoal-system")["metadata"]["uid"]

    release(bare, "install", "shoal", CHART)
    first = claim()
    release(bare, "upgrade", "shoal", CHART, {"ledger": {"database": {"secretName": "db"}}})
    release(bare, "upgrade", "shoal", CHART, {"ledger": {"persistence": {"size": "20Gi"}, "retentionDays": 400}})
    release(bare, "upgrade", "shoal", CHART, {"ledger": {"enabled": False}})
    assert bare.kubectl("get", "statefulset,svc", "-n=shoal-system", "-o=name").count("shoal-ledger") == 0
    helm(bare, "uninstall", "shoal", "--namespace=shoal-system")
    assert claim() == first
    release(bare, "install", "shoal", CHART)
    assert claim() == first

    # A claim without a class may get one, and keeps it.
    fast, slow = ({"ledger": {"persistence": {"storageClassName": name}}} for name in ("fast", "slow"))
    release(bare, "upgrade", "shoal", CHART, fast)
    release(bare, "upgrade", "shoal", CHART, fast)
    with pytest.raises(AssertionError) as refused:
        release(bare, "upgrade", "shoal", CHART, slow)
    assert "ledger.persistence.storageClassName cannot change from fast to slow in place" in str(refused.value)
    assert "run kubectl -n shoal-system delete pvc shoal-ledger" in str(refused.value), "nothing has bound it"
    bound = '{"status": {"phase": "Bound"}}'
    bare.kubectl("patch", "pvc", "shoal-ledger", "-n=shoal-system", "--subresource=status", "--type=merge", "-p", bound)
    with pytest.raises(AssertionError) as refused:
        release(bare, "upgrade", "shoal", CHART, slow)
    assert "cannot change from fast to slow in place" in str(refused.value)
    assert "Set the value back to fast, or move the records" in str(refused.value)
    assert "delete pvc" not in str(refused.value)
    # It is not looked at where the records are in PostgreSQL.
    release(bare, "upgrade", "shoal", CHART, {"ledger": {**slow["ledger"], "database": {"secretName": "db"}}})
    assert claim() == first
    helm(bare, "uninstall", "shoal", "--namespace=shoal-system")
