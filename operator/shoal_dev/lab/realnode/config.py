"""What a node with a real kubelet is told, and the configuration files that follow from it."""

import json
from pathlib import Path
from typing import Any, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict

from shoal_dev.lab import network
from shoal_dev.lab.node.config import NodeSpec
from shoal_dev.lab.realnode import cgroups
from shoal_dev.lab.realnode.programs import Programs

SOCKET: Final = "/run/shoal-containerd.sock"
"""containerd's, in the node's own /run."""
SANDBOX_IMAGE: Final = "localhost/pause:1"
_SET_BY_KUBELET: Final = ("kubernetes.io/hostname", "kubernetes.io/os", "kubernetes.io/arch")


class RealNodeConfig(BaseModel):
    """The configuration file of a node. The lab writes it; the node reads it once, at its start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lab: str
    node: NodeSpec
    kubeconfig: Path
    """With the identity system:node:NAME."""
    programs: Programs
    archives: tuple[Path, ...]
    """OCI or docker image archives that are imported before the kubelet starts."""
    serving_cert: Path
    serving_key: Path
    client_ca: Path
    data_dir: Path
    """On disk: images, snapshots, volumes, configuration."""
    log_dir: Path
    keep: tuple[Path, ...]
    """Folders of the machine that stay visible where the node has its own: see `init`."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError or pydantic.ValidationError."""
        return cls.model_validate_json(path.read_bytes())

    @property
    def cni(self) -> Path:
        return self.data_dir / "cni"


def containerd(config: RealNodeConfig) -> str:
    """containerd's configuration (TOML); see its documentation of the CRI plugins."""
    return f"""version = 3
root = "{config.data_dir}/containerd"
state = "/run/shoal-containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{SOCKET}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{SANDBOX_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  # Without it sandboxes need CAP_SYS_RESOURCE, which a privileged container may lack.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{config.programs.runtime}"]
    conf_dir = "{config.cni}"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "{config.programs.runc}"
        SystemdCgroup = false
"""


def pod_network(config: RealNodeConfig) -> dict[str, Any]:
    """CNI: pods hang on the same bridge as those of process nodes, each node with a /24 of its addresses."""
    prefix = f"{network.POD_PREFIX}.{config.node.index}"
    addresses = {
        "subnet": f"{network.POD_PREFIX}.0.0/16",
        "rangeStart": f"{prefix}.2",
        "rangeEnd": f"{prefix}.253",
        "gateway": network.GATEWAY,
    }
    bridge = {
        "type": "bridge",
        "bridge": network.BRIDGE,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(config.data_dir / "addresses"),
            "ranges": [[addresses]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {"cniVersion": "1.0.0", "name": "lab", "plugins": [bridge]}


def kubelet(config: RealNodeConfig) -> dict[str, Any]:
    """KubeletConfiguration."""
    node = config.node
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.HOST,
        "port": node.kubelet_port,
        "healthzPort": 0,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(config.client_ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(config.serving_cert),
        "tlsPrivateKeyFile": str(config.serving_key),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.parent(config.lab, node.name),
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "failCgroupV1": False,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "clusterDNS": [network.DNS],
        "clusterDomain": network.DOMAIN,
        "resolvConf": "/etc/resolv.conf",
        "volumePluginDir": str(config.data_dir / "plugins"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": False,
        "maxPods": node.capacity.pods,
        "nodeStatusUpdateFrequency": "2s",
        # Renewed four times in it, so that also a lab which notices dead nodes early sees a live one.
        "nodeLeaseDurationSeconds": 8,
        "registerWithTaints": [taint.model_dump() for taint in node.taints],
    }


def labels(config: RealNodeConfig) -> str:
    """For --node-labels: those that a kubelet sets by itself left out."""
    return ",".join(f"{k}={v}" for k, v in config.node.labels.items() if k not in _SET_BY_KUBELET)


def write(config: RealNodeConfig) -> None:
    """Writes containerd.toml, kubelet.yaml and the CNI configuration below `data_dir`. Raises OSError."""
    for folder in (config.cni, config.data_dir / "plugins", config.data_dir / "addresses"):
        folder.mkdir(parents=True, exist_ok=True)
    (config.data_dir / "containerd.toml").write_text(containerd(config))
    (config.data_dir / "kubelet.yaml").write_text(yaml.safe_dump(kubelet(config)))
    (config.cni / "10-lab.conflist").write_text(json.dumps(pod_network(config)))
    loopback = {"cniVersion": "1.0.0", "name": "lo", "plugins": [{"type": "loopback"}]}
    (config.cni / "99-loopback.conflist").write_text(json.dumps(loopback))
