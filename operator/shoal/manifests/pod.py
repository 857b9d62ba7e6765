"""The engine pod: sidecar agent, init container stage, engine. Restricted pod standard, no Kubernetes token."""

from typing import Final

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import Toleration
from shoal.api.meta import JsonObject
from shoal.api.sources import parse_source
from shoal.core import children, quantity
from shoal.engine.launch import engine_args, engine_model_path
from shoal.manifests.shape import Shape, engine_row, labels

STARTUP_SECONDS: Final = 3600
"""Longest load of an engine before it is taken for dead: weights of hundreds of GB, compile caches cold."""
GRACE_SECONDS: Final = 330
"""Time for answers in progress after SIGTERM."""
CA_DIR: Final = "/shoal/ca"

_LOCKED_DOWN: Final[JsonObject] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def start_script(boot_file: str, stalled_file: str) -> str:
    """What runs the engine, given as the script's arguments.

    A new boot id per start of the process tells the agent of a restart without any Kubernetes token. The shell stays
    process number 1 and hands SIGTERM on to the engine, and to nobody else: number 1 has no default action for signals,
    so an engine that is still loading, before it has a handler, would ignore SIGTERM and hold its GPUs for the whole
    grace period. The trap stands before the engine starts, so that no signal falls between (a second SIGTERM changes
    nothing for SGLang). The exit code is the engine's.
    """
    return f"""\
cat /proc/sys/kernel/random/uuid > {boot_file} && rm -f {stalled_file} || exit 1
engine= told=
trap 'told=1; [ -z "$engine" ] || kill -TERM $engine' TERM
"$@" & engine=$!
[ -z "$told" ] || kill -TERM $engine
wait $engine; code=$?
while kill -0 $engine 2>/dev/null; do wait $engine; code=$?; done
wait $engine 2>/dev/null; last=$?
[ $last = 127 ] || code=$last
exit $code"""


def template(shape: Shape) -> JsonObject:
    """The pod template of a variant's Deployment."""
    model, config = shape.model, shape.config
    own = model.spec.pod
    return {
        "metadata": {
            "labels": {**own.labels, **labels(model), names.LABEL_GPU_CLASS: shape.gpu_class.metadata.name},
            "annotations": {
                **own.annotations,
                names.ANNOTATION_INSTALL_KEY: shape.install_key,
                names.ANNOTATION_ENGINE_VERSION: shape.version,
                "kubectl.kubernetes.io/default-container": names.CONTAINER_ENGINE,
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": _security(config),
            "affinity": {"nodeAffinity": _node_affinity(shape)},
            **_optional("tolerations", [_toleration(t) for t in shape.gpu_class.spec.tolerations]),
            **_optional("imagePullSecrets", _pull_secrets(shape)),
            **_optional("priorityClassName", config.pods.priority_class_name),
            "initContainers": [_agent(config), _stage(shape)],
            "containers": [_engine(shape)],
            "volumes": _volumes(shape),
        },
    }


def _security(config: OperatorConfig) -> JsonObject:
    if config.pods.run_as_root:
        return {"seccompProfile": {"type": "RuntimeDefault"}}
    user = config.pods.run_as_user
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _node_affinity(shape: Shape) -> JsonObject:
    expressions = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in sorted(shape.gpu_class.spec.node_selector.items())
    ]
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    }


def _toleration(toleration: Toleration) -> JsonObject:
    return toleration.model_dump(mode="json", by_alias=True, exclude_none=True)


def _pull_secrets(shape: Shape) -> list[JsonObject]:
    wanted = [*shape.config.pods.image_pull_secrets, *(s.name for s in shape.model.spec.pod.image_pull_secrets)]
    return [{"name": name} for name in dict.fromkeys(wanted)]


def _agent(config: OperatorConfig) -> JsonObject:
    return {
        "name": names.CONTAINER_AGENT,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "restartPolicy": "Always",
        "command": ["shoal", "agent", "serve"],
        "ports": [{"name": "agent", "containerPort": names.AGENT_PORT, "protocol": "TCP"}],
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_NAMESPACE", "metadata.namespace"),
            _field("POD_IP", "status.podIP"),
            _field("NODE_NAME", "spec.nodeName"),
        ],
        "startupProbe": _http_probe("/healthz", names.AGENT_PORT, period=1, failures=60),
        "resources": {
            "requests": {"cpu": config.agent.cpu, "memory": config.agent.memory},
            "limits": {"memory": config.agent.memory},
        },
        "securityContext": _LOCKED_DOWN,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_mount("run", names.RUN_DIR), _mount("agent-key", names.KEYS_DIR, read_only=True)],
    }


def _stage(shape: Shape) -> JsonObject:
    """Fetches the weights. It has no startup probe: a probe around a download would kill it."""
    config, source = shape.config, shape.model.spec.source
    env = [
        _value("SHOAL_STAGE_URI", source.uri),
        *([_value("SHOAL_STAGE_DIGEST", source.digest)] if source.digest else []),
        _value("HOME", names.HOME_DIR),
        *([_value("HF_ENDPOINT", config.hub_endpoint)] if config.hub_endpoint else []),
        *_proxy(config),
        *([_value("SSL_CERT_FILE", f"{CA_DIR}/{config.ca_bundle.key}")] if config.ca_bundle.config_map else []),
    ]
    mounts = [
        _mount("models", names.MODELS_DIR),
        _mount("run", names.RUN_DIR),
        _mount("home", names.HOME_DIR),
        *([_mount("source", names.SOURCE_DIR, read_only=True)] if _claim(shape) else []),
        *([_mount("source-secret", names.SOURCE_SECRET_DIR, read_only=True)] if source.secret_ref else []),
        *([_mount("ca", CA_DIR, read_only=True)] if config.ca_bundle.config_map else []),
    ]
    return {
        "name": names.CONTAINER_STAGE,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "command": ["shoal", "agent", "stage"],
        "env": env,
        # The pod reserves the engine's memory anyway, and of init containers only the largest counts.
        "resources": {kind: dict(amounts) for kind, amounts in _engine_resources(shape, with_gpus=False).items()},
        "securityContext": _LOCKED_DOWN,
        "volumeMounts": mounts,
    }


def _engine(shape: Shape) -> JsonObject:
    model, config = shape.model, shape.config
    row = engine_row(model, config)
    args = engine_args(
        model,
        shape.version,
        model_path=engine_model_path(model.spec.source.uri),
        port=names.ENGINE_PORT,
        tensor=shape.gpus,
        platform_args=row.args,
    )
    env = {"HOME": names.HOME_DIR} | {e.name: e.value for e in row.env} | {e.name: e.value for e in model.spec.pod.env}
    return {
        "name": names.CONTAINER_ENGINE,
        "image": row.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "sh",
            "-c",
            start_script(names.BOOT_FILE, names.STALLED_FILE),
            "engine",
            *row.command,
        ],
        "args": list(args),
        "env": [_value(name, value) for name, value in env.items()],
        "ports": [{"name": "engine", "containerPort": names.ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": _http_probe("/ready", names.ENGINE_PORT, period=2, failures=STARTUP_SECONDS // 2),
        "readinessProbe": _http_probe("/ready", names.ENGINE_PORT, period=5, failures=3),
        # Not SGLang's /health, which takes over a second under load, nor the agent, whose restart must not kill an
        # engine that serves: a file that the agent writes when it sees no progress.
        "livenessProbe": {
            "exec": {"command": ["test", "!", "-e", names.STALLED_FILE]},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        },
        "resources": _engine_resources(shape, with_gpus=True),
        "securityContext": _LOCKED_DOWN,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            _mount("models", names.MODELS_DIR, read_only=True),
            _mount("run", names.RUN_DIR),
            _mount("home", names.HOME_DIR),
            _mount("shm", "/dev/shm"),  # noqa: S108 - the engine's processes talk through it
            _mount("engine-key", names.KEYS_DIR, read_only=True),
            *([_mount("source", names.SOURCE_DIR, read_only=True)] if _claim(shape) else []),
        ],
    }


def _engine_resources(shape: Shape, *, with_gpus: bool) -> dict[str, dict[str, str]]:
    own, engines = shape.model.spec.pod.resources, shape.config.engines
    memory = quantity.memory(quantity.parse(engines.memory_per_gpu) * shape.gpus)
    requests = {"cpu": quantity.cpu(quantity.parse(engines.cpu_per_gpu) * shape.gpus), "memory": memory}
    limits = {"memory": memory}
    requests |= {name: _canonical(name, amount) for name, amount in own.requests.items()}
    limits |= {name: _canonical(name, amount) for name, amount in own.limits.items()}
    for name, amount in own.requests.items():
        # A Model that asks for more memory than the chart's amount means it: a limit below would be refused.
        if name in limits and name not in own.limits:
            limits[name] = _canonical(name, amount)
    for name, amount in own.limits.items():
        if name in requests and name not in own.requests and quantity.parse(requests[name]) > quantity.parse(amount):
            requests[name] = _canonical(name, amount)
    if with_gpus:
        gpus = {shape.gpu_class.spec.resource_name: str(shape.gpus)}
        requests, limits = requests | gpus, limits | gpus
    return {"requests": requests, "limits": limits}


def _canonical(name: str, amount: str) -> str:
    """As the API server writes it back: otherwise what is stored would differ from what is sent for ever."""
    number = quantity.parse(amount)
    return quantity.cpu(number) if name == "cpu" else quantity.memory(number) if name == "memory" else str(amount)


def _volumes(shape: Shape) -> list[JsonObject]:
    model, config = shape.model, shape.config
    secret = children.keys_secret(model.metadata.name, shape.install_key)
    claim, secret_ref = _claim(shape), model.spec.source.secret_ref
    volumes: list[JsonObject] = [
        {"name": "run", "emptyDir": {}},
        {"name": "models", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, shape.gpus)}Gi"}},
        _secret_volume("engine-key", secret, "engine.yaml"),
        _secret_volume("agent-key", secret, "agent.json"),
    ]
    if claim:
        volumes.append({"name": "source", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if secret_ref:
        volumes.append({"name": "source-secret", "secret": {"secretName": secret_ref.name}})
    if config.ca_bundle.config_map:
        volumes.append({"name": "ca", "configMap": {"name": config.ca_bundle.config_map}})
    return volumes


def _claim(shape: Shape) -> str:
    return parse_source(shape.model.spec.source.uri).claim


def _secret_volume(name: str, secret: str, key: str) -> JsonObject:
    """One key of a Secret: neither container sees what the other one needs."""
    return {"name": name, "secret": {"secretName": secret, "items": [{"key": key, "path": key}]}}


def _proxy(config: OperatorConfig) -> list[JsonObject]:
    pairs = {
        "HTTP_PROXY": config.proxy.http,
        "HTTPS_PROXY": config.proxy.https,
        "NO_PROXY": config.proxy.no_proxy,
    }
    return [_value(name, value) for name, value in pairs.items() if value]


def _http_probe(path: str, port: int, *, period: int, failures: int) -> JsonObject:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _value(name: str, value: str) -> JsonObject:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> JsonObject:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _mount(name: str, path: str, *, read_only: bool = False) -> JsonObject:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def _optional(name: str, value: object) -> JsonObject:
    """Absent instead of empty, as the API server stores it."""
    return {name: value} if value else {}
