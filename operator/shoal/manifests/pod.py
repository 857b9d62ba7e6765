"""The engine pod: agent sidecar, stage init container, engine. Restricted Pod Security Standard, no Kubernetes
token."""

from typing import Final

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import Toleration
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.sources import engine_model_path
from shoal.core import children
from shoal.core.capabilities import may_read_media
from shoal.core.placement.steering import steering
from shoal.core.podquota import queue_labels
from shoal.core.sharing import STRATEGIES, strategy_label
from shoal.engine.kinds import DEFAULT, kind_of
from shoal.engine.port import STARTUP_SECONDS, EngineLaunch
from shoal.engine.wires import differences_of
from shoal.manifests import cache, devices, pool, sidecar, source
from shoal.manifests.parts import (
    LOCKED_DOWN,
    RESTRICTED,
    TMP,
    env_field,
    env_value,
    mount,
    optional,
    pull_secrets,
    security,
)
from shoal.manifests.resources import cached, engine_resources, stage_resources
from shoal.manifests.shape import VariantShape, engine_row, labels

_NVIDIA: Final = "nvidia.com/"
GRACE_SECONDS: Final = 60
"""Added to `drainSeconds`: time for the engine to terminate."""
STALLED_GRACE_SECONDS: Final = 30
"""Time from SIGTERM to SIGKILL of a stalled engine."""


def hand_on(repeat: float | None = None) -> str:
    """The script that runs a program, given as the script's arguments, and forwards SIGTERM to it; with `repeat` again
    after so many seconds, until the program has ended. See HAND_ON."""
    stop = "kill -TERM $child"
    if repeat is not None:
        stop = f"while {stop} 2>/dev/null; do sleep {repeat:g}; done &"
    return f"""\
"$@" & child=$!
trap '{stop}' TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
wait $child 2>/dev/null; last=$?
[ $last = 127 ] || code=$last
exit $code"""


HAND_ON: Final = hand_on()
"""Runs a program, given as the script's arguments, and forwards SIGTERM to it.

PID 1 of a container has no default action for signals: a program that is still starting would ignore SIGTERM until it
has a handler, and its pod would hold its GPUs for the whole grace period. Therefore the shell stays PID 1, and the
program, which is not PID 1, is ended by the signal's default action as long as it has no handler. The trap is set only
after the fork: a child that inherits it would swallow a signal that arrives before its exec. Until then, for the first
milliseconds, PID 1 ignores the signal; SETTLE keeps the kubelet from sending it so early. The exit code is the
program's.
"""

SETTLE: Final[JsonObject] = {"exec": {"command": ["sleep", "1"]}}
"""preStop hook of containers that start with HAND_ON. A pod may be deleted while the kubelet starts its container,
which then gets SIGTERM in its first milliseconds. A sidecar's hook runs while the engine drains and terminates, so it
costs no time."""


SILENT_ROUNDS: Final = 75
"""Rounds of the drain hook, 0.2 s each, after which the agent counts as dead. 15 s: a gateway without messages of the
agent uses the replica for 12 s at most, and a crashed container is back in a few seconds."""


def start_script(boot_file: str, *stale: str, repeat: float | None = None) -> str:
    """The script that runs the engine, given as its arguments. `repeat`: see `hand_on`.

    A new boot id per start of the process shows the agent a restart without a Kubernetes token. `stale` are files that
    an earlier process of this pod may have left. The rest is HAND_ON; the drain hook of the engine includes SETTLE.
    """
    return f"cat /proc/sys/kernel/random/uuid > {boot_file} && rm -f {' '.join(stale)} || exit 1\n{hand_on(repeat)}"


def drain_script(drain_file: str, state_file: str, *, settle: float = 1, rounds: int = SILENT_ROUNDS) -> str:
    """The engine's preStop hook: asks the agent for a drain, and returns when the engine may be stopped.

    The hook creates a file, and the agent removes it when the drain is done: no port, no token, and a restarted agent
    continues where its predecessor was. A second call, after a restart of the kubelet, joins the first. The agent
    limits the drain; the hook only checks that the agent is alive. An agent that dies while its pod terminates is not
    restarted: SIGTERM then follows after `rounds`, and the engine finishes its requests by itself. The first second is
    that of SETTLE.
    """
    return f"""\
[ -e {drain_file} ] || : > {drain_file} || exit 1
sleep {settle:g}
last= silent=0
while [ -e {drain_file} ]; do
  state=
  {{ read -r state < {state_file}; }} 2>/dev/null
  if [ "$state" = "$last" ]; then silent=$((silent + 1)); else silent=0 last=$state; fi
  [ $silent -lt {rounds} ] || exit 0
  sleep 0.2 || sleep 1
done"""


def template(shape: VariantShape) -> JsonObject:
    """The pod template of a variant's Deployment."""
    model, config = shape.model, shape.config
    own = model.spec.pod
    return {
        "metadata": {
            "labels": {
                **own.labels,
                **queue_labels(model),
                **source.identity_labels(model),
                **labels(model),
                names.LABEL_GPU_CLASS: shape.gpu_class.metadata.name,
            },
            "annotations": {
                **own.annotations,
                names.ANNOTATION_INSTALL_KEY: shape.install_key,
                names.ANNOTATION_ENGINE: model.spec.engine.type,
                names.ANNOTATION_ENGINE_VERSION: shape.version,
                "kubectl.kubernetes.io/default-container": names.CONTAINER_ENGINE,
                **({names.ANNOTATION_TOOLS: names.TOOLS_COMPILED} if _compiles_tools(shape) else {}),
                **({names.ANNOTATION_MEDIA: names.MEDIA_NONE} if _reads_text_only(shape) else {}),
                **({names.ANNOTATION_TRANSPORT: names.TRANSPORT_MTLS} if shape.mtls else {}),
                **devices.annotations(shape),
            },
        },
        "spec": {
            **optional("serviceAccountName", own.service_account_name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": model.spec.drain_seconds + GRACE_SECONDS,
            "securityContext": security(config),
            **_scheduling(shape),
            **optional("tolerations", [_toleration(t) for t in shape.gpu_class.spec.tolerations]),
            **optional("imagePullSecrets", pull_secrets(model, config)),
            **optional("priorityClassName", priority_class(model, config)),
            "initContainers": [_agent(shape), *([_tls(shape)] if shape.mtls else []), _stage(shape)],
            "containers": [_engine(shape)],
            **optional("resourceClaims", devices.pod_claims(shape)),
            "volumes": _volumes(shape),
        },
    }


def priority_class(model: Model, config: OperatorConfig) -> str:
    """The PriorityClass of the Model's pods: that of its band, or the common one."""
    if config.pods.priority_class_name:
        return config.pods.priority_class_name
    reached = [band for band in config.pods.priority_bands if band.minimum <= model.spec.priority]
    return max(reached, key=lambda band: band.minimum).name if reached else ""


def _scheduling(shape: VariantShape) -> JsonObject:
    """Node selection: nodes of the class, with the plan's preferences."""
    uid = shape.model.metadata.uid
    prefers = steering(gpu_class=shape.gpu_class.metadata.name, model_uid=uid, gpus=shape.gpus)
    expressions = [
        {"key": key, "operator": "In", "values": [label]}
        for key, label in sorted(shape.gpu_class.spec.node_selector.items())
    ]
    # Always the same, so that a node that is taken out of use rolls no Deployment.
    quarantined = f"{names.QUARANTINE_PREFIX}{shape.gpu_class.metadata.name}"
    expressions.append({"key": quarantined, "operator": "DoesNotExist"})
    if (resource := shape.gpu_class.spec.extended_resource) and resource.startswith(_NVIDIA):
        # Nodes with shared GPUs do not count, and the scheduler must not use them either.
        expressions.append({"key": strategy_label(resource), "operator": "NotIn", "values": list(STRATEGIES)})
    terms = [{"matchExpressions": expressions}]
    affinity: JsonObject = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    if prefers.near is not None:
        term = {
            "labelSelector": {"matchLabels": dict(prefers.near.labels)},
            "namespaceSelector": {},  # an empty selector matches all
            "topologyKey": prefers.topology_key,
        }
        affinity["podAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": prefers.near.weight, "podAffinityTerm": term}
            ]
        }
    spread: JsonObject = {
        "labelSelector": {"matchLabels": dict(prefers.apart.labels)},
        "maxSkew": prefers.apart.max_skew,
        "topologyKey": prefers.topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
    }
    return {**optional("affinity", affinity), "topologySpreadConstraints": [spread]}


def _toleration(toleration: Toleration) -> JsonObject:
    return toleration.model_dump(mode="json", by_alias=True, exclude_none=True)


def _agent(shape: VariantShape) -> JsonObject:
    config = shape.config
    return {
        "name": names.CONTAINER_AGENT,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "restartPolicy": "Always",
        "command": ["sh", "-c", HAND_ON, names.CONTAINER_AGENT, "shoal", "agent", "serve"],
        "ports": [
            {"name": "agent", "containerPort": names.AGENT_PORT, "protocol": "TCP"},
            *([_port("agent-tls", names.AGENT_TLS_PORT)] if shape.mtls else []),
        ],
        "env": [
            env_field("POD_NAME", "metadata.name"),
            env_field("POD_NAMESPACE", "metadata.namespace"),
            env_field("POD_IP", "status.podIP"),
            env_field("NODE_NAME", "spec.nodeName"),
            env_value("SHOAL_AGENT_DRAIN_SECONDS", str(shape.model.spec.drain_seconds)),
            env_value("SHOAL_AGENT_STALL_SECONDS", str(shape.model.spec.stall_seconds)),
            *_agent_engine(shape),
            *([env_value("SHOAL_AGENT_TLS_DIR", names.TLS_DIR)] if shape.mtls else []),
            *([env_value(names.ADMISSION_ENV, "true")] if shape.mtls and config.ext_proc.enabled else []),
            *([cache.AGENT_ENV] if cached(shape) else []),
            *pool.agent_env(shape),
        ],
        "startupProbe": _http_probe("/healthz", names.AGENT_PORT, period=1, failures=60),
        "lifecycle": {"preStop": SETTLE},
        "resources": pool.agent_resources(shape),
        "securityContext": LOCKED_DOWN,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            mount("run", names.RUN_DIR),
            mount("agent-tmp", TMP),
            mount("agent-key", names.KEYS_DIR, read_only=True),
            *_tls_mount(shape),
            *_cache_mount(shape),
            *pool.agent_mounts(shape),
        ],
    }


def _tls(shape: VariantShape) -> JsonObject:
    """The TLS sidecar in front of the engine. As a native sidecar it starts before the engine and stops after it."""
    config = shape.config
    sidecar_config = config.transport.sidecar
    return {
        "name": names.CONTAINER_TLS,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "restartPolicy": "Always",
        "command": ["sh", "-c", HAND_ON, names.CONTAINER_TLS, *sidecar.command(config, kind_of(shape.model).pod)],
        "ports": [
            _port("engine-tls", names.ENGINE_TLS_PORT),
            *([_port("engine-proxy", names.ENGINE_PROXY_PORT)] if config.ext_proc.enabled else []),
            _port("engine-probe", names.ENGINE_PROBE_PORT),
        ],
        "lifecycle": {"preStop": SETTLE},
        "resources": {
            "requests": {"cpu": sidecar_config.cpu, "memory": sidecar_config.memory},
            "limits": {"memory": sidecar_config.memory},
        },
        "securityContext": LOCKED_DOWN,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount("agent-tmp", TMP), *_tls_mount(shape)],
    }


def _stage(shape: VariantShape) -> JsonObject:
    """Fetches the weights. It has no startup probe, which would kill a long download."""
    model, config = shape.model, shape.config
    return {
        "name": names.CONTAINER_STAGE,
        "image": config.agent.image,
        "imagePullPolicy": config.agent.pull_policy,
        "command": ["sh", "-c", HAND_ON, names.CONTAINER_STAGE, "shoal", "agent", "stage"],
        "env": [
            *source.environment(model, config, shape.facts),
            *([cache.STAGE_ENV] if cached(shape) else []),
        ],
        "resources": stage_resources(shape),
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [
            mount("models", names.MODELS_DIR),
            mount("run", names.RUN_DIR),
            mount("home", names.HOME_DIR),
            mount("agent-tmp", TMP),
            *source.mounts(model, config),
            *_cache_mount(shape),
        ],
    }


def _engine(shape: VariantShape) -> JsonObject:
    model, config = shape.model, shape.config
    row, kind = engine_row(model, config), kind_of(model).pod
    probed = names.ENGINE_PROBE_PORT if shape.mtls else names.ENGINE_PORT
    env = dict(kind.environment(pool=shape.pool is not None))
    env |= {e.name: e.value for e in row.env} | {e.name: e.value for e in model.spec.pod.env}
    return {
        "name": names.CONTAINER_ENGINE,
        "image": row.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "sh",
            "-c",
            start_script(
                names.BOOT_FILE,
                names.STALLED_FILE,
                names.DRAIN_FILE,
                names.DRAIN_STATE_FILE,
                repeat=kind.repeat_stop_seconds,
            ),
            "engine",
            *row.command,
        ],
        "args": list(_engine_args(shape)),
        "env": [env_value(name, value) for name, value in env.items()],
        **({} if shape.mtls else {"ports": [_port("engine", names.ENGINE_PORT)]}),
        "startupProbe": _http_probe(kind.ready_path, probed, period=2, failures=STARTUP_SECONDS // 2),
        "readinessProbe": _http_probe(kind.ready_path, probed, period=5, failures=3),
        # The probe checks a file that the agent writes when the engine makes no progress. It uses neither the engine's
        # own probe, which answers beside a scheduler that hangs, nor the agent, whose restart must not kill a working
        # engine.
        "livenessProbe": {
            "exec": {"command": ["test", "!", "-e", names.STALLED_FILE]},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
            # A stalled engine is not waited for: a hanging process ignores SIGTERM, and the pod's grace period covers
            # its longest request.
            "terminationGracePeriodSeconds": STALLED_GRACE_SECONDS,
        },
        # On the engine and not on the agent: a sidecar's hook starts at once and delays nothing.
        "lifecycle": {
            "preStop": {"exec": {"command": ["sh", "-c", drain_script(names.DRAIN_FILE, names.DRAIN_STATE_FILE)]}}
        },
        "resources": {**engine_resources(shape, with_gpus=True), **devices.container_claims(shape)},
        # Kernel compilers cache below HOME and /tmp, and GPU libraries map files of /dev/shm: all of them are volumes.
        "securityContext": LOCKED_DOWN if config.pods.read_only_root else RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            mount("models", names.MODELS_DIR, read_only=True),
            mount("run", names.RUN_DIR),
            mount("home", names.HOME_DIR),
            mount("tmp", TMP),
            mount("shm", "/dev/shm"),  # noqa: S108 - shared memory between the engine's processes
            mount("engine-key", names.KEYS_DIR, read_only=True),
            *source.source_mount(model),
            *_cache_mount(shape),
            *pool.engine_mounts(shape),
        ],
    }


def _compiles_tools(shape: VariantShape) -> bool:
    """Whether the engine may make a grammar of any tools. Gateways cannot know it of an engine that has settings of the
    chart, or that of an earlier specification of the Model."""
    spec, row = shape.model.spec, engine_row(shape.model, shape.config)
    parser = spec.engine.tool_call_parser
    variables = (variable.name for variable in (*row.env, *spec.pod.env))
    settings = [*row.args, *spec.engine.extra_args, *variables]
    return parser is not None and differences_of(spec.engine.type).compiles_tools(parser, settings)


def _reads_text_only(shape: VariantShape) -> bool:
    """Whether the engine reads no images and sounds, though one does with such weights, by its type or its arguments.
    Pods of other weights say nothing, so that none of them is replaced for it."""
    spec, facts = shape.model.spec, shape.facts
    if facts is None or not may_read_media(facts):
        return False
    args = [*engine_row(shape.model, shape.config).args, *spec.engine.extra_args]
    return not differences_of(spec.engine.type).reads_media(facts, args)


def _engine_args(shape: VariantShape) -> tuple[str, ...]:
    model = shape.model
    launch = EngineLaunch(
        model,
        shape.version,
        model_path=engine_model_path(model.spec.source.uri),
        port=names.ENGINE_PORT,
        gpus=shape.gpus,
        platform_args=engine_row(model, shape.config).args,
        quantization=shape.variant.quantization if shape.variant else None,
        pool=shape.pool,
        facts=shape.facts,
        # Clients outside the pod connect through the sidecar.
        **({"host": "127.0.0.1"} if shape.mtls else {}),
    )
    return kind_of(model).pod.args(launch)


def _agent_engine(shape: VariantShape) -> list[JsonObject]:
    """What the agent has to know of its engine. The default kind and what the engine says itself are left out."""
    kind = kind_of(shape.model)
    limit = kind.pod.max_running(_engine_args(shape))
    return [
        *([env_value(names.ENGINE_ENV, kind.type)] if kind is not DEFAULT else []),
        *([env_value(names.MAX_RUNNING_ENV, str(limit))] if limit is not None else []),
    ]


def _cache_mount(shape: VariantShape) -> list[JsonObject]:
    return [cache.POD_MOUNT] if cached(shape) else []


def _tls_mount(shape: VariantShape) -> list[JsonObject]:
    return [mount("tls", names.TLS_DIR, read_only=True)] if shape.mtls else []


def _volumes(shape: VariantShape) -> list[JsonObject]:
    model, config = shape.model, shape.config
    secret = children.keys_secret(model.metadata.name, shape.install_key, kind_of(model).pod.keys_suffix)
    return [
        {"name": "run", "emptyDir": {}},
        {"name": "models", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "agent-tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, shape.gpus)}Gi"}},
        _secret_volume("engine-key", secret, "engine.yaml"),
        _secret_volume("agent-key", secret, "agent.json"),
        *(
            [{"name": "tls", "secret": {"secretName": children.certificate_secret(model.metadata.name)}}]
            if shape.mtls
            else []
        ),
        *source.volumes(model, config),
        *([cache.pod_volume(config.cache)] if cached(shape) else []),
        *pool.volumes(shape),
    ]


def _secret_volume(name: str, secret: str, key: str) -> JsonObject:
    """One key of a Secret, so that no container sees the keys of another."""
    return {"name": name, "secret": {"secretName": secret, "items": [{"key": key, "path": key}]}}


def _port(name: str, number: int) -> JsonObject:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _http_probe(path: str, port: int, *, period: int, failures: int) -> JsonObject:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
