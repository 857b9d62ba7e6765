"""/v1/rerank: what SGLang answers where nothing is generated, besides embeddings."""

import hashlib
import random
import time
from typing import Any

from shoal_dev.sim import protocol as p
from shoal_dev.sim.engine import Sampling
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.openai import Job, OpenAI, RefusedError, parse
from shoal_dev.sim.scheduler import Sequence


class Scoring(OpenAI):
    """The routes of one engine that score texts."""

    async def rerank(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.RerankRequest, exchange, body)
        if (complaint := p.rerank_complaint(request)) is not None:
            raise RefusedError(400, p.error_body(complaint))
        if not self._engine.embeds:
            raise RefusedError(400, p.error_body(p.NO_EMBEDDING_MODEL))
        query = self._encode(request.query)
        job = self._texts([tuple(query + self._encode(document)) for document in request.documents])
        began = time.time()

        def answer(sequences: list[Sequence]) -> Any:
            results: list[dict[str, Any]] = []
            for index, sequence in enumerate(sequences):
                result: dict[str, Any] = {"score": self._labels(sequence)[0]}
                if request.return_documents:
                    result["document"] = request.documents[index]
                results.append({**result, "index": index, "meta_info": _meta(sequence, began)})
            results.sort(key=lambda result: result["score"], reverse=True)
            return results[: request.top_n]

        await self._answer(exchange, job, answer)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _texts(self, prompts: list[tuple[int, ...]]) -> Job:
        return Job(prompts, 1, Sampling(0), None, p.DEFAULT_MODEL, stream=False)

    async def _answer(self, exchange: Exchange, job: Job, answer: Any) -> None:
        async def work() -> None:
            async with self._batch(exchange, job) as batch:
                with self._engine.traced(exchange.headers, batch):
                    await self._wait(exchange, batch, job)
                await exchange.json(answer(batch.sequences))

        await self._guarded(exchange, job, work)

    def _labels(self, sequence: Sequence) -> list[float]:
        """The values of the model's labels: they depend on the prompt and the seed only."""
        source = random.Random(_digest(sequence.prompt, self._engine.args.seed))  # noqa: S311 - reproducible on purpose
        return [source.gauss(0, 1) for _ in self._engine.model.labels]


def _digest(prompt: tuple[int, ...], seed: int) -> bytes:
    return hashlib.blake2b(repr((seed, prompt)).encode(), digest_size=8).digest()


def _meta(sequence: Sequence, began: float) -> dict[str, Any]:
    return {
        "id": sequence.rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(sequence.prompt),
        "weight_version": "default",
        "num_retractions": sequence.retractions,
        "e2e_latency": time.time() - began,
    }
