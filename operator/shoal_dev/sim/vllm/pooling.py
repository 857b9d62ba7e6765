"""What a vLLM that pools answers: embeddings of a model without a head, scores of one with a label, classes of several.

The paths that such an engine does not have are a 404, generation included: nothing that is sent to it can kill it.
"""

import base64
import hashlib
import math
import random
import struct
import time
import uuid
from typing import Any

from shoal_dev.sim.engine import RequestBatch, Sampling
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.scheduler import Sequence
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.engine import VLLMEngine
from shoal_dev.sim.vllm.openai import Generating, Job, parse
from shoal_dev.sim.vllm.writers import prompts_of


class Pooling:
    """These routes of one engine."""

    def __init__(self, engine: VLLMEngine, generating: Generating) -> None:
        self._engine = engine
        self._generating = generating

    async def embeddings(self, exchange: Exchange) -> None:
        request = parse(p.EmbeddingRequest, exchange, await exchange.body())
        self._known(request.model)
        if request.dimensions is not None:
            self._dimensions(request.dimensions)
        job = self._job(exchange, self._generating.prompts(request.input))

        def content(batch: RequestBatch) -> Any:
            data: list[dict[str, Any]] = []
            for index, sequence in enumerate(batch.sequences):
                vector = self._vector(sequence, request.dimensions or self._engine.model.hidden_size)
                shown: Any = vector
                if request.encoding_format == "base64":
                    shown = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                data.append({"index": index, "object": "embedding", "embedding": shown})
            return self._list(f"embd-{job.rid}", data, prompts_of(batch.sequences), created=True)

        await self._generating.answer(exchange, job, content)

    async def rerank(self, exchange: Exchange) -> None:
        request = parse(p.RerankRequest, exchange, await exchange.body())
        self._known(request.model)
        if request.top_n < 0:
            detail = {
                "type": "greater_than_equal", "loc": "body.top_n",
                "msg": "Input should be greater than or equal to 0", "input": str(request.top_n), "ctx": {"ge": 0},
            }  # fmt: skip
            message = f"1 validation error:\n  {detail}"
            raise p.RefusedError(400, message, kind="Bad Request", param="body.top_n")
        job = self._job(exchange, self._texts([request.query], request.documents))

        def content(batch: RequestBatch) -> Any:
            results: list[dict[str, Any]] = [
                {
                    "index": index,
                    "document": {"text": request.documents[index], "multi_modal": None},
                    "relevance_score": score,
                }
                for index, score in enumerate(self._scores(batch, 1))
            ]
            results.sort(key=lambda result: result["relevance_score"], reverse=True)
            tokens = prompts_of(batch.sequences)
            return {
                "id": f"score-{job.rid}",
                "model": self._engine.args.served_model_name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": results[: request.top_n or None],
            }

        await self._generating.answer(exchange, job, content)

    async def score(self, exchange: Exchange) -> None:
        request = parse(p.ScoreRequest, exchange, await exchange.body())
        self._known(request.model)
        first = request.queries or request.text_1
        second = request.documents or request.items or request.text_2
        if first is None or second is None:
            detail = {"type": "missing", "loc": "body.queries", "msg": "Field required", "input": "<dict of 0 items>"}
            message = f"8 validation errors:\n  {detail}"
            raise p.RefusedError(400, message, kind="Bad Request", param="body.queries")
        firsts = [first] if isinstance(first, str) else first
        job = self._job(exchange, self._texts(firsts, [second] if isinstance(second, str) else second))

        def content(batch: RequestBatch) -> Any:
            scores = self._scores(batch, len(firsts))
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            return self._list(f"score-{job.rid}", data, prompts_of(batch.sequences), created=False)

        await self._generating.answer(exchange, job, content)

    async def classify(self, exchange: Exchange) -> None:
        request = parse(p.ClassifyRequest, exchange, await exchange.body())
        self._known(request.model)
        job = self._job(exchange, self._generating.prompts(request.input))

        def content(batch: RequestBatch) -> Any:
            names, data = list(self._engine.model.labels.values()), list[dict[str, Any]]()
            for index, sequence in enumerate(batch.sequences):
                probs = self._classes(sequence)
                label = names[probs.index(max(probs))]
                data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
            return self._list(f"classify-{job.rid}", data, prompts_of(batch.sequences), created=True)

        await self._generating.answer(exchange, job, content)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _known(self, model: str | None) -> None:
        if model and model not in self._engine.vllm.names:
            raise p.RefusedError(404, f"The model `{model}` does not exist.", param="model")

    def _job(self, exchange: Exchange, prompts: list[tuple[int, ...]]) -> Job:
        rid = exchange.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        return Job(prompts, Sampling(0), rid, self._engine.args.served_model_name)

    @property
    def _labelled(self) -> bool:
        return any("ForSequenceClassification" in name for name in self._engine.model.architectures)

    def _texts(self, firsts: list[str], seconds: list[str]) -> list[tuple[int, ...]]:
        """Of a model with a label each pair as one text; of one that embeds the texts, the first ones once."""
        if not seconds:
            raise p.RefusedError(400, "At least one text_pair element must be given")
        if len(firsts) not in (1, len(seconds)):
            raise p.RefusedError(400, "Input lengths must be either 1:1, 1:N or N:N")
        if not self._labelled:
            return self._generating.prompts([*firsts, *seconds])
        encode = self._engine.model.tokenizer.encode
        repeated = firsts * len(seconds) if len(firsts) == 1 else firsts
        pairs = [tuple(encode(a) + encode(b)) for a, b in zip(repeated, seconds, strict=True)]
        for pair in pairs:
            self._generating.fits(pair)
        return pairs

    def _dimensions(self, wanted: int) -> None:
        name, config = self._engine.args.served_model_name, self._engine.config
        allowed: list[int] = config.get("matryoshka_dimensions") or []
        if not allowed and not config.get("is_matryoshka"):
            raise p.RefusedError(
                400,
                f"Model '{name}' does not support Matryoshka embeddings; dimensions must be unset (received "
                f"dimensions={wanted}).",
            )
        if allowed and wanted not in allowed:
            raise p.RefusedError(
                400, f"Model '{name}' only supports {allowed} matryoshka dimensions (received dimensions={wanted})."
            )
        if not 1 <= wanted <= self._engine.model.hidden_size:
            raise p.RefusedError(400, f"dimensions must be between 1 and {self._engine.model.hidden_size}.")

    def _list(self, rid: str, data: list[dict[str, Any]], tokens: int, *, created: bool) -> dict[str, Any]:
        return {
            "id": rid,
            "object": "list",
            **({"created": int(time.time())} if created else {}),
            "model": self._engine.args.served_model_name,
            "data": data,
            "usage": p.usage(tokens, 0, None),
        }

    def _scores(self, batch: RequestBatch, firsts: int) -> list[float]:
        """Between 0 and 1 of a label, cosines of embeddings."""
        if self._labelled:
            return [1 / (1 + math.exp(-self._values(sequence)[0])) for sequence in batch.sequences]
        vectors = [self._vector(sequence, self._engine.model.hidden_size) for sequence in batch.sequences]
        seconds = vectors[firsts:]
        repeated = vectors[:firsts] * (len(seconds) if firsts == 1 else 1)
        return [sum(x * y for x, y in zip(a, b, strict=True)) for a, b in zip(repeated, seconds, strict=True)]

    def _classes(self, sequence: Sequence) -> list[float]:
        weights = [math.exp(value) for value in self._values(sequence)]
        if len(weights) == 1:
            return [weights[0] / (1 + weights[0])]
        return [weight / sum(weights) for weight in weights]

    def _values(self, sequence: Sequence) -> list[float]:
        source = self._random(sequence)
        return [source.gauss(0, 1) for _ in self._engine.model.labels]

    def _vector(self, sequence: Sequence, size: int) -> list[float]:
        source = self._random(sequence)
        values = [source.gauss(0, 1) for _ in range(size)]
        length = sum(value * value for value in values) ** 0.5
        return [value / length for value in values]

    def _random(self, sequence: Sequence) -> random.Random:
        """It depends on the prompt and the seed only."""
        seed = repr((self._engine.args.seed, sequence.prompt)).encode()
        return random.Random(hashlib.blake2b(seed, digest_size=8).digest())  # noqa: S311 - reproducible on purpose
