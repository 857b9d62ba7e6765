"""/v1/rerank, /v1/score and /v1/classify: what SGLang answers where nothing is generated, besides embeddings."""

import hashlib
import math
import random
import time
import uuid
from collections.abc import Iterable
from typing import Any, cast

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

    async def score(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.ScoreRequest, exchange, body)
        generates = not self._engine.embeds
        vocabulary = self._engine.model.config.get("vocab_size")
        if (complaint := p.score_complaint(request, generates=generates, vocabulary=vocabulary)) is not None:
            raise RefusedError(400, p.error_body(complaint))
        prompts = self._joined(request)
        if not prompts:
            await exchange.json(_scores(request, [], None, 0))
            return
        if not all(prompts):
            # SGLang's scheduler ends at a prompt without a token.
            self._engine.crash()

        def answer(sequences: list[Sequence]) -> Any:
            values = [self._values(sequence, request, generates=generates) for sequence in sequences]
            logs = [[math.log(value) for value in row] for row in values] if generates else None
            if request.apply_softmax:
                values = [_softmax([value / request.temperature for value in row]) for row in logs or values]
            told = logs if request.return_token_logprobs else None
            return _scores(request, values, told, sum(len(sequence.prompt) for sequence in sequences))

        await self._answer(exchange, self._texts(prompts), answer)

    async def classify(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.ClassifyRequest, exchange, body)
        items = [request.input] if isinstance(request.input, str) else request.input
        if not items or "" in items:
            raise RefusedError(400, p.error_body("Input cannot be empty"))
        if any(isinstance(item, str) and item.isspace() for item in items):
            raise RefusedError(400, p.error_body("Input cannot be empty or whitespace only"))
        if not self._engine.embeds:
            raise RefusedError(400, p.error_body(p.NO_EMBEDDING_MODEL))
        job = self._texts(self._prompts(request.input, "Input cannot be empty"))
        job.rid = request.rid

        def answer(sequences: list[Sequence]) -> Any:
            names, data = list(self._engine.model.labels.values()), list[dict[str, Any]]()
            for index, sequence in enumerate(sequences):
                probs = _softmax(self._labels(sequence))
                label = names[probs.index(max(probs))]
                data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
            return {
                "id": f"classify-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                # Not the model that was requested.
                "model": self._engine.args.served_model_name,
                "data": data,
                "usage": p.usage(sum(len(sequence.prompt) for sequence in sequences), 0, None),
            }

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

    def _joined(self, request: p.ScoreRequest) -> list[tuple[int, ...]]:
        """The query with each item: of texts, SGLang joins the texts."""
        given = request.items or ()
        items = cast(Iterable[str | list[int]], [given] if isinstance(given, str) else given)
        query = request.query
        if query is None:
            query = "" if all(isinstance(item, str) for item in items) else list[int]()
        found: list[tuple[int, ...]] = []
        for item in items:
            if isinstance(query, str) and isinstance(item, str):
                found.append(tuple(self._encode(item + query if request.item_first else query + item)))
            elif not isinstance(query, str) and not isinstance(item, str):
                found.append((*item, *query) if request.item_first else (*query, *item))
            else:
                raise RefusedError(400, p.error_body("Invalid combination of query/items types for score_request."))
        return found

    def _values(self, sequence: Sequence, request: p.ScoreRequest, *, generates: bool) -> list[float]:
        """Of a model that generates, the probabilities of the labels' tokens."""
        if not generates:
            return self._labels(sequence)
        seed = self._engine.args.seed
        return [
            random.Random(_digest((*sequence.prompt, label), seed)).uniform(1e-6, 1e-3)  # noqa: S311
            for label in request.label_token_ids or ()
        ]

    def _labels(self, sequence: Sequence) -> list[float]:
        """The values of the model's labels: they depend on the prompt and the seed only."""
        source = random.Random(_digest(sequence.prompt, self._engine.args.seed))  # noqa: S311 - reproducible on purpose
        return [source.gauss(0, 1) for _ in self._engine.model.labels]


def _digest(prompt: tuple[int, ...], seed: int) -> bytes:
    return hashlib.blake2b(repr((seed, prompt)).encode(), digest_size=8).digest()


def _softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def _scores(
    request: p.ScoreRequest, values: list[list[float]], logs: list[list[float]] | None, tokens: int
) -> dict[str, Any]:
    return {
        "scores": values,
        "pooled_hidden_states": None,
        "token_logprobs": logs,
        "model": request.model,
        "usage": p.usage(tokens, 0, None),
        "object": "scoring",
    }


def _meta(sequence: Sequence, began: float) -> dict[str, Any]:
    return {
        "id": sequence.rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(sequence.prompt),
        "weight_version": "default",
        "num_retractions": sequence.retractions,
        "e2e_latency": time.time() - began,
    }
