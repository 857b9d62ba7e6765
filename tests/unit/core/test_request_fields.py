"""Values that end or stall an engine are refused at the gateway, by name; and what people send passes."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.model import Model
from shoal.core.fields.check import FORWARDED, check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.patterns import pattern_problem
from shoal.core.fields.table import CHAT, COMPLETIONS, EMBEDDINGS, REFUSED, TABLE, TOKENIZE
from shoal.core.routing.resolve import served_model
from shoal.engine.sglang.wire import WIRE
from shoal.engine.wires import differences_of
from tests.support import operators
from tests.support.gateway import gateway
from tests.support.pictures import data_url, png
from tests.support.scripted_engine import ScriptedEngine

FACTS = Facts(vocabulary=512, context_length=4096)
SEES = Facts(vocabulary=512, context_length=4096, media=frozenset({"image", "audio"}))
USER = {"role": "user", "content": "hi"}
HUGE = 2**63
PNG = data_url("image/png", png(2, 2))
URL = "messages[0].content[0].image_url.url"
SCHEMA = "response_format.json_schema.schema"


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "llama", "messages": [USER], **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "llama", "prompt": "x", **fields}


def says(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "llama", "messages": [{"role": "user", "content": list(parts)}]}


def wants(schema: Any) -> tuple[str, dict[str, Any]]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def image(url: str) -> tuple[str, dict[str, Any]]:
    return says({"type": "image_url", "image_url": {"url": url}})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ATTACKS: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    # The ones that ended the scheduler of a real engine, for everybody.
    "stop token beyond": (chat(min_tokens=5, stop_token_ids=[10_000_000]), "stop_token_ids"),
    "stop token negative": (chat(min_tokens=5, stop_token_ids=[-1]), "stop_token_ids"),
    "stop token of 64 bits": (chat(min_tokens=5, stop_token_ids=[HUGE]), "stop_token_ids"),
    "stop token at the vocabulary's end": (chat(stop_token_ids=[512]), "stop_token_ids"),
    "top_logprobs": (chat(logprobs=True, top_logprobs=1_000_000), "top_logprobs"),
    "logprobs": (completion(logprobs=1_000_000), "logprobs"),
    "tokens beyond": (completion(prompt=[1, 512]), "prompt"),
    "tokens negative": (completion(prompt=[[1], [-5]]), "prompt"),
    "tokens to embed": ((EMBEDDINGS, {"model": "llama", "input": [[1, 600]]}), "input"),
    # The ones that stalled it.
    "stop_regex": (chat(stop_regex="(a+)+$"), "stop_regex"),
    "regex": (chat(regex="(a+)+b"), "regex"),
    "regex that multiplies": (chat(regex="((a{0,100}){0,100}){0,100}"), "regex"),
    "regex of adjacent counts": (chat(regex="a{0,500}a{0,500}b"), "regex"),
    "ebnf": (chat(ebnf='root ::= root root | "a"'), "ebnf"),
    "pattern of a schema": (wants({"type": "string", "pattern": "(a*a*)*b"}), SCHEMA + "...pattern"),
    "pattern of a property with a keyword's name": (
        wants({"properties": {"enum": {"pattern": "(a+)+b"}}}), SCHEMA + "...pattern",
    ),
    "pattern of properties": (wants({"patternProperties": {"(a+)+b": {}}}), SCHEMA + "...patternProperties"),
    # Found by the fuzz: no token is allowed, so there is nothing to sample from.
    "a schema that is itself": (wants({"$ref": "#"}), SCHEMA + "...$ref"),
    "a schema that is all of itself": (wants({"allOf": [{"$ref": "#"}]}), SCHEMA + "...$ref"),
    "a circle of schemas": (
        wants({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
        SCHEMA + "...$ref",
    ),
    "a tool's circle": (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}},
        }}}]),
        "tools...$ref",
    ),
    "a schema that leads nowhere": (wants({"$ref": "#/items/properties/parameters"}), SCHEMA + "...$ref"),
    "a schema by an anchor": (wants({"$ref": "#x"}), SCHEMA + "...$ref"),
    "a schema that is itself as it is written": (
        wants({"$ref": "#/$defs/a%62", "$defs": {"a%62": {"$ref": "#/$defs/a%62"}, "ab": {}}}),
        SCHEMA + "...$ref",
    ),
    # A value that a reference leads to is read as a schema: so do xgrammar and outlines.
    "a value that is read as a schema": (
        wants({"properties": {"a": {"$ref": "#/default"}}, "default": {"$ref": "#/default"}}), SCHEMA + "...$ref",
    ),
    "a schema inside a value that is read as one": (
        wants({
            "$ref": "#/examples/0",
            "examples": [{"properties": {"a": {"$ref": "#/examples/0/properties/a"}}}],
        }),
        SCHEMA + "...$ref",
    ),
    "a property with the name of a keyword of values": (
        wants({"properties": {"default": {"$ref": "#/properties/default"}}}), SCHEMA + "...$ref",
    ),
    "a definition with the name of a keyword of values": (
        wants({"$defs": {"const": {"allOf": [{"$ref": "#/$defs/const"}]}}}), SCHEMA + "...$ref",
    ),
    "a pattern in a value that is read as a schema": (
        wants({"$ref": "#/default", "default": {"type": "string", "pattern": "(a*a*)*b"}}), SCHEMA + "...pattern",
    ),
    "a pattern inside a value that is read as a schema": (
        wants({"$ref": "#/enum/0", "enum": [{"items": {"patternProperties": {"(a*a*)*b": {}}}}]}),
        SCHEMA + "...patternProperties",
    ),
    "a count in a value that is read as a schema": (
        wants({"properties": {"a": {"$ref": "#/const/b"}}, "const": {"b": {"minLength": HUGE}}}),
        SCHEMA + "...minLength",
    ),
    "a pattern of a property with the name of a keyword of values": (
        wants({"properties": {"default": {"type": "string", "pattern": "(a*a*)*b"}}}), SCHEMA + "...pattern",
    ),
    "a pattern below a keyword that nobody knows": (
        wants({"x-more": [{"pattern": "(a*a*)*b"}]}), SCHEMA + "...pattern",
    ),
    "a pattern of a tool": (
        chat(tools=[{"function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "(a*a*)*b"}}}}}]),
        "tools...pattern",
    ),
    "a value of a tool that is read as a schema": (
        chat(tools=[{"function": {"name": "f", "parameters": {
            "$defs": {"a": {"default": {"pattern": "(a*a*)*b"}}},
            "properties": {"b": {"$ref": "#/$defs/a/default"}},
        }}}]),
        "tools...pattern",
    ),
    "values of all tools": (
        chat(tools=[
            {"function": {"name": f"f{i}", "parameters": {"enum": [f"v{j}" for j in range(100)]}}} for i in range(20)
        ]),
        "tools",
    ),
    "a tool that is itself in the engine's schema of a call": (
        chat(
            tools=[{"function": {"name": "f", "parameters": {"$ref": "#/items/properties/parameters"}}}],
            tool_choice={"type": "function", "function": {"name": "f"}},
        ),
        "tools...$ref",
    ),
    "a tool that is itself there, with a decoy at that place of its own": (
        chat(
            tools=[{"function": {"name": "f", "parameters": {
                "$ref": "#/items/properties/parameters", "items": {"properties": {"parameters": {}}},
            }}}],
            tool_choice={"type": "function", "function": {"name": "f"}},
        ),
        "tools...$ref",
    ),
    "a schema that is itself where empty steps are left out": (wants({"$ref": "#/", "": {}}), SCHEMA + "...$ref"),
    "an end that is both forbidden and all that is allowed": (chat(min_tokens=5, regex="a"), "min_tokens"),
    "choices": (chat(n=3000), "n"),
    "choices that are long": (chat(n=100), "n"),
    "prompts": (completion(prompt=["x"] * 2000), "prompt"),
    "prompts times choices": (completion(prompt=["x"] * 100, n=2), "n"),
    "prompts that are long": (completion(prompt=["x" * 16_000] * 100), "prompt"),
    "repetition penalty": (chat(repetition_penalty=1e-300), "repetition_penalty"),
    "echo": (completion(prompt="x" * 60_000, echo=True, logprobs=20), "echo"),
    "text far beyond the context": (chat(messages=[{"role": "user", "content": "x" * 400_000}]), "messages"),
    # Values of the wrong kind or width.
    "min_tokens of 64 bits": (chat(min_tokens=HUGE), "min_tokens"),
    "top_k of 32 bits": (chat(top_k=2**31), "top_k"),
    "a bool for a number": (chat(n=True), "n"),
    "a fraction for a whole number": (chat(max_tokens=5.0), "max_tokens"),
    "no bound": (chat(max_tokens=0), "max_tokens"),
    "seed": (chat(seed=HUGE), "seed"),
    "NaN": (chat(temperature=float("nan")), "temperature"),
    "infinity": (chat(frequency_penalty=float("inf")), "frequency_penalty"),
    "bias beyond": (chat(logit_bias={"512": 1}), "logit_bias"),
    "bias in other digits": (chat(logit_bias={"١": 1}), "logit_bias.١"),
    "bias too strong": (chat(logit_bias={"1": 1e300}), "logit_bias.1"),
    "many biases": (completion(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
    "many stops": (chat(stop=["x"] * 100), "stop"),
    "long stop": (chat(stop="x" * 300), "stop"),
    "empty stop": (chat(stop=[""]), "stop"),
    "deep schema": (wants(nested(100)), SCHEMA),
    "large schema": (wants({"enum": [f"v{i}" for i in range(5000)]}), SCHEMA),
    "schema from elsewhere": (wants({"$ref": "http://example.com/x"}), SCHEMA + "...$ref"),
    "schema in a text": (completion(json_schema="[" * 100_000), "json_schema"),
    "tools' schemas": (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(100)}}]),
        "tools",
    ),
    "a tool's name": (chat(tools=[{"type": "function", "function": {"name": 'f"}'}}]), "tools[0].function.name"),
    "structural tags": (chat(response_format={"type": "structural_tag", "format": {}}), "response_format.type"),
    "template's messages": (chat(chat_template_kwargs={"messages": "x"}), "chat_template_kwargs.messages"),
    "template": (chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs.chat_template"),
    "template's tokens": (chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize"),
    "template's function": (chat(chat_template_kwargs={"raise_exception": 1}), "chat_template_kwargs.raise_exception"),
    "template's list": (chat(chat_template_kwargs={"x": [1]}), "chat_template_kwargs.x"),
    "decoder's flag": (
        chat(chat_template_kwargs={"spaces_between_special_tokens": "x"}),
        "chat_template_kwargs.spaces_between_special_tokens",
    ),
    "deep arguments": (
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 500}}]}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    # What an engine would fetch, or open.
    "http": (image("http://169.254.169.254/"), URL),
    "https": (image("https://example.com/a.png"), URL),
    "file": (image("file:///etc/passwd"), URL),
    "path": (image("/etc/passwd"), URL),
    "video": (
        says({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}), "messages[0].content[0]",
    ),
    "upper case": (image("FILE:///etc/passwd"), URL),
    "data of another type": (image("data:text/html;base64,AAAA"), URL),
    "image by hash": (
        says({"type": "image_url", "image_url": {"url": PNG, "content_hash": "x"}}),
        "messages[0].content[0].image_url.content_hash",
    ),
    "many images": (says(*[{"type": "image_url", "image_url": {"url": PNG}}] * 17), "messages"),
    "media to embed": ((EMBEDDINGS, {"model": "llama", "input": [{"image": "file:///etc/passwd"}]}), "input"),
    # What is no client's to say.
    **{name: (chat(**{name: "x"}), name) for name in REFUSED},
    "made up": (chat(made_up=1), "made_up"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_reaches_no_engine_and_is_told_by_name(tmp_path: Path, attack: str):
    (path, body), param = ATTACKS[attack]
    problem = check(body, path, SEES)
    assert problem is not None
    assert problem.param == param
    assert len(problem.message) < 1000
    json.dumps(problem.message)


@pytest.mark.parametrize(
    "attack",
    ["stop token beyond", "top_logprobs", "logprobs", "tokens beyond", "stop_regex", "choices", "prompts", "https"],
)  # fmt: skip
async def test_the_gateway_answers_an_attack_with_400_and_bills_nothing(tmp_path: Path, attack: str):
    (path, body), param = ATTACKS[attack]
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.model(facts=SEES)
        response = await it.post(body, path)
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert engine.requests == []
        assert await it.records("", count=0) == []


FINE: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": chat(),
    "everything usual": chat(
        temperature=0.7, top_p=0.9, max_tokens=100, stop=["\n"], seed=-1, n=2, presence_penalty=1, user="u",
        frequency_penalty=-0.5, logit_bias={"5": -100}, logprobs=True, top_logprobs=5, stream=True,
        stream_options={"include_usage": True},
    ),
    "nulls": chat(temperature=None, stop=None, tools=None, n=None, made_up=None),
    "a conversation with tools": chat(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": 2}]}'}},
            ]},
            {"role": "tool", "tool_call_id": "1", "content": "y"},
        ],
        tools=[{"type": "function", "function": {
            "name": "f", "description": "d", "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "array"}}},
        }}],
        tool_choice={"type": "function", "function": {"name": "f"}},
    ),
    "a schema": wants({"type": "object", "properties": {"pattern": {"type": "string", "pattern": r"^\d{3}-\d+$"}}}),
    "a tree": wants({"type": "object", "properties": {
        "left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#"}]},
    }, "$defs": {"leaf": {"type": "string"}}}),
    "values that have the keys of a reference": wants({"properties": {
        "schema": {"type": "object", "default": {"$ref": "#"}, "examples": [{"$ref": "http://example.com/x"}]},
        "one": {"const": {"$ref": "#/nowhere"}}, "two": {"enum": [{"allOf": [{"$ref": "#"}]}, {"$ref": "#x"}]},
    }}),
    "values that have the keys of other keywords": wants({"properties": {
        "schema": {"type": "object", "default": {"pattern": "(a*a*)*b"}, "examples": [{"pattern": "("}]},
        "one": {"const": {"patternProperties": {"(a+)+": {}}, "minLength": -1}},
        "two": {"enum": [{"maxItems": HUGE, "items": {"pattern": "(a*a*)*b"}}]},
        "three": {"default": {"enum": list(range(1001))}},
    }}),
    "properties with the names of keywords": wants({"properties": {
        "patternProperties": {"$ref": "#/$defs/+", "(": 1}, "enum": {"type": "array"}, "pattern": {"type": "string"},
        "minLength": {"type": "integer"},
    }, "$defs": {"+": {"type": "string"}}}),
    "values of a tool that have the keys of keywords": chat(
        tools=[{"function": {"name": "f", "parameters": {"properties": {"a": {"default": {"pattern": "(a*a*)*b"}}}}}}]
    ),
    "a regex": chat(regex=r"(\d{1,3}\.){3}\d{1,3}"),
    "thinking": chat(chat_template_kwargs={"enable_thinking": False, "thinking_budget": 1000}, reasoning_effort="low"),
    "tokens": completion(prompt=[0, 511], stop_token_ids=[0, 511], min_tokens=3),
    "min_tokens without a grammar": chat(
        min_tokens=3, response_format={"type": "text"}, tools=[{"function": {"name": "f"}}], tool_choice="none"
    ),
    "a tool with schemas of its own": chat(
        tools=[
            {"function": {"name": "f", "parameters": {
                "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}},
            }}}
        ]
    ),
    "several": completion(prompt=["a", "b"], n=2, best_of=2, echo=True),
    "all of top_k": completion(top_k=-1),
    "embeddings": (EMBEDDINGS, {"model": "llama", "input": ["a"] * 1000, "encoding_format": "base64"}),
    "a document": chat(messages=[{"role": "user", "content": "word " * 3000}]),
    "an image": says(
        {"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_what_people_send_passes(name: str):
    path, body = FINE[name]
    assert check(body, path, SEES) is None
    assert check(body, path, SEES, len(json.dumps(body))) is None


def test_a_model_that_reads_text_takes_no_image():
    problem = check(FINE["an image"][1], CHAT, FACTS)
    assert problem is not None
    assert (problem.param, problem.code) == ("messages[0].content[1]", "media_not_supported")


def test_without_a_vocabulary_no_ids_of_tokens_are_taken():
    unknown = Facts(context_length=4096)
    for path, body in (completion(prompt=[1]), completion(stop_token_ids=[1]), completion(logit_bias={"1": 1})):
        problem = check(body, path, unknown)
        assert problem is not None
        assert problem.code == "vocabulary_unknown"
    assert check(completion()[1], COMPLETIONS, unknown) is None


@pytest.mark.parametrize("argument", ["--enable-deterministic-inference", "--rl-on-policy-target=fsdp", None])
def test_a_deterministic_engine_gets_no_min_p(argument: str | None):
    """It asserts that nobody asks for it: SGLang 0.5.23, top_k_top_p_min_p_sampling_from_probs_torch."""
    engine = {"extraArgs": [argument] if argument else []}
    model = Model.model_validate(operators.model("chat", "team-a", engine=engine))
    path, body = chat(min_p=0.1)
    facts = served_model(model, WIRE.differences).facts
    problem = check(body, path, facts)
    assert (problem and problem.param) == (argument and "min_p")
    assert check(chat(min_p=0)[1], path, facts) is None


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FORCED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("engine", [{}, {"toolCallParser": "hermes"}])
@pytest.mark.parametrize(
    ("fields", "fine"),
    [
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "auto"}, False),
        ({"tools": TOOLS, "tool_choice": "none"}, True),
        ({"tools": []}, True),
        # The grammar of a forced call says where it is.
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": FORCED}, True),
    ],
)
def test_without_a_parser_a_model_does_not_decide_whether_it_calls(
    engine: dict[str, Any], fields: dict[str, Any], fine: bool
):
    facts = served_model(Model.model_validate(operators.model("chat", "team-a", engine=engine)), WIRE.differences).facts
    problem = check(chat(**fields)[1], CHAT, facts)
    if engine or fine:
        assert problem is None
    else:
        assert problem is not None
        assert (problem.param, problem.code) == ("tools", "unsupported_field")
        assert "`spec.engine.toolCallParser`" in problem.message
        assert problem.message.endswith(" Its capabilities are embed, generate.")


LOOKS_AROUND = {"properties": {"path": {"type": "string", "pattern": r"^(?!\.\.).*$"}}}


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": LOOKS_AROUND, **more}}


@pytest.mark.parametrize(
    ("fields", "engine", "fine"),
    [
        ({"tools": [tool()]}, {"toolCallParser": "hermes"}, True),
        ({"tools": [tool(strict=False)], "tool_choice": "auto"}, {"toolCallParser": "hermes"}, True),
        ({"tools": [tool()], "tool_choice": "none"}, {}, True),
        ({"tools": [tool()]}, {"type": "vLLM", "toolCallParser": "hermes"}, True),
        # The engine makes a grammar of them, in its loop for all requests.
        ({"tools": [tool(), tool(strict=True, name="g")]}, {"toolCallParser": "hermes"}, False),
        ({"tools": [tool()], "tool_choice": "required"}, {"toolCallParser": "hermes"}, False),
        ({"tools": [tool()], "tool_choice": FORCED}, {}, False),
        ({"tools": [tool()], "regex": "a"}, {"toolCallParser": "hermes"}, False),
        ({"tools": [tool()]}, {"toolCallParser": "glm47"}, False),
        ({"tools": [tool()]}, {"toolCallParser": "auto"}, False),
        ({"tools": [tool()]}, {"type": "vLLM", "toolCallParser": "mistral"}, False),
        (
            {"tools": [tool()]},
            {"toolCallParser": "hermes", "strict": "2"},
            False,
        ),
        (
            {"tools": [tool()]},
            {"type": "vLLM", "toolCallParser": "hermes", "extraArgs": ["--tool-strict-level=parameter"]},
            False,
        ),
    ],
)
def test_patterns_of_tools_are_checked_where_an_engine_compiles_them(
    fields: dict[str, Any], engine: dict[str, Any], fine: bool
):
    differences = differences_of(engine.get("type", "SGLang"))
    env = [{"name": "SGLANG_TOOL_STRICT_LEVEL", "value": level} for level in [engine.get("strict")] if level]
    declared = operators.model("chat", "team-a", engine={k: v for k, v in engine.items() if k != "strict"})
    declared["spec"]["pod"] = {"env": env}
    problem = check(chat(**fields)[1], CHAT, served_model(Model.model_validate(declared), differences).facts)
    assert (problem and problem.param) == (None if fine else "tools...pattern")


def test_patterns_of_tools_do_not_matter_for_a_count_of_tokens():
    assert check({"model": "llama", "messages": [USER], "tools": [tool()]}, TOKENIZE, FACTS) is None


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_parsers_that_leave_arguments_free_are_the_engines(engine: str):
    folder = Path(inspect.getfile(served_model)).parents[2] / "engine" / engine.lower()
    table = json.loads((folder / f"{engine.lower()}_args.json").read_text())
    free = differences_of(engine).free_parsers
    assert free
    assert free <= set(table["arguments"]["tool-call-parser"]["choices"])


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from(["auto", "(a", "data:image/png;base64,", "user", "json_schema", "text"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "url", "function", "name", "schema", "json_schema", "1"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
NAMES = sorted({name for fields in TABLE.values() for name in fields})


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([CHAT, COMPLETIONS, EMBEDDINGS]), st.dictionaries(st.sampled_from(NAMES), ODD, max_size=5), ODD)
def test_any_value_is_judged_without_a_failure(path: str, fields: dict[str, Any], first: Any):
    body = {"model": "m", "messages": first, "prompt": first, "input": first} | fields
    body = {name: value for name, value in body.items() if name in TABLE[path]}
    problem = check(body, path, SEES)
    assert problem is None or (problem.param and problem.message)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab()[]{}*+?|,0123^$.\\-dwx", max_size=30))
def test_any_pattern_is_judged_without_a_failure(pattern: str):
    pattern_problem(pattern, "regex")


def numbered(count: int, form: str = "a{{2}}b{}") -> dict[str, Any]:
    return {f"p{n}": {"type": "string", "pattern": form.format(n)} for n in range(count)}


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"properties": numbered(64)}, None),
        ({"properties": numbered(2000, "a{{1000}}b")}, None),  # one pattern
        ({"properties": numbered(65)}, "64 different ones"),
        ({"properties": numbered(64), "patternProperties": {"x": {}}}, "64 different ones"),
        ({"patternProperties": {f"a{n}": {} for n in range(65)}}, "64 different ones"),
        ({"properties": numbered(9, "a" * 1000 + "{}")}, "8192 characters"),
        ({"properties": numbered(17, "a{{1000}}b{}")}, "16384 steps"),
    ],
)
def test_the_patterns_of_a_schema_are_bounded_together(schema: dict[str, Any], bound: str | None):
    """Each takes a millisecond or more of the event loop, and a schema has room for thousands."""
    path, body = wants(schema)
    for fields, at in (
        (body, SCHEMA),
        (chat(tools=[{"function": {"name": "f", "parameters": schema}}], tool_choice="required")[1], "tools"),
    ):
        problem = check(fields, path, FACTS)
        assert (problem is None) == (bound is None), problem
        if problem is not None and bound is not None:
            assert problem.param.startswith(f"{at}...pattern")
            assert bound in problem.message
            assert problem.code == "pattern_too_large"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-10, 600), min_size=1, max_size=8))
def test_no_token_outside_the_vocabulary_passes(ids: list[int]):
    outside = any(not 0 <= token < 512 for token in ids)
    for fields in ({"prompt": ids}, {"prompt": [ids]}, {"prompt": "x", "stop_token_ids": ids}):
        assert (check({"model": "m", **fields}, COMPLETIONS, FACTS) is not None) == outside


def test_what_is_refused_is_not_forwarded_and_what_is_forwarded_is_bounded():
    for path, forwarded in FORWARDED.items():
        assert not forwarded & REFUSED.keys()
        assert forwarded <= TABLE[path].keys()
