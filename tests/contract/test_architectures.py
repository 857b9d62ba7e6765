"""What each engine does for some architectures only, beside its own sources."""

import pytest

from shoal.core.architectures import names
from shoal.engine.sglang import architectures as sglang
from shoal.engine.vllm import architectures as vllm
from tests.support.engine_sources import sglang_registry, sglang_sources, vllm_registry, vllm_sources

KNOWN = names.MLA | names.WINDOWED | names.HYBRID | names.FULL | names.ENCODER_DECODER | names.MULTIMODAL
GENERATES = KNOWN - names.EMBEDS


def vllm_has(architecture: str, interface: str) -> bool:
    return any(each.node.name == interface for each in vllm_sources().lineage(*vllm_registry()[architecture]))


@pytest.mark.engine
@pytest.mark.vllm
def test_vllm_gives_an_eagle3_head_hidden_states() -> None:
    known = GENERATES & vllm_registry().keys()
    assert len(known) > 120
    assert {each for each in known if not vllm_has(each, "SupportsEagle3")} == vllm.NO_EAGLE3
    # As Shoal passes the arguments, or with this one, an architecture without a class runs on the backend.
    assert vllm_has("TransformersForCausalLM", "SupportsEagle3")
    assert vllm_has("TransformersMoEForCausalLM", "SupportsEagle3")


@pytest.mark.engine
@pytest.mark.vllm
def test_vllm_divides_into_stages() -> None:
    known = (KNOWN | names.EMBEDS) & vllm_registry().keys()
    assert {each for each in known if not vllm_has(each, "SupportsPP")} == vllm.NOT_STAGED


@pytest.mark.engine
@pytest.mark.sglang
def test_sglang_gives_an_eagle3_head_hidden_states() -> None:
    known = GENERATES & sglang_registry().keys()
    assert known == GENERATES
    lineages = {each: tuple(sglang_sources().lineage(*sglang_registry()[each])) for each in known}
    asks = "set_eagle3_layers_to_capture"
    assert {each for each in known if any(asks in one.functions for one in lineages[each])} == sglang.EAGLE3
