"""What an entry of the request log costs, in the event loop and in the writer's thread, and what it takes on disk.

python -m tests.bench.bench_requestlog
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from shoal.api.tenant import Redaction, TenantLogging
from shoal.core.access import KeyIdentity
from shoal.gateway.settings import GatewaySettings
from shoal.metering.meter import Meter
from shoal.requestlog.entry import Lines, LogEntry
from shoal.requestlog.logger import RequestLogger
from tests.support.gateway import MODEL

COUNT = 5_000
LETTERS = random.Random(7)  # noqa: S311 - made-up words, the same each time
WORDS = ["".join(LETTERS.choices("etaoinshrdlu", k=LETTERS.randint(2, 9))) for _ in range(3000)]
RULES = tuple(
    Redaction.model_validate({"name": name.lower(), "builtin": name}) for name in ("Email", "CreditCard", "PhoneNumber")
)


def text(number: int, length: int) -> str:
    words = random.Random(number).choices(WORDS, k=length)  # noqa: S311
    return " ".join((*words, f"user{number}@example.org"))


def meter(identity: KeyIdentity) -> Meter:
    it = Meter(
        "01a200e9-18ce-79ba-9634-fa3d41586634",
        "bench",
        identity,
        MODEL,
        endpoint="/v1/chat/completions",
        model_name="llama",
        stream=False,
    )
    it.outcome, it.status = "answered", 200
    it.count(b'{"prompt_tokens":700,"completion_tokens":60,"prompt_tokens_details":{"cached_tokens":4}}', "final")
    it.tokens()
    it.answer_began()
    return it


async def measure(label: str, logging: TenantLogging, folder: Path, stream: bool = False) -> None:
    identity = KeyIdentity("acme", None, "prod", None, False, False, frozenset(), logging=logging)
    book = RequestLogger(GatewaySettings(log_dir=folder, log_queue_bytes=1 << 40))
    jobs: list[LogEntry] = []
    put = book.writer.put
    book.writer.put = jobs.append  # type: ignore[method-assign]
    bodies: list[tuple[bytes, dict[str, Any], bytes, list[bytes], Meter]] = []
    for number in range(COUNT):
        fields = {"model": "llama", "messages": [{"role": "user", "content": text(number, 140)}], "max_tokens": 100}
        answer = text(number + 1, 60)
        whole = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]})
        pieces = [
            b"data: " + orjson.dumps({"model": "x", "choices": [{"index": 0, "delta": {"content": word + " "}}]})
            for word in answer.split()
        ]
        bodies.append((orjson.dumps(fields), fields, whole, pieces, meter(identity)))
    began = time.perf_counter()
    for raw, fields, whole, pieces, it in bodies:
        capture = book.begin(identity, "", raw, fields)
        assert capture is not None
        if stream:
            for piece in pieces:
                capture.event(piece)
        else:
            capture.answered(whole)
        book.end(capture, it, identity)
    loop = time.perf_counter() - began
    lines = Lines(1 << 20)
    began = time.perf_counter()
    size = sum(len(lines.line(job)[0]) for job in jobs)
    thread = time.perf_counter() - began
    for job in jobs:
        put(job)
    await asyncio.wrap_future(book.writer.close_files())
    stored = book.folder.size()
    await book.stop()
    print(
        f"{label:<22} {loop / COUNT * 1e6:>9.1f} {thread / COUNT * 1e6:>9.1f} {size / COUNT:>9.0f} "
        f"{stored / COUNT:>9.0f}"
    )


async def main() -> None:
    print(f"{COUNT} requests of 140 words, answers of 60, three rules and the one for secrets")
    print(f"{'':<22} {'loop us':>9} {'thread us':>9} {'bytes':>9} {'on disk':>9}")
    for label, mode, stream in (
        ("Metadata", "Metadata", False),
        ("Full", "Full", False),
        ("Full, 61 chunks", "Full", True),
    ):
        with tempfile.TemporaryDirectory() as folder:
            logging = TenantLogging.model_validate({"mode": mode, "redact": RULES})
            await measure(label, logging, Path(folder), stream)


if __name__ == "__main__":
    asyncio.run(main())
