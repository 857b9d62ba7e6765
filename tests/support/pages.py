"""The pages of Shoal's own pods, read as a Prometheus reads them: with a token of a ServiceAccount that may."""

import json
import time
from typing import Any, Final

from shoal.api import names
from shoal_dev.demo.clusters import DemoCluster, LabCluster

READER: Final = "page-reader"
_FRESH_SECONDS: Final = 1800.0
_tokens: dict[str, tuple[float, str]] = {}


def binding(role: str, *, account: str = READER, namespace: str = "default") -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{account}-{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }


def token(cluster: DemoCluster) -> str:
    """Of an account that may read metrics and decisions."""
    where = cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
    made, known = _tokens.get(where, (float("-inf"), ""))
    if time.monotonic() - made > _FRESH_SECONDS:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": READER, "namespace": "default"}}
        items = [account, binding("shoal-metrics-reader"), binding("shoal-decisions-reader")]
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        known = cluster.kubectl("create", "token", READER, "-n", "default").strip()
        _tokens[where] = time.monotonic(), known
    return known


def page(cluster: LabCluster, address: str, path: str = "/metrics", *, port: int = names.OPS_PORT) -> str:
    """What a pod answers. Right after the account was made its rights may not be known yet, so it is asked again."""
    headers = ("-H", f"Authorization: Bearer {token(cluster)}")
    retry = ("--retry", "5", "--retry-all-errors", "--retry-delay", "3", "--max-time", "10")
    return cluster.lab.exec("curl", "-fsS", *retry, *headers, f"http://{address}:{port}{path}")
