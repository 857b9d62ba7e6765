"""What a node with a real kubelet is told, and the images that it imports."""

import gzip
import hashlib
import io
import json
import os
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from shoal_dev.lab.fleet import FleetFile
from shoal_dev.lab.realnode import archive, cgroups, config
from shoal_dev.lab.realnode.programs import Programs

FLEET = {"nodes": [{"name": "cpu-1"}, {"name": "real-1", "realKubelet": True, "labels": {"zone": "a"}}]}


@pytest.fixture
def node(tmp_path: Path) -> config.RealNodeConfig:
    spec = FleetFile.model_validate(FLEET).running(tmp_path)[1]
    return config.RealNodeConfig(
        lab="mine",
        node=spec,
        kubeconfig=tmp_path / "kubeconfig",
        programs=Programs(kubelet=tmp_path / "kubelet", runtime=tmp_path / "bin", runc=Path("/usr/sbin/runc")),
        archives=(),
        serving_cert=tmp_path / "crt",
        serving_key=tmp_path / "key",
        client_ca=tmp_path / "ca",
        data_dir=tmp_path / "data",
        log_dir=tmp_path / "logs",
        keep=(),
    )


def test_a_fleet_names_its_real_nodes() -> None:
    fleet = FleetFile.model_validate(FLEET)
    assert fleet.with_real_kubelet() == {"real-1"}
    assert fleet.archives == ()
    with pytest.raises(ValidationError, match="a node with realKubelet runs its pods: leave statusOnly out"):
        FleetFile.model_validate({"nodes": [{"name": "x", "realKubelet": True, "statusOnly": True}]})


def test_the_configuration_files_agree_with_each_other(node: config.RealNodeConfig) -> None:
    config.write(node)
    containerd = tomllib.loads((node.data_dir / "containerd.toml").read_text())
    kubelet = yaml.safe_load((node.data_dir / "kubelet.yaml").read_text())
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{containerd['grpc']['address']}"
    runtime = containerd["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["cni"]["conf_dir"] == str(node.cni)
    assert kubelet["cgroupRoot"] == cgroups.parent("mine", "real-1") == "/shoal-lab-mine/real-1"
    (network,) = json.loads((node.cni / "10-lab.conflist").read_text())["plugins"]
    (addresses,) = network["ipam"]["ranges"][0]
    assert (addresses["subnet"], addresses["rangeStart"]) == ("10.244.0.0/16", "10.244.2.2"), "as other nodes' pods"
    assert config.labels(node) == "zone=a", "a kubelet sets its own, and refuses to be told"


def test_an_archive_is_an_image_that_runtimes_can_check(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "pause").write_bytes(b"program")
    (root / "bin" / "pause").chmod(0o755)
    os.utime(root / "bin" / "pause", (1_700_000_000.5, 1_700_000_000.5))
    target = tmp_path / "image.tar"
    archive.write(root, "localhost/pause:1", target, ["/bin/pause"])
    with tarfile.open(target) as tar:

        def read(name: str) -> bytes:
            member = tar.extractfile(name)
            assert member is not None
            return member.read()

        def blob(descriptor: dict[str, object]) -> bytes:
            content = read(f"blobs/sha256/{str(descriptor['digest']).removeprefix('sha256:')}")
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
            assert len(content) == descriptor["size"]
            return content

        (named,) = json.loads(read("index.json"))["manifests"]
        assert named["annotations"]["io.containerd.image.name"] == "localhost/pause:1"
        manifest = json.loads(blob(named))
        image = json.loads(blob(manifest["config"]))
        layer = gzip.decompress(blob(manifest["layers"][0]))
    assert image["config"]["Entrypoint"] == ["/bin/pause"]
    assert image["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        entry = tar.getmember("./bin/pause")
        assert (entry.uid, entry.gid, entry.mode, entry.mtime) == (0, 0, 0o755, 1_700_000_000)
