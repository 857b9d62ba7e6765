"""What a request costs the gateway on each endpoint, beside a chat completion, in one run on one core.

    python -m tests.bench.bench_endpoints [--seconds 3] [--rounds 3]

Each endpoint has a gateway and a fake engine (load.c) of its own; they are measured in turn, round by round, so that
what else the machine does falls on all of them. The smallest of the rounds counts. The gateway does all that it does in
a pod but the ledger's part: key check, resolution, field table, forced usage, an open row on disk, a final one. Prompts
have some 700 bytes. A stream has 50 chunks; its row is the CPU of the whole request.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.bench_gateway import LOAD_CORE, PROXY_CORE, Bench, cpu_seconds, free_port, started
from tests.bench.gateway_process import API_KEY
from tests.support import pictures

_TEXT: Final = "x" * 700
_MESSAGES: Final = [{"role": "user", "content": _TEXT}]
_CONNECTIONS: Final = 64
_BOUNDARY: Final = "bench"

_USAGE: Final = {"prompt_tokens": 200, "total_tokens": 212, "completion_tokens": 12}
_CHAT: Final[Mapping[str, Any]] = {
    "id": "0",
    "object": "chat.completion",
    "created": 1760000000,
    "model": "bench/model",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog."},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
}
_TOKENIZED: Final = {"tokens": list(range(200)), "count": 200, "max_model_len": 4096}
_IMAGE: Final = pictures.made("PNG", 128, 128)
_SEEN: Final = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": pictures.data_url("image/png", _IMAGE)}},
            {"type": "text", "text": _TEXT},
        ],
    }
]
_META: Final = {"prompt_tokens": 20}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table."""

    name: str
    path: str
    body: bytes
    answer: Any
    """What the engine answers; of a stream load.c's own chunks."""
    content_type: str = "application/json"
    streams: bool = False

    def request(self, port: int) -> bytes:
        return (
            b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer %b\r\ncontent-type: %b\r\n"
            b"accept: */*\r\nuser-agent: bench\r\ncontent-length: %d\r\n\r\n%b"
            % (self.path.encode(), port, API_KEY.encode(), self.content_type.encode(), len(self.body), self.body)
        )


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": "bench/model", **fields}, separators=(",", ":")).encode()


def _form() -> bytes:
    """A second of silence as a client sends it."""
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(32_000))
    return (
        b'--%b\r\ncontent-disposition: form-data; name="model"\r\n\r\nbench/model\r\n'
        b'--%b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"content-type: audio/wav\r\n\r\n%b\r\n"
        b"--%b--\r\n" % (_BOUNDARY.encode(), _BOUNDARY.encode(), sound.getvalue(), _BOUNDARY.encode())
    )


ENDPOINTS: Final = (
    Endpoint("chat completions", "/v1/chat/completions", _json(messages=_MESSAGES, max_tokens=50), _CHAT),
    Endpoint(
        "completions",
        "/v1/completions",
        _json(prompt=_TEXT, max_tokens=50),
        {**_CHAT, "object": "text_completion", "choices": [{"index": 0, "text": "fox", "finish_reason": "stop"}]},
    ),
    Endpoint("messages", "/v1/messages", _json(messages=_MESSAGES, max_tokens=50), _CHAT),
    Endpoint("responses", "/v1/responses", _json(input=_TEXT, max_output_tokens=50, store=False), _CHAT),
    Endpoint(
        "embeddings, 256 numbers",
        "/v1/embeddings",
        _json(input=_TEXT),
        {
            "object": "list",
            "model": "bench/model",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.0125] * 256}],
            "usage": {"prompt_tokens": 200, "total_tokens": 200},
        },
    ),
    Endpoint(
        "rerank, 10 documents",
        "/v1/rerank",
        _json(query="fox", documents=[_TEXT[:70]] * 10),
        [{"index": n, "score": 0.5, "document": _TEXT[:70], "meta_info": _META} for n in range(10)],
    ),
    Endpoint(
        "classify",
        "/v1/classify",
        _json(input=_TEXT),
        {
            "id": "0",
            "object": "list",
            "created": 1760000000,
            "model": "bench/model",
            "data": [{"index": 0, "label": "LABEL_0", "probs": [0.9, 0.1], "num_classes": 2}],
            "usage": {"prompt_tokens": 200, "total_tokens": 200},
        },
    ),
    Endpoint(
        "score, 10 items",
        "/v1/score",
        _json(query="fox", items=[_TEXT[:70]] * 10, label_token_ids=[300, 301]),
        {"scores": [[0.25, 0.75]] * 10, "model": "bench/model", "object": "scoring", "usage": _USAGE},
    ),
    Endpoint("tokenize", "/v1/tokenize", _json(prompt=_TEXT), _TOKENIZED),
    Endpoint("detokenize, 200 tokens", "/v1/detokenize", _json(tokens=list(range(200))), {"text": _TEXT}),
    Endpoint("count_tokens", "/v1/messages/count_tokens", _json(messages=_MESSAGES), _TOKENIZED),
    Endpoint(
        "chat completions, an image of 50 kB", "/v1/chat/completions", _json(messages=_SEEN, max_tokens=50), _CHAT
    ),
    Endpoint(
        "transcriptions, 1 s of WAV",
        "/v1/audio/transcriptions",
        _form(),
        {"text": "The quick brown fox.", "usage": {"type": "duration", "seconds": 1}},
        content_type=f"multipart/form-data; boundary={_BOUNDARY}",
    ),
    Endpoint(
        "chat completions, stream",
        "/v1/chat/completions",
        _json(messages=_MESSAGES, max_tokens=50, stream=True),
        _CHAT,
        streams=True,
    ),
    Endpoint(
        "messages, stream",
        "/v1/messages",
        _json(messages=_MESSAGES, max_tokens=50, stream=True),
        _CHAT,
        streams=True,
    ),
    Endpoint(
        "responses, stream",
        "/v1/responses",
        _json(input=_TEXT, max_output_tokens=50, stream=True, store=False),
        _CHAT,
        streams=True,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {endpoint.name: [] for endpoint in ENDPOINTS}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bench = Bench(folder, arguments.seconds)
        places: dict[str, tuple[int, int]] = {}
        for number, endpoint in enumerate(ENDPOINTS):
            own = folder / str(number)
            own.mkdir()
            (own / "answer").write_text(json.dumps(endpoint.answer, separators=(",", ":")))
            upstream, port = free_port(), free_port()
            engine = [str(bench.load), "upstream", str(upstream), str(own / "answer")]
            stack.enter_context(started(engine, upstream, own / "engine.log", LOAD_CORE))
            command = [sys.executable, "-m", "tests.bench.gateway_process", str(upstream), str(port), str(own / "gw")]
            places[endpoint.name] = port, stack.enter_context(started(command, port, own / "gateway.log", PROXY_CORE))
        for _ in range(arguments.rounds):
            for endpoint in ENDPOINTS:
                found[endpoint.name].append(_measure(bench, endpoint, *places[endpoint.name]))
    show({name: min(rounds) for name, rounds in found.items()})


def _measure(bench: Bench, endpoint: Endpoint, port: int, pid: int) -> float:
    """CPU microseconds of the gateway for one request."""
    before = cpu_seconds(pid)
    content = endpoint.request(port)
    result = bench.load_with(content, "streams" if endpoint.streams else "closed", port, _CONNECTIONS)
    if result["errors"]:
        raise SystemExit(f"{endpoint.name}: {result['errors']:.0f} answers without status 200")
    # The generator's second of warm-up is in the CPU time too.
    seconds = bench.seconds + 1
    return (cpu_seconds(pid) - before) / seconds / result["requests_per_s"] * 1e6


def show(found: Mapping[str, float]) -> None:
    print("\n| endpoint | CPU us/request | beside chat completions |\n|---|---|---|")
    for endpoint in ENDPOINTS:
        base = found["chat completions, stream" if endpoint.streams else "chat completions"]
        print(f"| {endpoint.name} | {found[endpoint.name]:.0f} | {found[endpoint.name] / base:.2f} |")


if __name__ == "__main__":
    main()
