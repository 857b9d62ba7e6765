"""Clients with keep-alive connections for `bench_rollouts`: each asks, thinks, and asks again on the same connection.

    python -m tests.bench.rollout_clients URL KEY MODEL

Prints a JSON object of what they have seen every few seconds, and the last when its standard input ends.
"""

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter

import aiohttp
import openai

CLIENTS = 24
"""Half are the `openai` SDK (httpx), half aiohttp. Neither tries again."""
LONGEST_THINK_SECONDS = 4.0
REPORT_SECONDS = 2.0


class Clients:
    def __init__(self, url: str, key: str, model: str, *, longest_think: float = LONGEST_THINK_SECONDS) -> None:
        self._url, self._key, self._model = url, key, model
        self._longest_think = longest_think
        self.ended = False
        """Each client ends with the answer that it waits for."""
        self.answered = 0
        self.refused = 0
        """Answers 429 and 503 with Retry-After."""
        self.broken: Counter[str] = Counter()
        """What went wrong otherwise."""

    async def sdk(self, seed: int) -> None:
        thinks = random.Random(seed)  # noqa: S311
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=self._key, max_retries=0, timeout=60) as api:
            while not self.ended:
                try:
                    await api.completions.create(model=self._model, prompt="x", max_tokens=thinks.randint(1, 40))
                    self.answered += 1
                except openai.APIStatusError as error:
                    self._status(error.status_code, error.response.headers.get("retry-after"))
                except openai.APIError as error:
                    self.broken[f"openai: {error.__cause__!r}"[:120]] += 1
                await asyncio.sleep(thinks.uniform(0, self._longest_think))

    async def plain(self, seed: int) -> None:
        thinks = random.Random(seed)  # noqa: S311
        headers = {"authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while not self.ended:
                body = {"model": self._model, "prompt": "x", "max_tokens": thinks.randint(1, 40)}
                try:
                    async with session.post(f"{self._url}/v1/completions", json=body) as answer:
                        await answer.read()
                        if answer.status == 200:
                            self.answered += 1
                        else:
                            self._status(answer.status, answer.headers.get("retry-after"))
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.broken[f"aiohttp: {error!r}"[:120]] += 1
                await asyncio.sleep(thinks.uniform(0, self._longest_think))

    def report(self) -> None:
        found = {"answered": self.answered, "refused": self.refused, "broken": self.broken}
        print(json.dumps(found), flush=True)

    def _status(self, status: int, wait: str | None) -> None:
        if status in (429, 503) and wait is not None:
            self.refused += 1
        else:
            self.broken[f"status {status}"] += 1


async def main(url: str, key: str, model: str) -> None:
    clients = Clients(url, key, model)
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task((clients.sdk if n % 2 else clients.plain)(n)) for n in range(CLIENTS)]
    ended = loop.run_in_executor(None, sys.stdin.read)
    while not ended.done():
        await asyncio.wait([ended], timeout=REPORT_SECONDS)
        clients.report()
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    clients.report()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
