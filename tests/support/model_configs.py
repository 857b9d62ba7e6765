"""config.json of well-known kinds of models, as far as sizing reads them.

The shapes are those of published models; what only other software reads is left out.
"""

from typing import Any

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def _alternate(depth: int, every: int, full: str = "full_attention", other: str = "sliding_attention") -> list[str]:
    return [full if (i + 1) % every == 0 else other for i in range(depth)]


WHISPER_TURBO: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 1280,
    "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_layers": 4,
    "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "num_hidden_layers": 32, "num_mel_bins": 128,
    "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51866, "torch_dtype": "float16",
    "is_encoder_decoder": True, "activation_function": "gelu",
}  # fmt: skip
"""As on the hub, without what decoding needs."""
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
QWEN25_7B_AWQ: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
    "max_position_embeddings": 32768, "torch_dtype": "float16", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
                            "version": "gemm", "modules_to_not_convert": None},
}  # fmt: skip
QWEN3_32B_FP8: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 64,
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "quantization_config": _FP8,
}  # fmt: skip
QWEN3_235B_FP8: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 94,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "quantization_config": _FP8,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "num_hidden_layers": 42,
    "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {
    # Its language part leaves heads, head width and length to the defaults of its type.
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "sliding_window": 1024,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                      "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                      "patch_size": 14, "vision_use_head": False},
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 24,
    "layer_types": _alternate(24, 2), "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}  # fmt: skip
LLAMA4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
    "text_config": {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
                    "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8,
                    "head_dim": 128, "num_hidden_layers": 48, "num_local_experts": 16, "vocab_size": 202048,
                    "max_position_embeddings": 1048576, "attention_chunk_size": 8192},
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34},
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "vocab_size": 129280, "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "quantization_config": _FP8,
}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_hidden_layers": 27, "vocab_size": 102400, "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 48,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 262144, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "vocab_size": 152064, "max_position_embeddings": 128000, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                      "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14},
}  # fmt: skip
NEMOTRON_H_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
    "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 52, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    "vocab_size": 131072, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
FALCON_H1_7B: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 3072,
    "intermediate_size": 12288, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
    "num_hidden_layers": 44, "mamba_d_conv": 4, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "vocab_size": 130048,
    "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE4_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 4096,
    "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 40, "layer_types": _alternate(40, 10, "attention", "mamba"),
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 128, "vocab_size": 100352, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2_1B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536, "max_position_embeddings": 128000,
    "torch_dtype": "bfloat16",
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
    "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_hidden_layers": 27, "vocab_size": 163840, "model_max_length": 1048576,
    "torch_dtype": "bfloat16",
    "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                           "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
                           "short_conv_kernel_size": 4},
}  # fmt: skip
BGE_M3: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 250002, "max_position_embeddings": 8194,
    "torch_dtype": "float32", "tie_word_embeddings": True,
}  # fmt: skip
E5_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralModel"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32000,
    "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "float16",
}  # fmt: skip

ALL: dict[str, dict[str, Any]] = {
    "whisper-turbo": WHISPER_TURBO,
    "llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "qwen2.5-7b-awq": QWEN25_7B_AWQ, "qwen3-32b-fp8": QWEN3_32B_FP8,
    "qwen3-235b-fp8": QWEN3_235B_FP8, "mixtral": MIXTRAL, "gemma2-9b": GEMMA2_9B, "gemma3-4b": GEMMA3_4B,
    "gpt-oss-20b": GPT_OSS_20B, "llama4-scout": LLAMA4_SCOUT, "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V32, "deepseek-v2-lite": DEEPSEEK_V2_LITE, "qwen3-next-80b": QWEN3_NEXT_80B,
    "qwen2.5-vl-7b": QWEN25_VL_7B, "nemotron-h-8b": NEMOTRON_H_8B, "falcon-h1-7b": FALCON_H1_7B,
    "granite-4-small": GRANITE4_SMALL, "lfm2-1b": LFM2_1B, "kimi-linear": KIMI_LINEAR, "bge-m3": BGE_M3,
    "e5-mistral": E5_MISTRAL,
}  # fmt: skip
