"""Parts of an engine pod for a LoRAPool: the adapters' folder, the pool's credentials, and the memory for both."""

from typing import Final

from shoal.api import names
from shoal.api.adapters import ADAPTERS_ENV, AdapterSettings
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import OperatorConfig
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import quantity
from shoal.core.lora import pool as pools
from shoal.core.status.observed import ModelProblem
from shoal.engine.kinds import kind_of
from shoal.manifests import source
from shoal.manifests.parts import env_value, mount
from shoal.manifests.shape import VariantShape, engine_row

AGENT_MEMORY: Final = 64 * 2**20
"""Additional memory of an agent that fetches adapters: for one adapter at a time, and for its folders."""


def pool_problem(
    pool: LoRAPool, model: Model, facts: ArtifactFacts | None, config: OperatorConfig
) -> ModelProblem | None:
    """Why the Model's engines cannot serve the pool's adapters with their arguments; None: they can."""
    try:
        row = engine_row(model, config)
    except KeyError:
        return None  # the Model is not accepted, which its status reports
    env = {e.name: e.value for e in row.env} | {e.name: e.value for e in model.spec.pod.env}
    kind, engine = kind_of(model).pod, model.spec.engine
    given = kind.given([*row.args, *kind.field_args(engine), *engine.extra_args])
    refusal = kind.pool_problem(pool, given, env)
    return pools.pool_problem(pool, model, facts, refusal=refusal)


def applied(
    pool: LoRAPool | None, model: Model, facts: ArtifactFacts | None, config: OperatorConfig
) -> LoRAPool | None:
    """The pool, if the Model's engines get it: there is no problem, and the Model's facts are known."""
    if pool is None or not pools.usable(facts) or pool_problem(pool, model, facts, config) is not None:
        return None
    return pool


def agent_settings(shape: VariantShape) -> AdapterSettings | None:
    """The agent's settings for the pool; None: there is no pool."""
    return pools.settings(shape.pool, shape.facts) if shape.pool is not None and shape.facts is not None else None


# --- the agent's part -----------------------------------------------------------------------------------------------


def agent_env(shape: VariantShape) -> list[JsonObject]:
    """Environment of an agent that fetches adapters."""
    settings = agent_settings(shape)
    if settings is None:
        return []
    content = settings.model_dump_json(exclude_none=True)
    return [env_value(ADAPTERS_ENV, content), *source.network(shape.config)]


def agent_mounts(shape: VariantShape) -> list[JsonObject]:
    """Mounts of an agent that fetches adapters: only the agent writes the folder and sees the credentials."""
    if shape.pool is None:
        return []
    return [
        mount("adapters", names.ADAPTERS_DIR),
        mount("home", names.HOME_DIR),
        *source.certificates(shape.config),
        *credential_mounts(shape.pool),
    ]


def agent_resources(shape: VariantShape) -> dict[str, dict[str, str]]:
    """Requests and limits of the agent."""
    config = shape.config.agent
    if shape.pool is None or shape.facts is None:
        return {"requests": {"cpu": config.cpu, "memory": config.memory}, "limits": {"memory": config.memory}}
    memory = quantity.memory(quantity.parse(config.memory) + AGENT_MEMORY)
    files = quantity.memory(pools.whole_mebibytes(pools.host_bytes(shape.pool, shape.facts)))
    return {
        "requests": {"cpu": config.cpu, "ephemeral-storage": files, "memory": memory},
        "limits": {"memory": memory},
    }


def credential_mounts(pool: LoRAPool) -> list[JsonObject]:
    """Mounts of the pool's Secrets, in the order of their prefixes."""
    return [
        mount(f"adapter-secret-{place}", f"{names.ADAPTER_SECRETS_DIR}/{place}", read_only=True)
        for place in range(len(pool.spec.credentials))
    ]


def credential_volumes(pool: LoRAPool) -> list[JsonObject]:
    """The volumes of these mounts. A missing Secret does not keep a pod from starting: the sources that need it report
    it, and the agent sees the Secret soon after it is created."""
    return [
        {"name": f"adapter-secret-{place}", "secret": {"secretName": one.secret_ref.name, "optional": True}}
        for place, one in enumerate(pool.spec.credentials)
    ]


# --- the engine's part ----------------------------------------------------------------------------------------------


def engine_mounts(shape: VariantShape) -> list[JsonObject]:
    """Mounts of the engine: it reads the files that the agent has staged."""
    return [] if shape.pool is None else [mount("adapters", names.ADAPTERS_DIR, read_only=True)]


def engine_memory(shape: VariantShape) -> int:
    """Additional host memory of the engine in bytes: each of its processes keeps a complete copy of the adapters."""
    if shape.pool is None or shape.facts is None:
        return 0
    adapters = kind_of(shape.model).pod.adapters_in_memory(shape.pool)
    return int(pools.whole_mebibytes(shape.gpus * pools.host_bytes(shape.pool, shape.facts, adapters)))


def volumes(shape: VariantShape) -> list[JsonObject]:
    """The adapters' folder, with a size limit, and the pool's Secrets."""
    settings = agent_settings(shape)
    if shape.pool is None or settings is None:
        return []
    limit = quantity.memory(pools.whole_mebibytes(pools.folder_bytes(settings)))
    return [{"name": "adapters", "emptyDir": {"sizeLimit": limit}}, *credential_volumes(shape.pool)]
