"""`shoal why pool/NAME`: a LoRAPool and its Model."""

import dataclasses
from datetime import UTC, datetime
from typing import Any

from shoal.cli.why import show
from shoal.cli.why.model import read_model
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import LORA_POOLS, MODELS


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a LoRAPool. Raises KubeError where the pool itself cannot be read."""
    raw = await question.client.get(LORA_POOLS, question.name, question.namespace)
    pool = layerviews.shoal_object("pool", raw)
    reader = WhyReader(question.client)
    namespace = str(pool.namespace)
    reference: dict[str, Any] = pool.spec.get("modelRef") or {}
    name = str(reference.get("name"))
    model = await reader.get(f"Model {namespace}/{name}", "model", MODELS, name, namespace)
    if model is None:
        seen = WhySnapshot(
            "pool",
            pool.key,
            subject=pool,
            lease=await reader.lease(question.installation.namespace),
            unread=tuple(reader.unread),
        )
    else:
        below = await read_model(reader, question, model)
        seen = dataclasses.replace(
            below, kind="pool", key=pool.key, subject=pool, related=(model, *below.related), unread=tuple(reader.unread)
        )
    return show.answer(causes(seen, datetime.now(UTC)), seen)
