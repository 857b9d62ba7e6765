"""Every field that a request may have: its bounds, and why. Fields that are not listed are refused by name.

`shoal generate` writes docs/reference/requestfields.md from this table. It follows SGLang 0.5.23;
tests/contract/test_fields_fuzz.py mutates each field against the real engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shoal.core.fields.chat import Messages, TemplateVariables
from shoal.core.fields.kinds import (
    Bias,
    Choice,
    Facts,
    FieldProblem,
    FieldType,
    Flag,
    Number,
    ObjectField,
    OutputBound,
    Stops,
    Text,
    TokenIds,
    Whole,
    Within,
    unknown,
    wrong,
)
from shoal.core.fields.pairs import MOST_LABELS, Items, Labels, Query, Texts
from shoal.core.fields.patterns import Pattern
from shoal.core.fields.prompts import Prompts
from shoal.core.fields.recordings import RecordingField
from shoal.core.fields.schemas import Schema, SchemaText
from shoal.core.fields.tokens import PlainTexts, TextMessages, TokenLists
from shoal.core.fields.tools import ToolChoice, ToolsField
from shoal.core.fields.transcription import Granularities, Language

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = "/v1/rerank"
SCORE: Final = "/v1/score"
CLASSIFY: Final = "/v1/classify"
TOKENIZE: Final = "/v1/tokenize"
DETOKENIZE: Final = "/v1/detokenize"
TRANSCRIBE: Final = "/v1/audio/transcriptions"
ALIASES: Final[Mapping[str, str]] = {"/v2/rerank": RERANK}
"""Other paths of the same endpoints: Cohere's clients of their second API use the first."""
FORMS: Final = frozenset({TRANSCRIBE})
"""Their bodies are forms (`multipart/form-data`); all others are JSON."""
TOKENIZING: Final = frozenset({TOKENIZE, DETOKENIZE})
"""No model computes anything for them."""
PAIRS: Final = frozenset({RERANK, SCORE})
"""They read a query together with each of several texts."""
GENERATING: Final = frozenset({CHAT, COMPLETIONS})
"""They answer with text; an engine takes an id of the request and a `cache_salt` on these alone."""


@dataclass(frozen=True, slots=True)
class Field:
    kind: FieldType
    why: str
    """Why it is bounded, or why it is allowed."""
    needed: bool = False
    forwarded: bool = True
    """It is sent to the engine; otherwise it is checked and dropped."""
    media: bool = False
    """Only for Models that read images."""


@dataclass(frozen=True, slots=True)
class Anything:
    describe: str = "anything"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return None


@dataclass(frozen=True, slots=True)
class TextOnly:
    describe: str = '`["text"]`'

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return None if value == ["text"] else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a model thinks before it answers."""

    describe: str = '"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max", or a number from 0 to 0.99'

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        fine = value in _EFFORTS if isinstance(value, str) else _FRACTION.check(value, at, facts) is None
        return None if fine else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """No structural tags: they may contain any grammar."""

    describe: str = f'`{{"type": "text" | "json_object"}}`, or `"json_schema"` with {Schema().describe}'

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        found = _FORMAT.check(value, at, facts)
        if found is None and value["type"] == "json_schema" and not value.get("json_schema"):
            return FieldProblem(f"{at}.json_schema", f"You must provide `{at}.json_schema`.", "missing_value")
        return found


_EFFORTS: Final = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_FLAG: Final = Flag()
_FRACTION: Final = Number(0, 0.99)
MOST_STOPS: Final = 32
"""Strings that may end an answer."""
_PENALTY: Final = Number(-2, 2)
_FORMAT: Final = ObjectField(
    {
        "type": Choice(("text", "json_object", "json_schema")),
        "json_schema": ObjectField(
            {"name": Text(256), "description": Text(16_384), "schema": Schema(), "strict": _FLAG}, needed=("schema",)
        ),
    },
    needed=("type",),
)
_CHOICES: Final = Whole(1, 128)
_LOGPROBS: Final = Whole(0, 20)

_IGNORED: Final[Mapping[str, Field]] = {
    name: Field(Anything(), why, forwarded=False)
    for name, why in {
        "metadata": "for lists of stored answers, which do not exist here",
        "store": "nothing is stored",
        "service_tier": "there is one tier",
        "safety_identifier": "nothing is reported to anybody",
        "prompt_cache_key": "prompts with the same beginning are routed to one replica anyway",
        "prompt_cache_retention": "the engine decides what it keeps",
        "prediction": "only makes an answer faster",
    }.items()
}
_SAMPLING: Final[Mapping[str, Field]] = {
    "model": Field(Text(512), "names the Model or adapter; the engine gets its own name for it", needed=True),
    "stream": Field(_FLAG, "read by the gateway"),
    "stream_options": Field(
        ObjectField(dict.fromkeys(("include_usage", "continuous_usage_stats", "include_obfuscation"), _FLAG)),
        "the gateway asks for usage in any case, and removes what the client did not request",
    ),
    "user": Field(Text(8192), "no engine uses it"),
    "frequency_penalty": Field(_PENALTY, "OpenAI's range"),
    "presence_penalty": Field(_PENALTY, "OpenAI's range"),
    "repetition_penalty": Field(
        Number(0.1, 2), "SGLang divides by it in 32 bits: 1e-300 is zero there, and the answer of NaN"
    ),
    "logit_bias": Field(Bias(1024, 100), "an id outside the vocabulary is outside a tensor"),
    "n": Field(_CHOICES, "each choice is a sequence of its own; see the bounds of work"),
    "seed": Field(Whole(-(2**63), 2**63 - 1), "a 64-bit number in the engine"),
    "stop": Field(Stops(MOST_STOPS, 256), "looked for after each token, in as much text as the longest has"),
    "stop_token_ids": Field(
        TokenIds(64), "with `min_tokens`, an id outside the vocabulary is written outside a tensor: the engine ends"
    ),
    "temperature": Field(Number(0, 2), "OpenAI's range"),
    "top_p": Field(Number(1e-6, 1), "a probability; zero leaves no token"),
    "top_k": Field(Whole(1, 2**30, also=(-1,)), "SGLang's 'all' is 2^30; more does not fit its 32 bits"),
    "min_p": Field(Number(0, 1), "a probability; not where the engine is deterministic, which it would end"),
    "min_tokens": Field(
        Within(), "a 32-bit number in the engine; not with a grammar or tools, which may allow nothing but the end"
    ),
    "max_tokens": Field(OutputBound(), "lowered to the Model's `limits.maxOutputTokens`"),
    "response_format": Field(ResponseFormat(), "compiled into a grammar, which is walked for each token"),
    "regex": Field(
        Pattern(), "compiled into a grammar; one that can be read in two ways slows every step of the engine"
    ),
    "no_stop_trim": Field(_FLAG, "of this answer only"),
    "ignore_eos": Field(_FLAG, "of this answer only; its length is bounded"),
    "skip_special_tokens": Field(_FLAG, "of this answer only"),
    "return_cached_tokens_details": Field(_FLAG, "of this answer only"),
    "return_token_ids": Field(_FLAG, "of this answer only"),
}
_USER: Final = Field(Text(8192), "for the request log; no engine uses it", forwarded=False)
_CHAT: Final[Mapping[str, Field]] = {
    "messages": Field(
        Messages(), "the prompt; media only as data, so that no engine fetches or opens anything", needed=True
    ),
    **_SAMPLING,
    "logprobs": Field(_FLAG, "of this answer only"),
    "top_logprobs": Field(_LOGPROBS, "OpenAI's range; more than the vocabulary has ends the engine"),
    "max_completion_tokens": Field(OutputBound(), "as `max_tokens`"),
    "tools": Field(
        ToolsField(), "goes into the prompt; compiled into a grammar where a call is required or a tool is `strict`"
    ),
    "tool_choice": Field(ToolChoice(), "one of the tools"),
    "parallel_tool_calls": Field(_FLAG, "of this answer only"),
    "reasoning": Field(
        ObjectField({"effort": Effort(), "reasoning_effort": Effort(), "enabled": _FLAG, "enable": _FLAG}),
        "as `reasoning_effort`",
    ),
    "reasoning_effort": Field(Effort(), "SGLang's range"),
    "task": Field(
        Choice(("action", "query", "authority", "domain", "title", "read_url")), "a mode of DeepSeek's templates"
    ),
    "continue_final_message": Field(_FLAG, "of this answer only"),
    "separate_reasoning": Field(_FLAG, "of this answer only"),
    "stream_reasoning": Field(_FLAG, "of this answer only"),
    "chat_template_kwargs": Field(
        TemplateVariables(), "those that the engine sets itself are errors in it, or change how it reads the prompt"
    ),
    "return_prompt_token_ids": Field(_FLAG, "of this answer only"),
    "max_dynamic_patch": Field(Whole(1, 8), "pieces of each image", media=True),
    "min_dynamic_patch": Field(Whole(1, 8), "pieces of each image", media=True),
    "modalities": Field(TextOnly(), "answers are text", forwarded=False),
    **_IGNORED,
}
_IN_THE_PROMPT: Final = ("tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs")
"""Of a chat's fields, the ones that change its prompt."""
TABLE: Final[Mapping[str, Mapping[str, Field]]] = {
    CHAT: _CHAT,
    COMPLETIONS: {
        "prompt": Field(Prompts(128), "an id outside the vocabulary ends the engine", needed=True),
        **_SAMPLING,
        "logprobs": Field(_LOGPROBS, "more than the vocabulary has ends the engine"),
        "best_of": Field(_CHOICES, "SGLang does not do it: only 1, or as many as `n`", forwarded=False),
        "echo": Field(_FLAG, "with `logprobs` each token of the prompt is answered: see the bounds of work"),
        "suffix": Field(Text(65_536), "part of the prompt"),
        "json_schema": Field(SchemaText(), "as `response_format`"),
        **_IGNORED,
    },
    EMBEDDINGS: {
        "input": Field(Prompts(1024), "an id outside the vocabulary ends the engine; media are not taken", needed=True),
        "model": _SAMPLING["model"],
        "encoding_format": Field(Choice(("float", "base64")), "OpenAI's"),
        "dimensions": Field(
            Whole(1, 65_536), "the engine refuses more than the model has, and any if its config allows none"
        ),
        "user": _USER,
        **_IGNORED,
    },
    RERANK: {
        "query": Field(Query(), "read again with each document; text only", needed=True),
        "documents": Field(Texts(), 'each is a sequence of its own; text only, also as `{"text": "..."}`', needed=True),
        "model": _SAMPLING["model"],
        "top_n": Field(
            Whole(1, 1_000_000),
            "the gateway cuts the answer: SGLang would drop the token counts with the documents",
            forwarded=False,
        ),
        "return_documents": Field(_FLAG, "of this answer only; true where it is left out"),
        "user": _USER,
    },
    SCORE: {
        "query": Field(Query(ids=True), "read again with each item"),
        "items": Field(
            Items(), "each is a sequence of its own; an empty one without a query ends the engine", needed=True
        ),
        "model": _SAMPLING["model"],
        "label_token_ids": Field(
            Labels(MOST_LABELS), "each is a number per item; only for Models that generate, which need it"
        ),
        "apply_softmax": Field(_FLAG, "of this answer only"),
        "temperature": Field(Number(0.001, 1000), "the labels' values are divided by it; needs `apply_softmax`"),
        "item_first": Field(_FLAG, "of this answer only"),
        "return_token_logprobs": Field(_FLAG, "of this answer only"),
        "user": _USER,
    },
    CLASSIFY: {
        "input": Field(Prompts(1024, lists=False), "an id outside the vocabulary ends the engine", needed=True),
        "model": _SAMPLING["model"],
        "user": _USER,
    },
    TOKENIZE: {
        "prompt": Field(PlainTexts(), "either this or `messages`"),
        "messages": Field(TextMessages(), "as the engine would put them into the prompt of a chat"),
        "model": _SAMPLING["model"],
        "add_special_tokens": Field(_FLAG, "of this answer only; true where it is left out"),
        "add_generation_prompt": Field(_FLAG, "of this answer only"),
        **{name: _CHAT[name] for name in _IN_THE_PROMPT},
        "user": _USER,
    },
    DETOKENIZE: {
        "tokens": Field(TokenLists(), "an id that is no 32-bit number is an error in the engine", needed=True),
        "model": _SAMPLING["model"],
        "skip_special_tokens": Field(_FLAG, "of this answer only; true where it is left out"),
        "user": _USER,
    },
    TRANSCRIBE: {
        "file": Field(RecordingField(), "engines decode all of it at once; see the bounds of sound files", needed=True),
        "model": _SAMPLING["model"],
        "language": Field(Language(), "becomes a token of the prompt"),
        "prompt": Field(Text(8192), "a hint for engines that read one: vLLM does, SGLang does not"),
        "response_format": Field(
            Choice(("json", "text", "verbose_json", "srt", "vtt")),
            "engines refuse `srt` and `vtt`, and vLLM `verbose_json` with `stream`",
        ),
        "temperature": Field(Number(0, 1), "OpenAI's range"),
        "stream": Field(_FLAG, "the text as it is generated"),
        "timestamp_granularities[]": Field(Granularities(), "time stamps in `verbose_json`"),
        "user": _USER,
    },
}
"""By endpoint: fields by name, the most frequent first."""

REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("rid", "request_id", "extra_key", "cache_salt", "session_id", "session_params"), "it identifies requests"
    ),
    **dict.fromkeys(("priority", "custom_labels"), "says who the request is"),
    **dict.fromkeys(("lora_path", "ngram_corpus_id"), "says which weights answer: an adapter is named in `model`"),
    **dict.fromkeys(
        (
            "routed_dp_rank",
            "data_parallel_rank",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "disagg_prefill_dp_rank",
        ),
        "says which rank serves it",
    ),
    **dict.fromkeys(
        ("custom_logit_processor", "custom_params", "vllm_xargs", "chat_template"), "is code, or its arguments"
    ),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), "names caches of other engines"),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "has other names in each engine: use `response_format` or `regex`",
    ),
    **dict.fromkeys(
        ("return_hidden_states", "return_pooled_hidden_states", "return_routed_experts", "return_meta_info"),
        "shows the model's insides",
    ),
    **dict.fromkeys(
        (
            "input_ids",
            "prompt_embeds",
            "embed_overrides",
            "embed_override_token_id",
            "query_embed_overrides",
            "item_embed_overrides",
        ),
        "goes past the check of the prompt",
    ),
    **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), "documents are read whole"),
    "score_extraction_token": "makes any number of scores per item",
    **dict.fromkeys(
        ("images_config", "video_config", "mm_processor_kwargs", "media_io_kwargs"),
        "goes unchecked to the model's own code",
    ),
    "use_audio_in_video": "videos are not accepted",
    "instruct": "is for rerankers that generate, which are not served as rerankers",
    "watermark": "is the provider's",
    "stop_regex": "is searched by backtracking after each token, in the loop that serves everybody: use `stop`",
    "ebnf": "a grammar that can be read in many ways takes seconds per token: use `response_format` or `regex`",
    "functions": "was replaced by `tools`",
    "function_call": "was replaced by `tool_choice`",
    "audio": "answers are text",
    "web_search_options": "there is no web search",
    "verbosity": "no engine knows it",
    "chunking_strategy": "engines cut long audio themselves",
    **dict.fromkeys(("include[]", "known_speaker_names[]", "known_speaker_references[]"), "no engine knows it"),
}
"""Fields of an engine or of OpenAI that are refused, with the reason that the client gets."""


def not_in_table(name: str) -> FieldProblem:
    shown = name[:64]
    why = REFUSED.get(name)
    return (
        unknown(shown)
        if why is None
        else FieldProblem(shown, f"`{shown}` is not accepted: {why}.", "unsupported_field")
    )
