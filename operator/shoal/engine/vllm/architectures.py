"""What vLLM 0.32 does not do for some architectures that Shoal knows. A test beside the engine compares the sets with
its sources."""

from typing import Final

NOT_STAGED: Final = frozenset({
    "BertForSequenceClassification", "BertModel", "CLIPModel", "EmbeddingGemma2Model", "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration", "PaddleOCRVLForConditionalGeneration", "Phi4MMForCausalLM",
    "WhisperForConditionalGeneration", "XLMRobertaForSequenceClassification", "XLMRobertaModel",
})  # fmt: skip
"""Architectures that vLLM does not divide into pipeline stages (no `SupportsPP`)."""

NO_EAGLE3: Final = frozenset({
    "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ChatGLMModel", "Cohere2ForCausalLM",
    "Cohere2VisionForConditionalGeneration", "CohereForCausalLM", "Cosmos3EdgeForConditionalGeneration",
    "DeepseekOCRForCausalLM", "DotsOCRForCausalLM", "Ernie4_5_MoeForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration", "Exaone4ForCausalLM", "ExaoneForCausalLM", "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM", "FalconH1ForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration",
    "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "GlmAsrForConditionalGeneration",
    "GlmOcrForConditionalGeneration", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "HYV3ForCausalLM", "InternLM2ForCausalLM",
    "InternS1ForConditionalGeneration", "InternVLChatModel", "KimiVLForConditionalGeneration", "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration", "MiniCPMO", "MiniCPMV", "MixtralForCausalLM",
    "OPTForCausalLM", "OlmoeForCausalLM", "OrionForCausalLM", "PaddleOCRVLForConditionalGeneration",
    "Phi4MMForCausalLM", "PhiMoEForCausalLM", "Qwen2AudioForConditionalGeneration", "Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration", "SarvamMoEForCausalLM", "SolarForCausalLM", "StableLmForCausalLM",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "StepVLForConditionalGeneration",
    "VoxtralForConditionalGeneration", "WhisperForConditionalGeneration",
})  # fmt: skip
"""Architectures whose class gives an EAGLE3 head no hidden states (no `SupportsEagle3`): after the weights were loaded,
the start ends with `Model does not support EAGLE3 interface`. The Transformers backend, on which vLLM runs
architectures that it has no class for, gives them."""

EAGLE3_IN_STAGES: Final = frozenset({
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "KimiLinearForCausalLM", "LightOnOCRForConditionalGeneration",
    "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlavaForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
    "MistralForCausalLM", "Phi3ForCausalLM", "PixtralForConditionalGeneration", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ASRForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3VLForConditionalGeneration", "SarvamMLAForCausalLM", "TeleFLMForCausalLM",
})  # fmt: skip
"""Architectures whose EAGLE3 head vLLM also feeds in pipeline stages (`supports_aux_hidden_states_over_pp` of the
decoder). The decoder of the four LightOnOCR, Llava, Mistral3 and Pixtral is the checkpoint's to choose, and most choose
one that does."""
