"""The command lines of the control plane. Data only; the supervisor starts them."""

from collections.abc import Sequence
from typing import Final

from shoal_dev.lab import network
from shoal_dev.lab.binaries import Binaries
from shoal_dev.lab.state import Paths

API_URL: Final = f"https://{network.HOST}:{network.API_PORT}"
API_NAMES: Final = (
    "127.0.0.1",
    network.HOST,
    network.API_SERVICE,
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    f"kubernetes.default.svc.{network.DOMAIN}",
)
_ETCD: Final = "http://127.0.0.1:2379"
_ETCD_PEER: Final = "http://127.0.0.1:2380"


_TAINT_RULES_MINOR: Final = 36
"""From here on DeviceTaintRules can be switched on, or are."""


def taint_rules(minor: int) -> tuple[list[str], list[str]]:
    """Arguments that switch DeviceTaintRules on: of every part of the control plane, and more of the API server."""
    if minor < _TAINT_RULES_MINOR:
        return [], []
    return ["--feature-gates=DRADeviceTaintRules=true"], [
        "--runtime-config=resource.k8s.io/v1beta2/devicetaintrules=true"
    ]


def commands(
    binaries: Binaries, paths: Paths, *, minor: int, faults: bool, hpa_sync: float | None = None
) -> dict[str, Sequence[str]]:
    """Process name -> argv, for Kubernetes 1.`minor`. With `faults`, a dead node is noticed after 10 s and its pods are
    evicted after 3 s more (a real cluster: 40 s and 5 minutes). HorizontalPodAutoscalers are synced every `hpa_sync`
    seconds (else 15)."""
    pki = paths.pki
    gates, served = taint_rules(minor)

    def controller(name: str) -> list[str]:
        config = f"{pki}/{name}.kubeconfig"
        return [
            str(binaries.path(name)),
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--kube-api-qps=300",
            "--kube-api-burst=600",
            "--profiling=false",
            *gates,
        ]

    etcd = [
        str(binaries.path("etcd")),
        "--name=lab",
        f"--data-dir={paths.etcd}",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        f"--listen-peer-urls={_ETCD_PEER}",
        f"--initial-advertise-peer-urls={_ETCD_PEER}",
        f"--initial-cluster=lab={_ETCD_PEER}",
        # Nothing in a lab outlives the machine.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    apiserver = [
        str(binaries.path("kube-apiserver")),
        f"--etcd-servers={_ETCD}",
        f"--bind-address={network.HOST}",
        f"--advertise-address={network.HOST}",
        f"--secure-port={network.API_PORT}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-account-issuer=https://kubernetes.default.svc.{network.DOMAIN}",
        f"--service-cluster-ip-range={network.SERVICE_RANGE}",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
        "--profiling=false",
        *gates,
        *served,
    ]
    manager = [
        *controller("kube-controller-manager"),
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--allocate-node-cidrs=false",
        "--concurrent-deployment-syncs=20",
        "--concurrent-replicaset-syncs=20",
    ]
    if hpa_sync is not None:
        manager.append(f"--horizontal-pod-autoscaler-sync-period={hpa_sync}s")
    if faults:
        apiserver += ["--default-not-ready-toleration-seconds=3", "--default-unreachable-toleration-seconds=3"]
        manager += [
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=10s",
            "--node-eviction-rate=10",
            "--secondary-node-eviction-rate=10",
        ]
    return {
        "etcd": etcd,
        "kube-apiserver": apiserver,
        "kube-controller-manager": manager,
        "kube-scheduler": controller("kube-scheduler"),
    }
