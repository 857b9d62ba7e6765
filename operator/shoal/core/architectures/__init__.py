"""What a model's config.json says of its size: heads, layers, context, and what one token takes in the KV cache.

Follows how SGLang 0.5.23 reads the same file, since its reading is what counts at the engine's start.
"""

from shoal.core.architectures.config import UnknownConfig
from shoal.core.architectures.facts import facts_of

__all__ = ["UnknownConfig", "facts_of"]
