"""What each engine does for some architectures only, beside its own sources."""

import ast

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


def feeds_in_stages(module: str, name: str) -> bool:
    """Whether the decoder of a class of vLLM passes a head's hidden states on to the next stage, or the checkpoint
    chooses the decoder. The first decoder that the class, or one that it inherits from, names is its own."""
    sources, registry = vllm_sources(), vllm_registry()
    lineage = tuple(sources.lineage(module, name))
    for each in lineage:
        for node in ast.walk(each.node):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                given = {keyword.arg for keyword in node.keywords}
                if node.func.id == "init_vllm_registered_model" and "architectures" not in given:
                    return True
            named = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
            if not isinstance(named, str) or any(named == one.node.name for one in lineage):
                continue
            found = sources.find(each.module, named)
            if found is None and named in registry:
                found = sources.find(*registry[named])
            inherits = tuple(sources.lineage(found.module, found.node.name)) if found else ()
            if found is not None and any(one.node.name == "EagleModelMixin" for one in inherits[1:]):
                return next(value for one in inherits if (value := flag(one.node)) is not None)
            if found is not None and any(one.node.name == "SupportsEagle3" for one in inherits[1:]):
                return feeds_in_stages(found.module, found.node.name)
    return False


def flag(node: ast.ClassDef) -> bool | None:
    """What a class itself says of hidden states in stages."""
    for part in node.body:
        target = part.target if isinstance(part, ast.AnnAssign) else None
        target = part.targets[0] if isinstance(part, ast.Assign) else target
        if isinstance(target, ast.Name) and target.id == "supports_aux_hidden_states_over_pp":
            assert isinstance(part, (ast.Assign, ast.AnnAssign))
            assert part.value is not None
            return bool(ast.literal_eval(part.value))
    return None


@pytest.mark.engine
@pytest.mark.vllm
def test_vllm_gives_them_in_stages() -> None:
    known = GENERATES & vllm_registry().keys() - vllm.NO_EAGLE3
    assert {each for each in known if feeds_in_stages(*vllm_registry()[each])} == vllm.EAGLE3_IN_STAGES


@pytest.mark.engine
@pytest.mark.sglang
def test_sglang_gives_an_eagle3_head_hidden_states() -> None:
    known = GENERATES & sglang_registry().keys()
    assert known == GENERATES
    lineages = {each: tuple(sglang_sources().lineage(*sglang_registry()[each])) for each in known}
    asks = "set_eagle3_layers_to_capture"
    assert {each for each in known if any(asks in one.functions for one in lineages[each])} == sglang.EAGLE3
