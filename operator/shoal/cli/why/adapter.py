"""`shoal why adapter/NAME`: the adapter, its pool, and the pool's Model."""

import dataclasses
from datetime import UTC, datetime
from typing import Any

from shoal.cli.why import show
from shoal.cli.why.model import read_model
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import ObjectView, WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import LORA_ADAPTERS, LORA_POOLS, MODELS


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a LoRAAdapter. Raises KubeError where the adapter itself cannot be read."""
    raw = await question.client.get(LORA_ADAPTERS, question.name, question.namespace)
    seen = await read(question, layerviews.shoal_object("adapter", raw))
    return show.answer(causes(seen, datetime.now(UTC)), seen)


async def read(question: WhyQuestion, adapter: ObjectView) -> WhySnapshot:
    """What explains a LoRAAdapter."""
    reader = WhyReader(question.client)
    seen = await _read(reader, question, adapter)
    return dataclasses.replace(seen, unread=tuple(reader.unread))


async def _read(reader: WhyReader, question: WhyQuestion, adapter: ObjectView) -> WhySnapshot:
    pool_ref: dict[str, Any] = adapter.spec.get("poolRef") or {}
    namespace = str(pool_ref.get("namespace") or adapter.namespace)
    name = str(pool_ref.get("name"))
    pool = await reader.get(f"LoRAPool {namespace}/{name}", "pool", LORA_POOLS, name, namespace)
    model: ObjectView | None = None
    if pool is not None:
        model_ref: dict[str, Any] = pool.spec.get("modelRef") or {}
        model_name = str(model_ref.get("name"))
        model = await reader.get(f"Model {namespace}/{model_name}", "model", MODELS, model_name, namespace)
    related = tuple(view for view in (pool, model) if view is not None)
    if model is None:
        lease = await reader.lease(question.installation.namespace)
        return WhySnapshot("adapter", adapter.key, subject=adapter, related=related, lease=lease)
    below = await read_model(reader, question, model)
    return dataclasses.replace(
        below, kind="adapter", key=adapter.key, subject=adapter, related=(*related, *below.related)
    )
