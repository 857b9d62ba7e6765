"""Whether the base model that an adapter's config names can be the base that its pool serves.

An adapter for another base of the same shapes loads, and its answers are wrong. Only the name in its config tells of
that. The name is no proof: it may be a folder of the machine that trained the adapter, or another copy of the same
model. So a difference is a warning, and the pool lists further names of its base.
"""

from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model


def other_base(named: str | None, pool: LoRAPool, model: Model) -> str:
    """The warning about an adapter whose config names the base `named`; "": it names the pool's base, or none."""
    source = model.spec.source.uri
    if not named or _name(named) in {_name(known) for known in (source, model.metadata.name, *pool.spec.base_names)}:
        return ""
    return (
        f"its adapter_config.json names the base {named}, and Model {model.key} serves {source}: the shapes agree, so "
        f"the adapter loads, but on another base its answers are wrong. If both are the same model, add {named} to "
        f"spec.baseNames of pool {pool.key}"
    )


def _name(uri: str) -> str:
    """The last part of a path or URI, without its revision, in lower case: `hf://Owner/Repo@main` -> `repo`."""
    path = uri.strip().rstrip("/").rpartition("/")[2]
    return path.partition("@")[0].lower()
