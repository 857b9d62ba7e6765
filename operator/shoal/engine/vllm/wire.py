"""vLLM's side of a request, as of 0.32.0: what changes on the way there, and what its answers and errors mean."""

import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, cast

import orjson

from shoal.core.architectures.names import IMAGES_IF_ASKED
from shoal.core.enginedifferences import EngineDifferences
from shoal.core.fields.table import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    GENERATING,
    RERANK,
    SCORE,
    TOKENIZE,
    TRANSCRIBE,
)
from shoal.engine.vllm import tokenscores
from shoal.engine.wire import (
    NO_ENDPOINT,
    Accepts,
    AnswerGarbled,
    EngineCall,
    NotHere,
    Ranking,
    ReadAcceptedDrafts,
    Rewriter,
)

# --- requests ---------------------------------------------------------------------------------------------------------

_EFFORTS: Final = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


def _never(_value: Any) -> bool:
    return False


def _if_false(value: Any) -> bool:
    return value is False


def _if_true(value: Any) -> bool:
    return value is True


def _effort(value: Any) -> bool:
    return isinstance(value, str) and value in _EFFORTS


def _only_effort(value: Any) -> bool:
    return isinstance(value, dict) and all(
        name in ("effort", "reasoning_effort") and (effort is None or _effort(effort))
        for name, effort in cast(dict[str, Any], value).items()
    )


def _one_text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, str) or isinstance(cast(list[Any], value)[0], str)


def _one_list(value: Any) -> bool:
    return not isinstance(cast(list[Any], value)[0], list)


def _no_words(value: Any) -> bool:
    return "word" not in value


def _named(value: Any) -> bool:
    return value["type"] != "json_schema" or value["json_schema"].get("name") is not None


_GENERATED: Final[Mapping[str, Accepts]] = {
    "response_format": _named,
    "return_cached_tokens_details": _if_false,
}
_FIELDS: Final[Mapping[str, Mapping[str, Accepts]]] = MappingProxyType(
    {
        CHAT: {
            **_GENERATED,
            "reasoning": _only_effort,
            "reasoning_effort": _effort,
            "task": _never,
            "separate_reasoning": _if_true,
            "stream_reasoning": _if_true,
            "return_prompt_token_ids": _if_false,
            "max_dynamic_patch": _never,
            "min_dynamic_patch": _never,
        },
        COMPLETIONS: {**_GENERATED, "suffix": _never},
        SCORE: {
            "query": _one_text,
            "items": _texts,
            "label_token_ids": _never,
            "apply_softmax": _if_false,
            "temperature": _never,
            "item_first": _if_false,
            "return_token_logprobs": _if_false,
        },
        TOKENIZE: {
            "prompt": _one_text,
            "tool_choice": lambda value: value == "auto",
            "reasoning_effort": _never,
        },
        DETOKENIZE: {"tokens": _one_list, "skip_special_tokens": _if_false},
        TRANSCRIBE: {"timestamp_granularities[]": _no_words},
    }
)
"""vLLM ignores fields that it does not know, and answers as if they were not there."""

_Addition = Callable[[Any], Mapping[str, Any]]


def _effort_of(reasoning: Mapping[str, Any]) -> Mapping[str, Any]:
    effort = reasoning.get("effort") or reasoning.get("reasoning_effort")
    return {} if effort is None else {"reasoning_effort": effort}


_SAMPLING: Final[Mapping[str, _Addition]] = {
    "regex": lambda value: {"structured_outputs": {"regex": value}},
    "no_stop_trim": lambda value: {"include_stop_str_in_output": value},
}
# Its templates end the last message and begin an answer, unless `add_generation_prompt` is false.
_CONTINUED: Final[Mapping[str, _Addition]] = {
    "continue_final_message": lambda value: {"add_generation_prompt": False} if value else {}
}
_ADDITIONS: Final[Mapping[str, Mapping[str, _Addition]]] = {
    CHAT: {**_SAMPLING, **_CONTINUED, "reasoning": _effort_of},
    TOKENIZE: _CONTINUED,
    COMPLETIONS: {**_SAMPLING, "json_schema": lambda value: {"structured_outputs": {"json": value}}},
    SCORE: {"query": lambda value: {"queries": value}},
}
"""What fields are called in vLLM. The gateway's own words stay in the body, where vLLM ignores them."""

# --- answers ----------------------------------------------------------------------------------------------------------

_ID_PREFIXES: Final = {
    CHAT: b"chatcmpl-",
    COMPLETIONS: b"cmpl-",
    EMBEDDINGS: b"embd-",
    CLASSIFY: b"classify-",
}
_MODEL_FIELD: Final = re.compile(rb'"model":\s*("(?:[^"\\]|\\.)*")')
_REASONING: Final = b'"reasoning":'
_STOP: Final = b'"stop_reason":'
_UNKNOWN_MODEL: Final = re.compile(rb"NotFoundError|does not exist", re.IGNORECASE)
_VALIDATION: Final = re.compile(
    r"\d+ validation errors?:\n.{0,200}?'msg': (?:'([^'\n]{1,300})'|\"([^\"\n]{1,300})\")", re.DOTALL
)
_NO_PARSER: Final = "--tool-call-parser"
_NOT_DECODED: Final = "Invalid or unsupported audio file."
"""What it also says where its packages for sound are not installed, as in its own image."""
_REPEATED: Final = re.compile(r" \(parameter=[^()\n]{1,200}\)$")
_STOPPING: Final = b"cannot schedule new futures after shutdown"
_DIED: Final = b"EngineCore encountered an issue"


class VLLMRewriter:
    """vLLM's answers name the adapter as the engine knows it, have a word before the id, call a model's thoughts
    `reasoning`, and what ended an answer `stop_reason`.

    Editing bytes is safe because inside a JSON string every quote is escaped: what is replaced can only be a key with
    its value. The name of the model comes before everything that a model or a client wrote.
    """

    __slots__ = ("_asked", "_checked", "_expected", "_id", "_new", "_own_id")

    def __init__(self, call: EngineCall, model_name: str) -> None:
        self._asked = call.adapter or call.model
        self._expected = b'"model":' + orjson.dumps(self._asked)
        self._new = b'"model":' + orjson.dumps(model_name)
        id = call.id.encode()
        self._id = b'"id":"%b%b' % (_ID_PREFIXES.get(call.endpoint, b""), id)
        self._own_id = b'"id":"' + id
        self._checked = False

    @property
    def same(self) -> bool:
        return False

    def rewrite(self, data: bytes) -> bytes:
        if not self._checked:
            self._check(data)
        data = data.replace(self._id, self._own_id, 1)
        if data.find(self._expected) >= 0:
            data = data.replace(self._expected, self._new, 1)
        else:
            # No other name of the engine's gets out either.
            data = _MODEL_FIELD.sub(lambda _: self._new, data, count=1)
        return data.replace(_REASONING, b'"reasoning_content":').replace(_STOP, b'"matched_stop":')

    def rewrite_any(self, data: bytes) -> bytes:
        return self.rewrite(data)

    def _check(self, data: bytes) -> None:
        """An answer of other weights than those asked for reaches no client."""
        found = _MODEL_FIELD.search(data)
        if found is not None:
            if orjson.loads(found[1]) != self._asked:
                raise NotHere("wrong_model")
            self._checked = True


# --- the wire ---------------------------------------------------------------------------------------------------------


_PATHS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{path: path for path in (CHAT, COMPLETIONS, EMBEDDINGS, RERANK, SCORE, TRANSCRIBE)},
        CLASSIFY: "/classify",
        TOKENIZE: "/tokenize",
        DETOKENIZE: "/detokenize",
    }
)
_NOT_TRANSCRIBED: Final = frozenset({"Qwen2AudioForConditionalGeneration"})
NO_PREFIX_CACHE: Final = "--no-enable-prefix-caching"
# Not those that may bound every call (glm45, glm47, ling3), or have grammars of their own (cohere_command, mistral).
_FREE_PARSERS: Final = frozenset({
    "apertus", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots", "ernie45",
    "functiongemma", "gemma4", "gigachat3", "granite", "granite-20b-fc", "granite4", "hermes", "hunyuan_a13b", "hy_v3",
    "hy_v4", "internlm", "jamba", "k2_horizon", "kimi_k2", "lfm2", "llama3_json", "llama4_json",
    "llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax_m2", "minimax_m3", "olmo3", "openai", "phi4_mini_json",
    "plamo3", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5",
    "xlam",
})  # fmt: skip
_STRICT_SETTINGS: Final = ("--tool-strict-level",)


def _media_switch(args: Sequence[str]) -> bool | None:
    """The later argument wins."""
    given = [arg for arg in args if arg in ("--language-model-only", "--no-language-model-only")]
    return False if given[-1:] == ["--language-model-only"] else None


_GENERATING: Final = EngineDifferences(
    {**_FIELDS, SCORE: {"label_token_ids": tokenscores.few_labels}},
    not_transcribed=_NOT_TRANSCRIBED,
    reads_images=IMAGES_IF_ASKED,
    media_switch=_media_switch,
    no_prefix_cache_arg=NO_PREFIX_CACHE,
    free_parsers=_FREE_PARSERS,
    strict_settings=_STRICT_SETTINGS,
    most_scored_bytes=tokenscores.MOST_BYTES,
)
_DIFFERENCES: Final = EngineDifferences(
    _FIELDS,
    pairs_score=True,
    generating=_GENERATING,
    not_transcribed=_NOT_TRANSCRIBED,
    reads_images=IMAGES_IF_ASKED,
    media_switch=_media_switch,
    no_prefix_cache_arg=NO_PREFIX_CACHE,
    free_parsers=_FREE_PARSERS,
    strict_settings=_STRICT_SETTINGS,
)
_SPECIAL: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {path: frozenset({*_FIELDS.get(path, ()), *_ADDITIONS.get(path, ())}) for path in {*_FIELDS, *_ADDITIONS}}
)


class VLLMWire:
    type: str = "vLLM"
    provider: str = "vllm"
    ready_path: str = "/health"
    aborts: bool = False
    paths: Mapping[str, str] = _PATHS
    salted: frozenset[str] = GENERATING | {SCORE}
    differences: EngineDifferences = _DIFFERENCES
    special: Mapping[str, frozenset[str]] = _SPECIAL
    reshaped: frozenset[str] = frozenset({RERANK, SCORE, DETOKENIZE})

    def added(self, endpoint: str, fields: Mapping[str, Any]) -> bytes | None:
        if endpoint == SCORE and fields.get("label_token_ids") is not None:
            return tokenscores.options(fields)
        accepts, additions = _FIELDS.get(endpoint, {}), _ADDITIONS.get(endpoint, {})
        added: dict[str, Any] = {}
        for name in self.special[endpoint] & fields.keys():
            if (value := fields.get(name)) is None:
                continue
            if name in accepts and not accepts[name](value):
                return None
            for new, content in additions[name](value).items() if name in additions else ():
                if isinstance(content, dict):
                    # Two grammars: vLLM says that it takes only one.
                    added[new] = {**added.get(new, {}), **cast(dict[str, Any], content)}
                elif fields.get(new) is None:
                    added[new] = content
        return b"," + orjson.dumps(added)[1:-1] if added else b""

    def path(self, call: EngineCall) -> str:
        return COMPLETIONS if tokenscores.asked(call) else _PATHS[call.endpoint]

    def encode(self, body: bytes, call: EngineCall) -> bytes:
        if tokenscores.asked(call):
            return tokenscores.encode(body, call)
        base = b'{"model":' + orjson.dumps(call.model)
        if not body.startswith(base):
            raise ValueError("the body does not begin with the model")
        asked = base if call.adapter is None else b'{"model":' + orjson.dumps(call.adapter)
        # The id goes in a header; here vLLM would ignore it.
        body = body.replace(b',"rid":"%b"' % call.id.encode(), b"", 1)
        return asked + call.added + body[len(base) :]

    def sent_id(self, call: EngineCall) -> bytes | None:
        # It takes an id twice at one time.
        return None

    def rewriter(self, call: EngineCall, model_name: str) -> Rewriter:
        return VLLMRewriter(call, model_name)

    def accepted_drafts(self, call: EngineCall) -> ReadAcceptedDrafts | None:
        # Its extension for them, --per-request-spec-decode-metrics, is experimental.
        return None

    def elsewhere(self, status: int, error: bytes, adapter: bool) -> str | None:
        if status == 404:
            if _UNKNOWN_MODEL.search(error) is None:
                return NO_ENDPOINT
            return "adapter" if adapter else "wrong_model"
        if status >= 500:
            if _STOPPING in error:
                return "unavailable"
            if _DIED in error:
                return "lost"
        return None

    def plain_error(self, error: bytes) -> bytes:
        """Validation errors are written as objects of Python, of which the client gets the first's text; other texts
        end with the parameter once more, or name arguments of the engine."""
        try:
            decoded: object = orjson.loads(error)
        except orjson.JSONDecodeError:
            return error
        inner = cast(dict[str, Any], decoded).get("error") if isinstance(decoded, dict) else None
        if not isinstance(inner, dict):
            return error
        fields = cast(dict[str, Any], inner)
        message: object = fields.get("message")
        if isinstance(message, str) and _NO_PARSER in message:
            fields |= {"message": "`tools` cannot be used: this model has no parser of tool calls.", "param": "tools"}
        elif message == _NOT_DECODED:
            fields["message"] = (
                "The engine cannot decode this file: it is damaged, or the engine's image has no decoder for sound."
            )
        elif isinstance(message, str):
            found = _VALIDATION.match(message)
            fields["message"] = found[1] or found[2] if found is not None else _REPEATED.sub("", message)
        if isinstance(fields.get("param"), str):
            fields["param"] = fields["param"].removeprefix("body.")
        return orjson.dumps({"error": fields})

    def reshape(self, call: EngineCall, answer: object, ranking: Ranking) -> tuple[dict[str, Any], int | None]:
        given = cast(dict[str, Any], answer) if isinstance(answer, dict) else {}
        if call.endpoint == DETOKENIZE:
            if not isinstance(given.get("prompt"), str):
                raise AnswerGarbled("The engine's answer has no text.")
            return {"text": given["prompt"]}, 0
        if given.get("model") != (call.adapter or call.model):
            raise NotHere("wrong_model")
        tokens = _prompt_tokens(given.get("usage"))
        if tokenscores.asked(call):
            return tokenscores.scored(given, call, ranking), tokens
        if call.endpoint == RERANK:
            return _ranked(given, ranking), tokens
        items = _objects(given.get("data"))
        ranking.complete(item.get("index") for item in items)
        scores = [[item.get("score")] for item in sorted(items, key=itemgetter("index"))]
        return {"scores": scores, "model": ranking.model_name, "object": "scoring"}, tokens


def _ranked(given: Mapping[str, Any], ranking: Ranking) -> dict[str, Any]:
    items = _objects(given.get("results"))
    ranking.complete(item.get("index") for item in items)
    results: list[dict[str, Any]] = []
    for item in items[: ranking.top_n]:
        result: dict[str, Any] = {"index": item.get("index"), "relevance_score": item.get("relevance_score")}
        document: object = item.get("document")
        text = cast(dict[str, Any], document).get("text") if isinstance(document, dict) else None
        if ranking.documents and text is not None:
            result["document"] = {"text": text}
        results.append(result)
    return {"object": "list", "model": ranking.model_name, "results": results}


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast(list[object], value)):
        raise AnswerGarbled("The engine's answer is no list of results.")
    return cast(list[dict[str, Any]], value)


def _prompt_tokens(usage: object) -> int | None:
    found = cast(dict[str, object], usage).get("prompt_tokens") if isinstance(usage, dict) else None
    return found if type(found) is int and found >= 0 else None


WIRE: Final = VLLMWire()
