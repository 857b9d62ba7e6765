"""From a container's spec to what the spawner starts: image, environment, user, mounts."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_dev.lab.node import fields, images
from shoal_dev.lab.node.config import GPU_RESOURCE, ImageConfig
from shoal_dev.lab.node.env import ConfigError, expand, field_value, resource_value
from shoal_dev.lab.node.linux import CAPABILITIES
from shoal_dev.lab.node.objects import MissingObject
from shoal_dev.lab.node.projection import content
from shoal_dev.lab.node.rootfs import ContainerSpec, Mount, User

if TYPE_CHECKING:
    from shoal_dev.lab.node.container import NodeContainer

Json = dict[str, Any]

GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""MiB of one GPU, as GPU feature discovery writes it."""
_DEFAULT_CAPABILITIES = [
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
]  # fmt: skip
"""containerd's."""


class CreateError(Exception):
    """The spec makes no container: reason CreateContainerError."""


@dataclass(frozen=True, slots=True)
class Launch:
    spec: ContainerSpec
    log: Path
    message: Path
    """The termination message, on this machine."""


async def prepare(container: "NodeContainer") -> Launch:
    """Raises images.UnknownImage, ConfigError, MissingObject, CreateError, and what the API client raises."""
    pod, spec = container.pod, container.spec
    node = pod.node
    row = images.find(node.config.images, spec["image"])
    image = node.config.images[row]
    env = await environment(container, image)
    command = [expand(word, env) for word in fields.words(spec, "command")]
    arguments = [expand(word, env) for word in fields.words(spec, "args")]
    argv = (command or list(image.command)) + arguments
    if not argv:
        raise CreateError(f'no command specified: the pod names none, and the image "{spec["image"]}" has none')
    who = user(pod.spec, spec, image)
    env.setdefault("HOME", "/root" if who["uid"] == 0 else "/")
    restart = container.record.restarts
    folder = pod.folder / "containers" / container.name / str(restart)
    folder.mkdir(parents=True, exist_ok=True)
    message = folder / "termination-log"
    message.touch()
    message.chmod(0o666)
    mounts = [
        *(_mount(bind.host, bind.container, bind.read_only) for bind in image.binds),
        *pod.files(),
        _mount(message, spec.get("terminationMessagePath") or "/dev/termination-log", False),
    ]
    for wanted in fields.items(spec, "volumeMounts"):
        volume = pod.volumes.source(wanted, env, expand)
        mounts.append(_mount(volume.path, wanted["mountPath"], volume.read_only or bool(wanted.get("readOnly"))))
    security: Json = fields.mapping(spec, "securityContext")
    made = ContainerSpec(
        sandbox=pod.uid,
        folder=str(folder),
        argv=argv,
        env=env,
        cwd=spec.get("workingDir") or "/",
        user=who,
        mounts=sorted(mounts, key=lambda mount: mount["target"].count("/")),
        host_mounts=node.host_mounts,
        passable=node.passable[row],
        read_only_root=bool(security.get("readOnlyRootFilesystem")),
    )
    return Launch(made, log_path(container, restart), message)


def log_path(container: "NodeContainer", restart: int) -> Path:
    return container.pod.log_folder / container.name / f"{restart}.log"


def _mount(source: Path, target: str, read_only: bool) -> Mount:
    return Mount(source=str(source), target=target, read_only=read_only)


async def environment(container: "NodeContainer", image: ImageConfig) -> dict[str, str]:
    """In a kubelet's order: image, envFrom, env; later ones win, and may use earlier ones. Raises ConfigError."""
    pod, spec = container.pod, container.spec
    config = pod.node.config
    path = ":".join((*image.path_prepend, images.DEFAULT_PATH))
    env = {"PATH": path, "HOSTNAME": pod.hostname, **image.env}
    env |= {"KUBERNETES_SERVICE_HOST": config.service_address, "KUBERNETES_SERVICE_PORT": "443"}
    env |= {"KUBERNETES_SERVICE_PORT_HTTPS": "443", "KUBERNETES_PORT": f"tcp://{config.service_address}:443"}
    if pod.node.node.capacity.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, pod.gpus_of(container.name)))
        if memory := pod.node.node.labels.get(GPU_MEMORY_LABEL):
            # What a driver would tell an engine; the simulator is told so.
            env["SHOAL_SIM_GPU_MEMORY_MIB"] = memory
    elif (dra := pod.node.node.dra) is not None and (indexes := pod.gpus_of(container.name)):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indexes))
        env["SHOAL_SIM_GPU_MEMORY_MIB"] = str(dra.memory_mib)
    for source in fields.items(spec, "envFrom"):
        plural, reference = _reference(source)
        prefix: str = source.get("prefix") or ""
        for key, value in (await _read(container, plural, reference)).items():
            env[prefix + key] = value.decode(errors="replace")
    for entry in fields.items(spec, "env"):
        value = await _value(container, entry, env)
        if value is not None:
            env[entry["name"]] = value
    return env


async def _value(container: "NodeContainer", entry: Json, env: dict[str, str]) -> str | None:
    pod = container.pod
    source: Json = fields.mapping(entry, "valueFrom")
    if "fieldRef" in source:
        path = source["fieldRef"]["fieldPath"]
        return field_value(pod.pod, path, pod.address, pod.node.node.name, pod.node.config.host_address)
    if "resourceFieldRef" in source:
        reference: Json = source["resourceFieldRef"]
        spec = pod.container_spec(reference.get("containerName") or container.name)
        return resource_value(spec, reference, pod.node.node.capacity.resources())
    for kind, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if kind in source:
            reference = source[kind]
            data = await _read(container, plural, reference)
            if reference["key"] in data:
                return data[reference["key"]].decode(errors="replace")
            if reference.get("optional"):
                return None
            what = "Secret" if plural == "secrets" else "ConfigMap"
            where = f"{pod.metadata['namespace']}/{reference['name']}"
            raise ConfigError(f"couldn't find key {reference['key']} in {what} {where}")
    if source:
        raise ConfigError(f"the lab's nodes have no env from {', '.join(source)}")
    return expand(entry.get("value") or "", env)


def _reference(source: Json) -> tuple[str, Json]:
    return ("configmaps", source["configMapRef"]) if "configMapRef" in source else ("secrets", source["secretRef"])


async def _read(container: "NodeContainer", plural: str, reference: Json) -> dict[str, bytes]:
    pod = container.pod
    try:
        return content(await pod.node.objects.get(plural, pod.metadata["namespace"], reference["name"]))
    except MissingObject:
        if reference.get("optional"):
            return {}
        raise


def user(pod: Json, container: Json, image: ImageConfig) -> User:
    """Raises ConfigError when the image would run as root and must not."""
    shared: Json = fields.mapping(pod, "securityContext")
    own: Json = fields.mapping(container, "securityContext")
    both: Json = shared | own
    uid = int(both.get("runAsUser", image.user))
    if both.get("runAsNonRoot") and uid == 0:
        raise ConfigError("container has runAsNonRoot and image will run as root")
    gid = int(both.get("runAsGroup", 0))
    groups = {int(group) for group in fields.words(shared, "supplementalGroups")}
    if "fsGroup" in shared:
        groups.add(int(shared["fsGroup"]))
    wanted: Json = fields.mapping(own, "capabilities")
    if own.get("privileged"):
        capabilities = list(CAPABILITIES)
    else:
        dropped = fields.words(wanted, "drop")
        added = [name.removeprefix("CAP_") for name in fields.words(wanted, "add")]
        kept = [] if "ALL" in dropped else [name for name in _DEFAULT_CAPABILITIES if name not in dropped]
        capabilities = list(CAPABILITIES) if "ALL" in added else kept + added
    return User(
        uid=uid,
        gid=gid,
        groups=sorted(groups),
        capabilities=capabilities,
        no_new_privileges=own.get("allowPrivilegeEscalation") is False,
    )


def gpu_count(spec: Json) -> int:
    resources: Json = fields.mapping(spec, "resources")
    return int(fields.mapping(resources, "limits").get(GPU_RESOURCE, 0))
