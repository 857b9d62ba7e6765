"""What SGLang 0.5.23 runs in pipeline stages."""

from collections.abc import Mapping
from typing import Final

STAGED: Final = frozenset({
    "ApertusForCausalLM", "ArceeForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM", "Cosmos3EdgeForConditionalGeneration", "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DotsVLMForCausalLM", "Exaone4ForCausalLM",
    "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM",
    "GlmOcrForConditionalGeneration", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM", "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM", "InternS1ProForConditionalGeneration", "KimiK25ForConditionalGeneration",
    "KimiLinearForCausalLM", "LagunaForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM",
    "LlavaForConditionalGeneration", "MellumForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM",
    "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration", "MistralForCausalLM", "MistralLarge3ForCausalLM", "MixtralForCausalLM",
    "NemotronHForCausalLM", "OPTForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration", "SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "SolarForCausalLM",
    "Step3p5ForCausalLM", "TeleFLMForCausalLM",
})  # fmt: skip
"""Architectures whose `forward` takes what the stage before it computed; a test beside the engine compares them. Any
other ends the start with `Pipeline Parallel is not compatible with this model`."""

NOT_IN_STAGES: Final[Mapping[str, str]] = {
    "min-free-slots-delay": "each stage has a part of the places",
    "enable-return-aux-hidden-states": "only the last stage sees them",
    "enable-pdmux": "it divides one stage between prefill and decode",
    "dllm-algorithm": "diffusion runs in one stage, and the GPUs of the others would stay idle",
}
"""Argument -> why it does not go with stages."""
