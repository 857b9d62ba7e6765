"""What engines can do and Shoal does not: the reasons.

An adapter refuses the arguments that switch it on (`PodSide.extra_args_problems`): a Model that gives one is not
accepted. If one of sleep or of roles passed, a replica would answer its probe and serve nothing.
"""

from typing import Final

NO_SLEEP: Final = "Shoal does not let engines sleep; leave it out, and use spec.scaling.minReplicas: 0 to free the GPUs"
"""A sleeping engine frees its GPU's memory while its process stays. Kubernetes gives the GPU to nobody else then, and a
wrong call ends the engine."""
ALL_ROLES: Final = (
    "Shoal does not separate prefill, decode and encoders; leave it out, and use spec.engine.parallelism or "
    "spec.scaling for more GPUs"
)
"""A request would have two engines then: placement, routing, drain, retries and meters know one."""
NO_EVENTS: Final = (
    "it publishes the tokens of all tenants' prompts on a port without a key; leave it out: gateways tell each other "
    "which prefixes replicas hold"
)
"""Events of the KV cache."""
CALLS_OTHERS: Final = (
    "the engine would call other servers in the name of whoever sends a request; leave it out: clients run their tools"
)
"""Servers of tools."""
TRUSTS_SENDERS: Final = (
    "whoever sends a request could bring code, templates or tensors, or name files and others' images; leave it out"
)
"""What requests may bring along."""
LOGS_ALL: Final = (
    "it writes prompts or answers of all tenants into logs or files; leave it out, and use the request log of a "
    "Tenant: spec.logging of the Tenant"
)
"""Logs and dumps of requests. They have no redaction and no retention, and are not set per tenant
(docs/requestlog.md)."""
