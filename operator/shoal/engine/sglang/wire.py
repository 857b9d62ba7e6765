"""SGLang's side of a request: the gateway's own words are SGLang's, so almost nothing changes."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, cast

import orjson

from shoal.core.enginedifferences import EngineDifferences
from shoal.core.fields.table import GENERATING, RERANK, SCORE, TABLE
from shoal.engine.wire import (
    NO_ENDPOINT,
    AcceptedDrafts,
    AnswerGarbled,
    EngineCall,
    Ranking,
    ReadAcceptedDrafts,
    Rewriter,
)

_LACKS: Final = re.compile(rb"never been loaded|failed to implicitly load|not loaded|incomplete unload", re.IGNORECASE)
# FastAPI's answer for a path without a route. SGLang's own errors, also those about a model, have other members.
_NO_ROUTE: Final = re.compile(rb'\s*\{\s*"detail"\s*:\s*"Not Found"\s*\}\s*')
_MODEL_FIELD: Final = re.compile(rb'"model":\s*"(?:[^"\\]|\\.)*"')
_NOTHING: Final[Mapping[str, frozenset[str]]] = MappingProxyType({})
_EXTENSION: Final = re.compile(rb'"sglext": ?(?=\{)')
_NO_CHOICES: Final = re.compile(rb'"choices": ?\[\]')
_DECODER: Final = json.JSONDecoder()
EMBEDS_ARG: Final = "--is-embedding"
NO_PREFIX_CACHE: Final = "--disable-radix-cache"
# Not those that bound every call (glm47, kimi_k3), or every answer (beam, response_template).
_FREE_PARSERS: Final = frozenset({
    "apertus2509", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "deepseekv41", "dots",
    "gemma4", "gigachat3", "gigachat35", "glm", "glm45", "gpt-oss", "hermes", "hunyuan", "interns1", "k2_horizon",
    "kimi_k2", "lfm2", "ling3", "llama3", "mimo", "minicpm5", "minimax-m2", "minimax-m3", "mistral", "muse", "nanbeige",
    "poolside_v1", "pythonic", "qwen", "qwen25", "qwen3_coder", "spark25", "step3", "step3p5", "trinity",
})  # fmt: skip


def _media_switch(args: Sequence[str]) -> bool | None:
    # With both arguments it refuses images.
    return False if "--language-model-only" in args else True if "--enable-multimodal" in args else None


_DIFFERENCES: Final = EngineDifferences(
    media_switch=_media_switch,
    embeds_arg=EMBEDS_ARG,
    no_prefix_cache_arg=NO_PREFIX_CACHE,
    deterministic_args=("--enable-deterministic-inference", "--rl-on-policy-target"),
    free_parsers=_FREE_PARSERS,
    strict_settings=("SGLANG_TOOL_STRICT_LEVEL",),
)
_PATHS: Final[Mapping[str, str]] = MappingProxyType({path: path for path in TABLE})


class ModelNameRewriter:
    """Replaces the engine's own name of the model by the name that the client used.

    Editing bytes is safe because inside a JSON string every quote is escaped, so `"model":` can only be a key.
    """

    __slots__ = ("_compact", "_new", "_spaced", "same")

    def __init__(self, engine_name: str, model_name: str) -> None:
        quoted = orjson.dumps(engine_name)
        self._compact = b'"model":' + quoted
        self._spaced = b'"model": ' + quoted
        self._new = b'"model":' + orjson.dumps(model_name)
        self.same = engine_name == model_name

    def rewrite(self, data: bytes) -> bytes:
        if self.same:
            return data
        # Two steps, the second only where the first finds nothing. (`in` costs more than a replacement.)
        replaced = data.replace(self._compact, self._new, 1)
        return data.replace(self._spaced, self._new, 1) if replaced is data else replaced

    def rewrite_any(self, data: bytes) -> bytes:
        """For an embeddings answer, in which SGLang writes the path of the weights instead of its own name.

        Such an answer contains no text of the client or the model, so the only `"model"` in it is the field.
        """
        return _MODEL_FIELD.sub(lambda _: self._new, data, count=1)


@lru_cache(maxsize=1024)
def _rewriter_of(engine_name: str, model_name: str) -> ModelNameRewriter:
    """Requests share it."""
    return ModelNameRewriter(engine_name, model_name)


class SGLangWire:
    type: str = "SGLang"
    provider: str = "sglang"
    ready_path: str = "/ready"
    aborts: bool = True
    paths: Mapping[str, str] = _PATHS
    salted: frozenset[str] = GENERATING
    differences: EngineDifferences = _DIFFERENCES
    special: Mapping[str, frozenset[str]] = _NOTHING
    reshaped: frozenset[str] = frozenset({RERANK, SCORE})

    def added(self, endpoint: str, fields: Mapping[str, Any]) -> bytes | None:
        return b""

    def path(self, call: EngineCall) -> str:
        return _PATHS[call.endpoint]

    def encode(self, body: bytes, call: EngineCall) -> bytes:
        # An engine refuses an id that it still has, and it may not have noticed yet that the gateway closed the
        # connection: each attempt has an id of its own.
        if call.number > 1:
            sent = self.sent_id(call) or b""
            body = body.replace(b'"rid":"%b"' % call.id.encode(), b'"rid":"%b"' % sent, 1)
        if call.adapter is None and call.speculated is None:
            return body
        # A client cannot set either field: the field table does not forward them.
        drafts = b'"return_spec_tokens_details":true,' if _tells_drafts(call) else b""
        # SGLang reads the adapter's name from `lora_path`.
        adapter = b"" if call.adapter is None else b'"lora_path":"%b",' % call.adapter.encode()
        return b"{" + drafts + adapter + body[1:]

    def sent_id(self, call: EngineCall) -> bytes | None:
        return None if call.number == 1 else f"{call.id}.{call.number}".encode()

    def rewriter(self, call: EngineCall, model_name: str) -> Rewriter:
        return _rewriter_of(call.model, model_name)

    def accepted_drafts(self, call: EngineCall) -> ReadAcceptedDrafts | None:
        if call.speculated is None or not _tells_drafts(call):
            return None
        return partial(_accepted_drafts, answers=call.speculated.prompts * call.speculated.choices)

    def elsewhere(self, status: int, error: bytes, adapter: bool) -> str | None:
        if status == 404 and _NO_ROUTE.fullmatch(error) is not None:
            return NO_ENDPOINT
        return "adapter" if adapter and _LACKS.search(error) is not None else None

    def plain_error(self, error: bytes) -> bytes:
        return error

    def reshape(self, call: EngineCall, answer: object, ranking: Ranking) -> tuple[dict[str, Any], int | None]:
        """SGLang's list of documents, the best first, as the object that clients of Cohere, Jina and vLLM read. The
        list has no usage: each document has the prompt tokens of its pair. An answer of /v1/score stays what it is."""
        if call.endpoint == SCORE:
            return _scored(answer, ranking)
        if not isinstance(answer, list) or not all(isinstance(item, dict) for item in cast(list[object], answer)):
            raise AnswerGarbled("The engine's answer is no ranked list.")
        items = cast(list[dict[str, Any]], answer)
        ranking.complete(item.get("index") for item in items)
        results: list[dict[str, Any]] = []
        total: int | None = 0
        for item in items:
            tokens = _tokens(item.get("meta_info"))
            total = None if total is None or tokens is None else total + tokens
            result: dict[str, Any] = {"index": item.get("index"), "relevance_score": item.get("score")}
            if (text := item.get("document")) is not None:
                result["document"] = {"text": text}
            results.append(result)
        return {"object": "list", "model": ranking.model_name, "results": results[: ranking.top_n]}, total


def _scored(answer: object, ranking: Ranking) -> tuple[dict[str, Any], int | None]:
    given = cast(dict[str, Any], answer) if isinstance(answer, dict) else {}
    scores: object = given.get("scores")
    if not isinstance(scores, list):
        raise AnswerGarbled("The engine's answer has no scores.")
    ranking.complete(range(len(cast(list[object], scores))))
    return given | {"model": ranking.model_name}, _tokens(given.get("usage"))


def _tells_drafts(call: EngineCall) -> bool:
    """Whether SGLang can say of all answers what was accepted: of several prompts with one answer each, it says it only
    of the first."""
    asked = call.speculated
    return asked is not None and call.endpoint in GENERATING and (asked.prompts == 1 or asked.choices > 1)


def _accepted_drafts(data: bytes, answers: int) -> AcceptedDrafts | None:
    """SGLang puts `sglext` into whole answers as the last member. A stream has it in an event of its own, without
    choices, which clients that read the first choice of each event do not expect. Other members of `sglext` are there
    because the client asked for them, and stay.

    Editing bytes is safe because inside a JSON string every quote is escaped, so `"sglext":` can only be a key.
    """
    key = _EXTENSION.search(data)
    if key is None:
        return None
    start = key.end()
    try:
        # One byte is one character of Latin-1, so the end is that of the bytes.
        _, length = _DECODER.raw_decode(data[start:].decode("latin-1"))
        found: object = orjson.loads(data[start : start + length])
    except ValueError:
        return None
    if not isinstance(found, dict) or "spec_tokens_details" not in found:
        return None
    extension, after = cast(dict[str, object], found), data[start + length :]
    tokens = _correct_drafts(extension.pop("spec_tokens_details"), answers)
    if extension:
        return AcceptedDrafts(data[:start] + orjson.dumps(extension) + after, tokens)
    before = data[: key.start()].rstrip(b" ")
    rest = before[:-1] + after if before.endswith(b",") else before + after.lstrip(b", ")
    empty = rest.startswith(b"data:") and _NO_CHOICES.search(rest) is not None
    return AcceptedDrafts(b"" if empty else rest, tokens)


def _correct_drafts(details: object, answers: int) -> int | None:
    """Of one answer, or of a list of them. SGLang leaves out an answer of which it knows nothing, and writes 0 for a
    number that it does not know: where nothing was proposed, nothing is known."""
    listed = cast(list[object], details) if isinstance(details, list) else [details]
    if len(listed) != answers:
        return None
    total = 0
    for one in listed:
        counts = cast(dict[str, object], one) if isinstance(one, dict) else {}
        correct, proposed = counts.get("spec_num_correct_drafts"), counts.get("spec_num_proposed_drafts")
        if type(correct) is not int or type(proposed) is not int or not 0 <= correct <= proposed or not proposed:
            return None
        total += correct
    return total


def _tokens(counts: object) -> int | None:
    found = cast(dict[str, object], counts).get("prompt_tokens") if isinstance(counts, dict) else None
    return found if type(found) is int and found >= 0 else None


WIRE: Final = SGLangWire()
