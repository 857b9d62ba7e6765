"""Whatever passes the check of a request's fields leaves an engine alive and as quick as before.

Each allowed field is mutated, alone and with others; what passes goes to the engine as the gateway would send it. After
each hundred the engine must be alive and answer a canary. SHOAL_FUZZ_REQUESTS says how many (20000 is the full figure),
SHOAL_FUZZ_SEED which, SHOAL_FUZZ_FROM how many to leave out first.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import structlog

from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import CHAT, COMPLETIONS, EMBEDDINGS, TABLE
from tests.support import pictures
from tests.support.asgateway import Sent, facts_for, sent
from tests.support.behaviour import WORDS
from tests.support.engines import CONTEXT, EngineProcess, Kind, running_engine
from tests.support.vision_engine import running_vision_engine

log = structlog.get_logger()
REQUESTS: Final = int(os.environ.get("SHOAL_FUZZ_REQUESTS", "1500"))
FROM: Final = int(os.environ.get("SHOAL_FUZZ_FROM", "0"))
SEED: Final = int(os.environ.get("SHOAL_FUZZ_SEED", "1"))
FACTS: Final = Facts(vocabulary=512, context_length=CONTEXT)
MOST_WAITING: Final = 10_000
"""A request may have 1,024 inputs, and each waits for itself."""
ROOMY: Final[dict[str, tuple[str, ...]]] = {
    "SGLang": ("--max-running-requests", "16", "--max-queued-requests", str(MOST_WAITING)),
    "vLLM": ("--max-num-seqs", "16", "--max-num-queued-reqs", str(MOST_WAITING)),
}
GRAMMARS: Final[dict[Kind, tuple[str, ...]]] = {"sglang": ("--grammar-backend", "xgrammar")}
"""What a kind needs to compile grammars; vLLM's own choice is xgrammar."""
IMAGE_OPTIONS: Final[dict[Kind, tuple[str, ...]]] = {
    "sglang": ("max_dynamic_patch", "min_dynamic_patch", "max_long_side_pixel")
}
REAL: Final = ("sglang", "vllm")
AT_ONCE: Final = 8
CANARY: Final = {"model": "fuzz", "prompt": "a canary", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
EMBEDDED_CANARY: Final = {"model": "fuzz", "input": "a canary"}
SEEN_CANARY: Final = {
    "model": "fuzz", "max_tokens": 2, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": pictures.data_url("image/png", pictures.png(64, 64))}},
    ]}],
}  # fmt: skip
_TIMEOUT_SECONDS: Final = 60.0
_STALL_FACTOR: Final = 20
_STALL_SECONDS: Final = 10.0
"""A canary that takes longer than both is one too many: the machine may be busy, so the bound is generous."""

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
ODD: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 20, 127, 128, 511, 512, 4096, 2**30, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1,
    2**63,
    -(2**63), 0.0, -0.0, 1e-6, 1e-300, 5e-324, 0.5, 1.0, 2.0, 1e300, "", "x", "\x00", "\ud7ff\U0010ffff", "a" * 256,
    [], [0], [1, 511],
    [[1], [2]], ["a", "b"], [""], [None], {}, {"a": 1}, {"0": 100}, {"511": -100.0}, {"a": {"b": [1]}},
)  # fmt: skip
PATTERNS: Final = (
    "a", "[a-z]{1,5}", r"(\d{1,3}\.){3}\d", "(a|b|c)*d", ".*x", "[^a]*", "([a-z]+,)*b", "a{1000}", "[ab]{0,900}",
    "(x?y?z?)w", "",
    "(yes|no)", "\\x00", "é+", "[\\s\\S]*", "()", "a|", "(|a)", "^a$", "\\d{0,500}", "((a|b){0,20}c){0,20}",
    ".{0,99}", "[^\\x00-\\x7f]*",
)  # fmt: skip
SCHEMAS: Final[tuple[Any, ...]] = (
    {}, {"type": "object"}, {"type": "string", "maxLength": 1_000_000}, {"type": "string", "minLength": 100_000},
    {"type": "array", "items": {"type": "integer"}, "minItems": 50_000}, {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {"allOf": [{"$ref": "#"}]}, {"type": "array", "items": {"$ref": "#"}}, {"enum": list(range(900))},
    {"const": "\x00"},
    {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(200)}},
    {"type": "string", "pattern": "[ab]{0,900}"},
    {"type": "integer", "minimum": -(10**18), "maximum": 10**18}, {"type": "number", "multipleOf": 1e-300},
    {"type": "nonsense"},
    {"type": ["string", "null", "array"]}, {"not": {}}, {"if": {}, "then": {}, "else": {}},
    {"type": "string", "format": "date-time"},
    {"type": "object", "patternProperties": {"^a": {"type": "string"}}, "minProperties": 1000}, {"enum": []},
    {"oneOf": [{}, {}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"$ref": "#/nowhere"},
    {"properties": 5},
    {"type": "object", "required": ["a"] * 500, "additionalProperties": False}, {"items": [{}] * 300},
    {"prefixItems": [{}] * 300},
)  # fmt: skip
TEXTS: Final = (
    "x", "hello " * 600, "\x00", "\ud7ff", "\U0010ffff" * 300, "a" * 60_000, " " * 60_000, "<|im_start|>system",
    "<image>", "{{ 1/0 }}",
    "{% raw %}", "\u202e", "é" * 2000, "\n" * 5000, "0" * 3000, "<s></s><unk>",
)  # fmt: skip
KEYS: Final = (
    "enable_thinking", "thinking", "x", "reasoning_effort", "date_string", "thinking_budget", "builtin_tools",
    "custom_tools", "xml_tools",
    "environment", "add_vision_id", "continue_final", "system", "user", "role", "content", "name", "model", "true",
    "none", "e", "i", "keys",
    "tools_in_user_message", "controls", "eos", "bos", "default_system_message", "sampling", "return", "class",
    "async_", "tool_calls",
)  # fmt: skip


class Mutator:
    """Bodies, one after another, the same for the same seed."""

    def __init__(self, seed: int, paths: tuple[str, ...] = (CHAT, COMPLETIONS)) -> None:
        self.random = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self.paths = paths

    def request(self) -> tuple[str, dict[str, Any]]:
        pick = self.random
        path = pick.choice(self.paths)
        if path == EMBEDDINGS:
            return path, self.embedding()
        body: dict[str, Any] = {"model": "fuzz", "max_tokens": pick.choice((1, 1, 2, 3, 4, 8))}
        body |= {"messages": [USER]} if path == CHAT else {"prompt": "hello"}
        if pick.random() < 0.2:
            body["stream"] = True
        for name in pick.sample(sorted(TABLE[path]), pick.choice((1, 1, 2, 3, 5))):
            body[name] = self.value(name, path)
        return path, body

    def embedding(self) -> dict[str, Any]:
        pick = self.random
        body: dict[str, Any] = {"model": "fuzz", "input": self._input()}
        for name in pick.sample(sorted(TABLE[EMBEDDINGS]), pick.choice((0, 1, 1, 2, 3))):
            body[name] = self.value(name, EMBEDDINGS)
        return body

    def _input(self) -> Any:
        pick, tokens, text = self.random.choice, self._tokens, self._text
        if self.random.random() < 0.03:
            return pick((["x"] * 1024, ["x"] * 1025, [[1]] * 1024, [tokens() * 60] * 8))
        return pick((
            text(), tokens(), [tokens()], [tokens() for _ in range(pick((2, 9, 64)))],
            [text() for _ in range(pick((1, 3, 8)))], ["x"] * pick((1, 2, 16)),
            tokens() * pick((1, 60, 64, 65, 700)), "a " * pick((100, 2000, 2040, 2048, 4096)),
        ))  # fmt: skip

    def _dimensions(self) -> Any:
        return self.random.choice((1, 2, 3, 63, 64, 65, 65_536))

    def value(self, name: str, path: str) -> Any:
        pick = self.random
        if pick.random() < 0.15:
            return pick.choice(ODD)
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return special()
        words = TABLE[path][name].kind
        least, most = getattr(words, "least", None), getattr(words, "most", None)
        if isinstance(least, int) and isinstance(most, int):
            return pick.choice((least, most, (least + most) // 2, pick.randint(least, most), least - 1, most + 1))
        if isinstance(least, int | float) and isinstance(most, int | float):
            return pick.choice((least, most, pick.uniform(least, most), least * 1.0000001, most - 1e-9, 0, 1))
        if choices := getattr(words, "of", None):
            return pick.choice(choices) if isinstance(choices, tuple) else pick.choice(ODD)
        return pick.choice((True, False, True, False, *ODD))

    def _max_tokens(self) -> Any:
        return self.random.choice((1, 2, 3, 8, 30, 4096, 10_000_000, 0, 2**31))

    _max_completion_tokens = _max_tokens

    def _n(self) -> Any:
        return self.random.choice((1, 1, 2, 2, 3, 3, 4, 129, 3000) + ((16, 128) if self.random.random() < 0.1 else ()))

    def _min_tokens(self) -> Any:
        return self.random.choice((0, 1, 5, 4095, 4096))

    def _tokens(self) -> list[int]:
        return [
            self.random.choice((0, 1, 2, 255, 510, 511, self.random.randrange(512)))
            for _ in range(self.random.choice((1, 5, 64)))
        ]

    _stop_token_ids = _tokens

    def _logit_bias(self) -> Any:
        return {str(token): self.random.choice((-100, 100, 0, 0.5, -1e-9)) for token in self._tokens()}

    def _stop(self) -> Any:
        return self.random.choice(("x", ["a", "b"], ["\x00"], ["é" * 256], ["e"] * 32, "\U0010ffff", [" "] * 5))

    def _regex(self) -> Any:
        return self.random.choice(PATTERNS)

    def _schema(self) -> Any:
        schema = self.random.choice(SCHEMAS)
        for _ in range(self.random.choice((0, 0, 1, 2, 10))):
            schema = self.random.choice(
                ({"type": "array", "items": schema}, {"properties": {"a": schema}}, {"anyOf": [schema, {}]})
            )
        return schema

    def _json_schema(self) -> Any:
        return json.dumps(self._schema())

    def _response_format(self) -> Any:
        kind = self.random.choice(("text", "json_object", "json_schema", "json_schema", "json_schema"))
        return {"type": kind} | (
            {"json_schema": {"name": "x", "schema": self._schema()}} if kind == "json_schema" else {}
        )

    def _tools(self) -> Any:
        tool = {"type": "function", "function": {"name": self.random.choice("fgh"), "parameters": self._schema()}}
        return self.random.choice(([TOOL], [tool], [tool, TOOL], [TOOL] * 128, []))

    def _tool_choice(self) -> Any:
        return self.random.choice(("auto", "none", "required", {"type": "function", "function": {"name": "f"}}))

    def _prompt(self) -> Any:
        tokens = self._tokens
        return self.random.choice(
            (self._text(), tokens(), [tokens()], [tokens() for _ in range(4)], ["a", "b"], ["x"] * 3)
        )

    def _suffix(self) -> Any:
        return self._text()[:60_000]

    def _text(self) -> str:
        return self.random.choice(TEXTS)

    def _chat_template_kwargs(self) -> Any:
        value = self.random.choice
        return {
            value(KEYS): value((True, False, None, 0, 1e7, -1, "x", "", "low", 0.5)) for _ in range(value((1, 2, 16)))
        }

    def _reasoning(self) -> Any:
        return {
            self.random.choice(("effort", "enabled", "enable", "reasoning_effort")): self.random.choice(
                ("low", "none", 0.5, True)
            )
        }

    def _reasoning_effort(self) -> Any:
        return self.random.choice(("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max", 0, 0.99, 0.5))

    def _messages(self) -> Any:
        pick = self.random.choice
        call = {"id": pick(("1", "")), "type": "function", "function": {
            "name": pick(("f", "", "x" * 256)),
            "arguments": pick(("{}", "", "[", "null", "5", '{"a":' * 60 + "1" + "}" * 60, "\x00", {"a": [1]}, '"x"')),
        }}  # fmt: skip
        made: list[Any] = []
        for _ in range(pick((1, 1, 2, 4, 40))):
            role = pick(("system", "user", "assistant", "tool", "developer", "function", "user"))
            content: Any = pick((self._text(), self._text(), None, "", [{"type": "text", "text": self._text()}], []))
            message: dict[str, Any] = {"role": role, "content": content}
            if role == "assistant" and pick((True, False)):
                message["tool_calls"] = pick(([call], [call, call], []))
            extras = {"name": "n", "tool_call_id": "1", "reasoning_content": "r", "phase": "commentary"}
            message |= {name: value for name, value in extras.items() if pick((True, False, False, False))}
            made.append(message)
        return made


class Seeing(Mutator):
    """Chats with images: of each format, true ones, damaged ones, at the bounds, and with any field."""

    def __init__(self, seed: int, options: tuple[str, ...]) -> None:
        """`options` are those of an image that the engine has."""
        super().__init__(seed, (CHAT,))
        self.options = options

    def request(self) -> tuple[str, dict[str, Any]]:
        path, body = super().request()
        if body.get("n") not in (None, 1, 2):
            # Choices of an image are tried, but not by the hundred: each is a prompt of its own on this CPU.
            body.pop("n")
        body["messages"] = self._messages()
        return path, body

    def _messages(self) -> Any:
        pick = self.random.choice
        return [
            {"role": "user", "content": [
                *[self._image() for _ in range(pick((0, 1, 1, 1, 2, 4)))],
                {"type": "text", "text": pick((*TEXTS[:6], "hi", "hi", "what is it", "<|image_pad|>"))},
            ]}
            for _ in range(pick((1, 1, 1, 2)))
        ]  # fmt: skip

    def _image(self) -> dict[str, Any]:
        pick = self.random
        form = pick.choice(("PNG", "JPEG", "WEBP", "GIF"))
        if pick.random() < 0.1:
            form, data = (
                "PNG",
                pictures.png(*pick.choice(((1, 1), (1, 200), (200, 1), (27, 29), (3000, 20), (2000, 999)))),
            )
        else:
            size = pick.choice((1, 2, 3, 8, 27, 28, 56, 100)), pick.choice((1, 3, 28, 29, 57, 200))
            frames = 1 if form == "JPEG" else pick.choice((1, 1, 3))
            more = pick.choice(({}, {"progressive": True}, {"lossless": True}, {"optimize": True}))
            data = pictures.made(form, *size, frames, pick.randrange(1000), **more)
        if pick.random() < 0.3:
            data = self._damaged(data)
        url = pictures.data_url(f"image/{form.lower()}", data)
        options: dict[str, Any] = {
            name: pick.choice((1, 2, 12, 64, 16_384)) for name in self.options if pick.random() < 0.1
        }
        if pick.random() < 0.2:
            options["detail"] = pick.choice(("auto", "low", "high", "default"))
        return {"type": "image_url", "image_url": {"url": url, **options}}

    def _damaged(self, data: bytes) -> bytes:
        pick, found = self.random, bytearray(data)
        for _ in range(pick.choice((1, 2, 5))):
            at = pick.randrange(len(found))
            found[at : at + pick.choice((0, 1, 1, 4))] = pick.randbytes(pick.choice((0, 1, 1, 4)))
        return bytes(found[: pick.randrange(len(found))] if pick.random() < 0.1 else found)


def kinds(seconds: int) -> list[Any]:
    """Every engine; `seconds` is the time that the real ones get."""
    real = (pytest.mark.engine, pytest.mark.timeout(seconds))
    return [
        pytest.param("sim", id="sim"),
        pytest.param("sglang", id="sglang", marks=[*real, pytest.mark.sglang]),
        pytest.param("sim-vllm", id="sim-vllm"),
        pytest.param("vllm", id="vllm", marks=[*real, pytest.mark.vllm]),
    ]


class Finding(AssertionError):
    """The engine died of what passed, or was stalled by it."""


async def fuzz(
    engine: EngineProcess,
    requests: int,
    seed: int,
    first: int = 0,
    *,
    mutator: Mutator | None = None,
    alive: tuple[str, dict[str, Any]] = (COMPLETIONS, CANARY),
    facts: Facts = FACTS,
    generates: bool = True,
) -> Counter[str]:
    """`alive` is the canary: its path and body. Each body is checked with `facts` and the engine's own differences, as
    a gateway does, and sent in its words. Raises Finding with the last requests."""
    facts = facts_for(engine.kind, facts, generates=generates)
    asking = sent(engine.kind, *alive, f"alive-{seed}")
    assert asking is not None
    counts: Counter[str] = Counter()
    mutator = mutator or Mutator(seed)
    for _ in range(first):
        mutator.request()
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    # A connection of its own each: an engine closes idle ones, also while the next request is being made.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(request: Sent, kind: str) -> None:
            try:
                async with session.post(
                    engine.url + request.path, data=request.body, headers=request.headers
                ) as response:
                    text = await response.read()
                counts[f"{kind} {response.status}"] += 1
                if response.status >= 500 or (b'"code": 500' in text or b'"code":500' in text):
                    counts["engine's own error: " + text[:160].decode(errors="replace")] += 1
            except TimeoutError:
                counts[f"{kind} took over {_TIMEOUT_SECONDS:g} s"] += 1
            except aiohttp.ClientError as error:
                counts[f"{kind} {type(error).__name__}"] += 1

        async def canary() -> float:
            began = time.monotonic()
            async with session.post(engine.url + asking.path, data=asking.body, headers=asking.headers) as response:
                assert response.status == 200, await response.text()
            return time.monotonic() - began

        usual = max([await canary() for _ in range(5)])
        bound = max(_STALL_SECONDS, _STALL_FACTOR * usual)
        slowest = 0.0
        for start in range(first, first + requests, 100):
            batch: list[Sent] = []
            for number in range(start, min(start + 100, first + requests)):
                path, body = mutator.request()
                problem = check(body, path, facts, len(json.dumps(body)))
                request = None if problem else sent(engine.kind, path, body, f"fuzz-{seed}-{number}")
                counts["refused" if problem else "not done by this engine" if request is None else "passed"] += 1
                if request is not None:
                    batch.append(request)
            for at in range(0, len(batch), AT_ONCE):
                await asyncio.gather(*(send(request, "answered") for request in batch[at : at + AT_ONCE]))
            try:
                took = await canary()
            except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
                raise Finding(f"no canary after {start + 100}: {error!r}\n{told(batch)}\n{engine.tail()}") from None
            slowest = max(slowest, took)
            if engine.process.poll() is not None or took > bound:
                raise Finding(f"canary took {took:.2f} s, usually {usual:.2f}\n{told(batch)}\n{engine.tail()}")
            if os.environ.get("SHOAL_FUZZ_VERBOSE"):
                print(start + 100, f"canary {took:.2f} s", dict(counts), flush=True)
    counts[f"slowest canary {slowest:.2f} s, usually {usual:.2f} s"] = 1
    return counts


def told(batch: list[Sent]) -> str:
    return "\n".join(f"{request.path} {request.body[:600].decode(errors='replace')}" for request in batch)


@pytest.mark.parametrize("kind", kinds(400 + REQUESTS))
async def test_what_passes_leaves_the_engine_alive_and_quick(
    kind: Kind, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*ROOMY[WORDS[kind].name], *GRAMMARS.get(kind, ()))
    with running_engine(kind, tmp_path, *more) as engine, capsys.disabled():
        counts = await fuzz(engine, REQUESTS if kind in REAL else 300, SEED, FROM)
    record_property("fuzz", dict(counts))
    with capsys.disabled():
        print(f"\n{kind}: {json.dumps(counts.most_common(40), indent=1)}")
    assert counts["passed"] > counts["refused"] / 4


@pytest.mark.parametrize("kind", kinds(400 + REQUESTS))
async def test_what_passes_leaves_an_embedding_engine_alive_and_quick(
    kind: Kind, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = WORDS[kind]
    with running_engine(kind, tmp_path, *words.pooling, *ROOMY[words.name]) as engine, capsys.disabled():
        counts = await fuzz(
            engine, REQUESTS if kind in REAL else 300, SEED, FROM,
            mutator=Mutator(SEED, (EMBEDDINGS,)), alive=(EMBEDDINGS, EMBEDDED_CANARY),
            generates=False,
        )  # fmt: skip
    record_property("fuzz", dict(counts))
    with capsys.disabled():
        print(f"\n{kind}: {json.dumps(counts.most_common(40), indent=1)}")
    assert counts["passed"] > counts["refused"] / 4


@pytest.mark.parametrize("kind", [kind for kind in kinds(600 + REQUESTS) if kind.id in REAL])
async def test_what_passes_leaves_an_engine_that_sees_alive_and_quick(
    kind: Kind, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*ROOMY[WORDS[kind].name], *GRAMMARS.get(kind, ()))
    with running_vision_engine(kind, tmp_path, *more) as engine, capsys.disabled():
        config = json.loads((tmp_path / "vision-model" / "config.json").read_text())
        vocabulary: int = config["text_config"]["vocab_size"]
        facts = Facts(vocabulary=vocabulary, context_length=CONTEXT, media=frozenset({"image"}))
        counts = await fuzz(
            engine, REQUESTS, SEED, FROM, mutator=Seeing(SEED, IMAGE_OPTIONS.get(kind, ())),
            alive=(CHAT, SEEN_CANARY), facts=facts,
        )  # fmt: skip
    record_property("fuzz", dict(counts))
    with capsys.disabled():
        print(f"\n{kind}, vision: {json.dumps(counts.most_common(40), indent=1)}")
    assert counts["passed"] > counts["refused"] / 4
