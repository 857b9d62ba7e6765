"""Architectures that SGLang 0.5.23 serves, by how their attention keeps its past.

From the model registry and from `configs/model_config.py` of that version; a test beside the engine compares them.
"""

from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MLA: Final = _names("""
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekVL2ForCausalLM DotsVLMForCausalLM
    Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM KimiK25ForConditionalGeneration KimiVLForConditionalGeneration
    MiniCPM3ForCausalLM MistralLarge3ForCausalLM SarvamMLAForCausalLM
""")
"""One latent per token, shared by all heads."""

DSA: Final = _names("DeepseekV3ForCausalLM DeepseekV32ForCausalLM GlmMoeDsaForCausalLM MistralLarge3ForCausalLM")
"""Of these, the ones that become sparse when the config has an `index_topk`."""

WINDOWED: Final = _names("""
    Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GptOssForCausalLM
    GraniteMoeSWAForCausalLM GraniteSWAForCausalLM IQuestQ1ForCausalLM LagunaForCausalLM Llama4ForConditionalGeneration
    MellumForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM Step3p5ForCausalLM Step3p7ForConditionalGeneration
""")
"""Two pools: layers that keep all tokens, and layers that keep a window. Other models with windows (Gemma 2 and 3,
Mistral, Cohere 2, ...) keep every token of every layer in this version."""

HYBRID: Final = _names("""
    FalconH1ForCausalLM GraniteMoeHybridForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm2VlForConditionalGeneration NemotronHForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
""")
"""Some layers keep a state of fixed size per request instead of tokens."""

FULL: Final = _names("""
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BaichuanForCausalLM BailingMoEForCausalLM
    BailingMoeForCausalLM BailingMoeV2ForCausalLM BertForSequenceClassification BertModel ChatGLMModel
    Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration CohereForCausalLM Contriever
    DeepseekForCausalLM DeepseekOCRForCausalLM DotsOCRForCausalLM Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM
    Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM
    ExaoneMoeForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM Gemma2ForCausalLM
    Gemma2ForSequenceClassification Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM
    Gemma3nForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4vForConditionalGeneration
    Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeSharedForCausalLM Grok1ForCausalLM Grok1ModelForCausalLM HYV3ForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM IQuestCoderForCausalLM InternLM2ForCausalLM InternLM2ForRewardModel InternLM3ForCausalLM
    InternS1ForConditionalGeneration InternVLChatModel LightOnOCRForConditionalGeneration Llama4ForCausalLM
    LlamaEmbeddingModel LlamaForCausalLM LlamaForClassification LlamaForSequenceClassification
    LlamaForSequenceClassificationWithNormal_Weights LlavaForConditionalGeneration LlavaLlamaForCausalLM
    LlavaMistralForCausalLM LlavaQwenForCausalLM MiMoForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM
    Ministral3ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM MistralModel MixtralForCausalLM
    OPTForCausalLM Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM OrionForCausalLM
    PaddleOCRVLForConditionalGeneration PersimmonForCausalLM Phi3ForCausalLM Phi4MMForCausalLM PhiForCausalLM
    PhiMoEForCausalLM PixtralForConditionalGeneration QWenLMHeadModel QuantMixtralForCausalLM
    Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2ForRewardModel Qwen2ForSequenceClassification
    Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM
    Qwen3ForRewardModel Qwen3ForSequenceClassification Qwen3Model Qwen3MoeForCausalLM
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    SarvamMoEForCausalLM SolarForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TeleFLMForCausalLM
    VoxtralForConditionalGeneration XLMRobertaForSequenceClassification XLMRobertaModel XverseForCausalLM
    XverseMoeForCausalLM YiVLForCausalLM
""")
"""Every layer keeps every token."""

ENCODER_DECODER: Final = _names("WhisperForConditionalGeneration")
"""An encoder reads the whole input, and a decoder looks at it from each of its layers."""

EMBEDS: Final = _names("""
    BertForSequenceClassification BertModel CLIPModel Contriever EmbeddingGemma2Model Gemma2ForSequenceClassification
    InternLM2ForRewardModel Lfm2BidirectionalModel LlamaEmbeddingModel LlamaForSequenceClassification
    LlamaForSequenceClassificationWithNormal_Weights MistralModel Qwen2ForRewardModel Qwen2ForSequenceClassification
    Qwen3ForRewardModel Qwen3ForSequenceClassification Qwen3Model XLMRobertaForSequenceClassification XLMRobertaModel
""")
"""These embed or score whatever the engine's arguments say; any other needs --is-embedding for it."""

CLASSIFIES: Final = frozenset(name for name in EMBEDS if "ForSequenceClassification" in name)
"""Of these, the ones with a head of labels; with one label they rank."""

REWARDS: Final = frozenset(name for name in EMBEDS if name.endswith("ForRewardModel"))
"""Of these, the ones that score a text."""

ENCODERS: Final = _names("""
    BertForSequenceClassification BertModel Contriever XLMRobertaForSequenceClassification XLMRobertaModel
""")
"""Of these, the ones whose attention looks both ways: a prompt cannot be read in parts, and no part of it can be
reused."""

IMAGES_IF_ASKED: Final = _names("""
    Gemma3ForConditionalGeneration Llama4ForConditionalGeneration Step3VLForConditionalGeneration
""")
"""With these SGLang reads images only with --enable-multimodal."""

MULTIMODAL: Final = _names("""
    CLIPModel Cohere2VisionForConditionalGeneration Cosmos3EdgeForConditionalGeneration DeepseekOCRForCausalLM
    DeepseekVL2ForCausalLM DotsOCRForCausalLM DotsVLMForCausalLM Ernie4_5_VLMoeForConditionalGeneration
    Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
    Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration
    GlmAsrForConditionalGeneration GlmImageForConditionalGeneration GlmOcrForConditionalGeneration
    InternS1ForConditionalGeneration InternS1ProForConditionalGeneration InternVLChatModel
    KimiK25ForConditionalGeneration KimiVLForConditionalGeneration Lfm2VlForConditionalGeneration
    LightOnOCRForConditionalGeneration LlavaForConditionalGeneration LlavaLlamaForCausalLM LlavaMistralForCausalLM
    LlavaQwenForCausalLM MiniCPMO MiniCPMV MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration
    MllamaForConditionalGeneration PaddleOCRVLForConditionalGeneration Phi4MMForCausalLM
    PixtralForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration
    Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3OmniMoeForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration
    Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration Step3p7ForConditionalGeneration
    StepVLForConditionalGeneration VoxtralForConditionalGeneration WhisperForConditionalGeneration
""")
"""With these SGLang reads images, sound or video by itself."""

HEARS_ONLY: Final = _names("""
    GlmAsrForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen3ASRForConditionalGeneration
    VoxtralForConditionalGeneration WhisperForConditionalGeneration
""")
"""Of these, the ones that read sound and no images."""

PIPED: Final = _names("""
    Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration
""")
"""Of these, the ones whose places of media in a text all look like `<|...|>`, in both engines and in Transformers."""

TRANSCRIBES: Final = _names("""
    GlmAsrForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen3ASRForConditionalGeneration
    WhisperForConditionalGeneration
""")
"""Of these, the ones for which SGLang serves /v1/audio/transcriptions."""

TRANSCRIBES_ONLY: Final = _names("Qwen3ASRForConditionalGeneration WhisperForConditionalGeneration")
"""Of these, the ones that are for nothing else: Whisper has no chat template."""

HEARS: Final = HEARS_ONLY | _names("""
    Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration MiniCPMO
    Phi4MMForCausalLM Qwen3OmniMoeForConditionalGeneration
""")
"""Of these, the ones that read sound, as their processors say."""
