"""What the contract suite expects of each engine, as data: a test that runs on several engines asks here, and does not
ask which engine it has.

A row of `Differences` is a row of the table in docs/engine-differences.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from shoal.engine.kinds import KINDS
from shoal.engine.port import EngineKind
from shoal.engine.wire import Wire
from shoal.engine.wires import wire_of
from tests.support.engines import (
    LORA,
    LORA_SLOTS,
    SERVED,
    VLLM_BLOCK,
    VLLM_LORA,
    VLLM_SLOTS,
    EngineProcess,
    Kind,
)


def row(title: str) -> Any:
    """A field of Differences, under this title in the table."""
    return field(metadata={"title": title})


@dataclass(frozen=True, slots=True)
class Differences:
    """Where engines behave differently, and Shoal depends on it."""

    ready_path: str = row("Path of the readiness probe")
    starting: tuple[str, ...] = row("What the probe sees during a start")
    sigterm_while_loading: str = row("SIGTERM while the model loads")
    probe_while_draining: int = row("The probe after SIGTERM")
    late_request: int = row("Status of a new request after SIGTERM")
    death_code: str = row("Exit code when the scheduler dies")
    unknown_model: int = row("Status for a model that nobody serves")
    answers_to: str = row("Model that an answer names when the request named none")
    adapter_selected_by: str = row("How a request selects an adapter")
    bare_adapter_name: str = row("Who answers `model: ADAPTER`")
    never_loaded: int = row("Status for an adapter that was never loaded")
    after_unload: int = row("Status for an adapter that was unloaded")
    load_missing: int = row("Status of a load of a folder that is not there")
    load_wide: int = row("Status of a load whose rank is too large")
    unload_unknown: int = row("Status of an unload of a name that is not loaded")
    unload_waits: bool = row("An unload waits for the adapter's running requests")
    listed_limit: bool = row("Loads beyond the cache evict names from the list")
    slots: int = row("Distinct adapters in a batch with the base model, of three slots")
    full_queue_stream: int = row("Status of a stream that a full queue refuses")
    usage_without_include: bool = row("`continuous_usage_stats` alone gives usage in chunks")
    cached_unit: int = row("Cached tokens are reported in units of")
    live_counters: bool = row("Token counters move while a request runs")
    leaving_is_counted: bool = row("A client that leaves is counted")
    same_id_twice: int = row("Status of a second running request with the same id")
    id_prefix: str = row("What an answer puts before the id of a completion")
    chat_id_prefix: str = row("What an answer puts before the id of a chat")
    beyond_context: int = row("Status when prompt and `max_tokens` exceed the context together")
    nested_errors: bool = row("Errors are nested in `error`")
    open_inference: bool = row("Inference without a key at a path of its own")
    pooling_chat: str = row("A chat sent to an engine that embeds")
    prompt_of_two: int = row("How often it counts the prompt of a request for two answers")
    warm_up_tokens: int = row("Tokens that a fresh engine has counted as generated")
    greedy_choices: int = row("Status of several choices at temperature 0")
    chat_of_nothing: int = row("Status of a chat with `max_tokens: 0`")
    tools_unparsed: int = row("Status of a chat with tools, of an engine that was given no parser of calls")
    chat_of_a_list: int = row("Status of a chat whose body is a JSON list")
    other_endpoint: int = row("Status of an endpoint that the model is not for")
    load_without_adapters: int = row("Status of a load of an engine that runs without adapters")
    old_prefixes: bool = row("An adapter that is loaded again from its folder meets its old prefixes")
    blank_texts: int = row("Status of a ranking of an empty text, or of one of blanks")
    token_lists: int = row("Status of several lists of tokens that are to be labelled")
    detokenized_as: str = row("Field of the text that tokens become")
    no_token: int = row("Status of numbers that are to become text, and that no token can have")
    text_transcript: str = row("Content type of a transcript as `text`")
    verbose_usage: bool = row("`verbose_json` of a transcript has its usage")
    clip_tokens: int = row("Prompt tokens that a clip of a transcript counts")
    image_tokens: str = row("Where `prompt_tokens_details` has the tokens of images")
    large_image: int = row("Tokens of an image of 1000 x 800 pixels, of a Qwen2-VL whose files allow 64")
    lone_place: str = row("A chat with more places for images than images")
    unchecked_fields: str = row("Values of fields that Shoal refuses, such as a token outside the vocabulary")


SGLANG: Final = Differences(
    ready_path="/ready", starting=("refused", "503", "200"), sigterm_while_loading="ends it",
    probe_while_draining=503, late_request=200, death_code="not 0", unknown_model=200, answers_to="default",
    adapter_selected_by="`model: BASE:ADAPTER`, `lora_path`", bare_adapter_name="the base model", never_loaded=400,
    after_unload=200, load_missing=400, load_wide=400, unload_unknown=400, unload_waits=True,
    listed_limit=True, slots=LORA_SLOTS - 1, full_queue_stream=200, usage_without_include=True, cached_unit=1,
    live_counters=False, leaving_is_counted=True, same_id_twice=400, id_prefix="", beyond_context=400,
    nested_errors=False, open_inference=False, pooling_chat="kills it", prompt_of_two=3, warm_up_tokens=8,
    chat_id_prefix="", greedy_choices=200, chat_of_nothing=200, tools_unparsed=200, chat_of_a_list=500,
    other_endpoint=400, load_without_adapters=400, old_prefixes=False, blank_texts=400, token_lists=400,
    detokenized_as="`text`", no_token=500,
    text_transcript="text/plain", verbose_usage=True, clip_tokens=1504, unchecked_fields="end it",
    image_tokens="`image_tokens`", large_image=1044, lone_place="is never answered",
)  # fmt: skip
VLLM: Final = Differences(
    ready_path="/health", starting=("refused", "200"), sigterm_while_loading="is swallowed; a second one ends it",
    probe_while_draining=200, late_request=500, death_code="0", unknown_model=404, answers_to="the served name",
    adapter_selected_by="`model: ADAPTER`", bare_adapter_name="the adapter", never_loaded=404, after_unload=404,
    load_missing=404, load_wide=500, unload_unknown=404, unload_waits=False, listed_limit=False,
    slots=LORA_SLOTS, full_queue_stream=503, usage_without_include=False, cached_unit=VLLM_BLOCK, live_counters=True,
    leaving_is_counted=False, same_id_twice=200, id_prefix="cmpl-", beyond_context=200, nested_errors=True,
    open_inference=True, pooling_chat="404", prompt_of_two=2, warm_up_tokens=0,
    chat_id_prefix="chatcmpl-", greedy_choices=400, chat_of_nothing=400, tools_unparsed=400, chat_of_a_list=400,
    other_endpoint=404, load_without_adapters=500, old_prefixes=True, blank_texts=200, token_lists=200,
    detokenized_as="`prompt`", no_token=400,
    text_transcript="application/json", verbose_usage=False, clip_tokens=4,
    image_tokens="`multimodal_tokens.image`", large_image=56, lone_place="200",
    unchecked_fields="400, or a 500 of that request",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineWords:
    """How the suite speaks to an engine: arguments, paths, names of metrics."""

    name: str
    differences: Differences
    lora: tuple[str, ...]
    """Arguments of an engine with adapters."""
    pooling: tuple[str, ...]
    """Arguments of an engine that embeds, ranks or classifies."""
    no_prefix_cache: str
    """Argument that switches its prefix cache off."""
    found_in_cache: str
    """Metric of prompt tokens that its prefix cache had, with the label that selects them."""
    health_path: str
    """Its deepest health check; SGLang's generates a token."""
    load_path: str
    unload_path: str
    admin_key: bool
    """Whether adapters are loaded with the key of the administration, and not with that of requests."""
    prefix: str
    """Of its metrics."""
    running: str
    waiting: str
    adapters_at_start: str
    """Argument that loads adapters, as NAME=PATH."""
    overrides: str
    """Argument that replaces fields of the model's config.json."""
    core: str
    """Of the process that computes, what its name contains."""
    too_long: str
    """In the message about an answer that cannot fit into the context."""
    kv_tokens: int
    """Of the suite's engines, as many as can be used."""
    load_wants_key: bool
    """Whether an agent with the wrong key learns nothing of the load."""
    tells_waiting_tokens: bool
    tells_its_age: bool
    """Whether the load has a time stamp that an idle engine renews."""

    @property
    def kind(self) -> EngineKind:
        """Shoal's own side of it."""
        return KINDS[self.name]

    @property
    def wire(self) -> Wire:
        """The gateway's side of it."""
        found = wire_of(self.name)
        assert found is not None
        return found

    def counter(self, name: str) -> str:
        """The metric of a counter that both engines have by this name."""
        return f"{self.prefix}:{name}_total"

    @property
    def embeds(self) -> tuple[str, ...]:
        """Arguments of an engine that embeds and keeps a prefix cache."""
        return tuple(argument for argument in self.pooling if argument != self.no_prefix_cache)

    def select(self, adapter: str | None) -> dict[str, Any]:
        """The field of a request that selects this adapter; None: the base model."""
        if adapter is None:
            return {"model": SERVED}
        return (
            {"model": adapter}
            if self.differences.bare_adapter_name == "the adapter"
            else {"model": f"{SERVED}:{adapter}"}
        )

    def message(self, body: Mapping[str, Any]) -> str:
        """The text of an error."""
        error: Any = body["error"] if self.differences.nested_errors else body
        return error["message"]

    def code(self, body: Mapping[str, Any]) -> int:
        error: Any = body["error"] if self.differences.nested_errors else body
        return error["code"]

    def load_error(self, body: Mapping[str, Any]) -> str:
        """Why a load or an unload was refused."""
        return self.message(body) if self.differences.nested_errors else body["error_message"]


SGLANG_WORDS: Final = EngineWords(
    name="SGLang", differences=SGLANG, lora=LORA, pooling=("--is-embedding", "--disable-radix-cache"),
    no_prefix_cache="--disable-radix-cache",
    found_in_cache='sglang:prefill_effective_tokens_total{mode="device_hit"}', health_path="/health_generate",
    load_path="/load_lora_adapter", unload_path="/unload_lora_adapter", admin_key=True, prefix="sglang",
    running="num_running_reqs", waiting="num_queue_reqs", adapters_at_start="--lora-paths",
    overrides="--json-model-override-args", core="scheduler",
    too_long="context length", kv_tokens=20000, load_wants_key=True, tells_waiting_tokens=True, tells_its_age=True,
)  # fmt: skip
VLLM_WORDS: Final = EngineWords(
    name="vLLM", differences=VLLM, lora=VLLM_LORA, pooling=("--runner", "pooling"),
    no_prefix_cache="--no-enable-prefix-caching", found_in_cache="vllm:prefix_cache_hits_total", health_path="/health",
    load_path="/v1/load_lora_adapter", unload_path="/v1/unload_lora_adapter", admin_key=False, prefix="vllm",
    running="num_requests_running", waiting="num_requests_waiting", adapters_at_start="--lora-modules",
    overrides="--hf-overrides",
    core="VLLM::EngineCore", too_long="max_model_len", kv_tokens=639 * VLLM_BLOCK, load_wants_key=False,
    tells_waiting_tokens=False, tells_its_age=False,
)  # fmt: skip
WORDS: Final[dict[Kind, EngineWords]] = {
    "sim": SGLANG_WORDS, "sglang": SGLANG_WORDS, "sim-vllm": VLLM_WORDS, "vllm": VLLM_WORDS,
}  # fmt: skip
assert VLLM_SLOTS == LORA_SLOTS - 1


def words_of(engine: EngineProcess) -> EngineWords:
    return WORDS[engine.kind]


def table() -> str:
    """The rows of docs/engine-differences.md."""
    lines = ["| | SGLang | vLLM |", "|---|---|---|"]
    for each in fields(Differences):
        shown = (_shown(getattr(engine, each.name)) for engine in (SGLANG, VLLM))
        lines.append(f"| {each.metadata['title']} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    text = str(value)
    return f"`{text}`" if re.fullmatch(r"/\w+|\w+-", text) else text or "nothing"
