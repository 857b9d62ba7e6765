"""Who finds whose prompts in an engine's cache.

An engine keeps what it has computed of prompts, and answers a prompt that begins the same sooner: the time tells, and
so does `cached_tokens`. So requests are told apart by a *space*: each finds only what was asked in its own. The gateway
makes a `cache_salt` of it for the engine, and the head by which the replica is chosen (affinity.py) begins with it. An
engine itself keeps apart what each adapter computed, within a space.
"""

from typing import Final

from shoal.core.access import KeyIdentity
from shoal.core.routing.resolve import ServedModel

SHARED: Final = ""
"""The space of a Model whose tenants share everything."""


def prefix_space(model: ServedModel, identity: KeyIdentity) -> str:
    """The space of a tenant's requests for a Model; `SHARED` where the Model's `prefixCache.isolation` is Shared."""
    if model.shares_prefixes:
        return SHARED
    group = identity.prefix_cache_group
    # Neither is a name of the other's kind: a Tenant cannot join by its name a group that is called so.
    return f"tenant/{identity.tenant}" if group is None else f"group/{group}"
