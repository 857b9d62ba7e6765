"""What docs/compatibility.md, docs/gateway.md and docs/models.md say of endpoints, engines and capabilities is what the
gateway does, and they say all of it."""

import re
from pathlib import Path
from typing import Final, get_args

import pytest

from shoal.core.capabilities import Capability
from shoal.core.fields.table import ALIASES, CHAT, COMPLETIONS, DETOKENIZE, TABLE, TOKENIZE, TRANSCRIBE
from shoal.engine.sglang.wire import SGLangWire
from shoal.engine.vllm.wire import VLLMWire
from shoal.gateway.ability import NEEDS
from shoal.gateway.app import HEALTH_PATH
from shoal.gateway.dialects import DIALECTS
from shoal.gateway.request import READ_PATHS
from tests.support.gateway import API_KEY, gateway
from tests.support.scripted_engine import ScriptedEngine

DOCS: Final = Path(__file__).parents[2] / "docs"
_CODE: Final = re.compile(r"`([^`]+)`")
_WORD: Final = re.compile(r"[\w\[\]]+")
Endpoint = tuple[str, str]
"""Method and path."""

POSTED: Final = {("POST", path) for path in (*TABLE, *ALIASES, *DIALECTS)}
SERVED: Final = POSTED | {("GET", path) for path in READ_PATHS} | {("GET", "/v1/models/{id}")}


def rows(page: str, after: str) -> list[list[str]]:
    """The cells of the first table after a line."""
    text = (DOCS / page).read_text().partition(after)[2]
    table = text[text.index("\n|") + 1 :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def endpoints(cell: str) -> set[Endpoint]:
    """Each path, with the method that stands before it or before an earlier one."""
    found: set[Endpoint] = set()
    method = ""
    for code in _CODE.findall(cell):
        first, _, rest = code.partition(" ")
        method = first if rest else method
        found.add((method, rest or first))
    return found


def of_compatibility(*, served: bool) -> set[Endpoint]:
    table = rows("compatibility.md", "for [messages](#anthropics-messages-api).")
    listed = [cells[0] for cells in table if cells[1].startswith("not served") != served]
    return set[Endpoint]().union(*map(endpoints, listed))


def test_the_page_lists_the_endpoints_that_the_gateway_serves() -> None:
    assert of_compatibility(served=True) == SERVED


def test_the_gateways_own_page_lists_them_too() -> None:
    table = rows("gateway.md", "there is no router below it.")
    assert set[Endpoint]().union(*(endpoints(cells[0]) for cells in table)) == SERVED | {("GET", HEALTH_PATH)}


def asked(path: str) -> str:
    return path.replace("{id}", "some-id").replace("*", "generations")


async def test_the_gateway_answers_as_the_page_says(tmp_path: Path) -> None:
    served, not_served = of_compatibility(served=True), of_compatibility(served=False)
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with gateway(tmp_path, ScriptedEngine()) as it:
        for method, path in served | not_served | {("POST", path) for _, path in not_served}:
            url = f"http://127.0.0.1:{it.server.port}{asked(path)}"
            async with it.session.request(method, url, headers=headers, data=b"{}") as answer:
                unknown = b"unknown_path" in await answer.read()
            assert (answer.status == 404 and unknown) == ((method, path) not in served), (method, path)
            assert answer.status != 405, (method, path)


# --- what engines differ in -------------------------------------------------------------------------------------------


def engine_rows() -> list[list[str]]:
    return rows("compatibility.md", "A client sees the same names, ids, usage and errors of both.")


def fields(cell: str) -> set[str]:
    """Fields of chats and completions that are named, by their own name or by that of a member."""
    words = {word.group() for code in _CODE.findall(cell) if (word := _WORD.match(code))}
    return words & (TABLE[CHAT].keys() | TABLE[COMPLETIONS].keys())


def test_both_engines_are_asked_for_every_endpoint_that_is_not_translated() -> None:
    assert SGLangWire.paths.keys() == VLLMWire.paths.keys() == TABLE.keys()


def test_the_page_lists_the_fields_that_vllm_does_not_do() -> None:
    refused = [cells[0] for cells in engine_rows() if "unsupported_field" in cells[2] and "/v1/" not in cells[0]]
    expected = VLLMWire.differences.fields
    assert set[str]().union(*map(fields, refused)) == expected[CHAT].keys() | expected[COMPLETIONS].keys()


def test_the_page_lists_the_fields_that_have_another_name_in_vllm() -> None:
    (done,) = [fields(cells[0]) for cells in engine_rows() if cells[2] == "done, under vLLM's names"]
    special = VLLMWire.special[CHAT] | VLLMWire.special[COMPLETIONS]
    only_partly = VLLMWire.differences.fields[CHAT].keys() | VLLMWire.differences.fields[COMPLETIONS].keys()
    assert done - only_partly == special - only_partly


@pytest.mark.parametrize(("endpoint", "input"), [(TOKENIZE, "prompt"), (DETOKENIZE, "tokens")])
def test_the_page_says_which_options_of_other_endpoints_vllm_does_not_do(endpoint: str, input: str) -> None:
    (cells,) = [cells for cells in engine_rows() if cells[0] == f"`{endpoint}`"]
    named = {word for code in _CODE.findall(f"{cells[1]} {cells[2]}") for word in _WORD.findall(code)}
    assert named & TABLE[endpoint].keys() == VLLMWire.differences.fields[endpoint].keys() - {input}


def test_the_page_says_which_fields_of_transcriptions_vllm_does_not_do() -> None:
    table = rows("compatibility.md", "The `openai` SDK works unmodified: `client.audio")
    named = {_CODE.findall(cells[0])[0] for cells in table if "unsupported_field" in cells[1]}
    assert named == VLLMWire.differences.fields[TRANSCRIBE].keys()


# --- what a Model can do ----------------------------------------------------------------------------------------------


def test_the_page_of_models_lists_the_capabilities_that_endpoints_need() -> None:
    cells = [cells[2] for cells in rows("models.md", "the list still has `vision`, and images get 503 `no_replica`.")]
    known = set(get_args(Capability))
    assert set(_CODE.findall(" ".join(cells))) & known == known == set(NEEDS.values())
