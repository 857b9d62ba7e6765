"""What an engine says of itself stays inside: in a status, in the body of an error, in an event of a stream."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.net import errors
from tests.support.gateway import gateway, lines
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
SECRETS = ("zeta.secret-project", "/shoal/models", "10.1.2.3", "Traceback", "scheduler.py", "0x7f00deadbeef")
INSIDE = [
    'Traceback (most recent call last):\n  File "/usr/lib/python3/scheduler.py", line 3, in run\nKeyError: 3',
    "zeta.secret-project@0123456789ab has never been loaded. All loaded adapters: dict_keys(['zeta.secret-project'])",
    "CUDA out of memory at 0x7f00deadbeef in /shoal/models/model",
    "cannot reach 10.1.2.3:29500",
    "error in scheduler.py",
]


def told(raw: bytes) -> list[str]:
    return [secret for secret in SECRETS if secret.encode() in raw]


@pytest.mark.parametrize("message", INSIDE)
@pytest.mark.parametrize("status", [400, 404, 422, 500, 502, 504])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_its_inside_gets_out(tmp_path: Path, message: str, status: int, stream: bool):
    async def fail(request: EngineRequest) -> None:
        error = {"object": "error", "message": message, "type": "InternalError", "param": None, "code": status}
        if not stream:
            await request.answer(status, json.dumps(error).encode())
            return
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.chunk(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(fail)) as it:
        response = await it.post({**CHAT, "stream": stream})
        if stream:
            error = [json.loads(line) async for line in lines(response)][-1]["error"]
            raw = json.dumps(error).encode()
        else:
            raw = await response.read()
            error = json.loads(raw)["error"]
            assert response.status == status
        assert told(raw) == []
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == ("engine_error" if status >= 500 else "refused_by_engine")


def test_plain_text_of_a_5xx_is_replaced_too():
    for raw in (b"Internal Server Error: zeta.secret-project", b"", b'{"error": "Traceback /shoal/models"}', b"[]"):
        assert errors.from_engine(500, raw).message == "The engine failed on this request."


@pytest.mark.parametrize(
    "message",
    [
        "temperature must be non-negative, got -1.0",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "1 validation error for ChatCompletionRequest\nmessages.0.role\n  Input should be 'user'"
        " [type=literal_error]\n    For further information visit https://errors.pydantic.dev/2.9/v/literal_error",
        "content-type must be application/json",
    ],
)
def test_what_is_about_the_request_is_passed_on(message: str):
    raw = json.dumps({"object": "error", "message": message, "type": "BadRequestError", "code": 400}).encode()
    assert errors.from_engine(400, raw).message == message


def test_other_fields_are_words_or_nothing():
    error = {"message": "no", "type": "/shoal/models_error", "param": "a b /shoal/models/x", "code": 'File "x.py"'}
    found = errors.from_engine(400, json.dumps({"error": error}).encode())
    assert (found.type, found.param, found.code) == ("invalid_request_error", None, None)


async def test_without_the_filter_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def as_it_is(status: int, raw: bytes, *_names: str) -> errors.ApiError:
        return errors.ApiError(status, json.loads(raw)["message"], None)

    monkeypatch.setattr(errors, "from_engine", as_it_is)

    async def fail(request: EngineRequest) -> None:
        await request.answer(500, json.dumps({"message": INSIDE[0]}).encode())

    async with gateway(tmp_path, ScriptedEngine(fail)) as it:
        assert told(await (await it.post(CHAT)).read())
