"""Makes a tiny Qwen2-VL with random weights: vision_model.py TINY_CHAT FOLDER HEADS. Runs with the engine's Python."""

# pyright: basic, reportMissingImports=false
import json
import sys
from pathlib import Path

import torch
import transformers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SPECIAL = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad", "im_start", "im_end")


def main(chat: Path, out: Path, heads: int) -> None:
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(chat)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in SPECIAL]})
    tokenizer.chat_template = TEMPLATE
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in SPECIAL}
    eighth = 64 // heads // 2 // 8
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [2 * eighth, 3 * eighth, 3 * eighth]},
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    transformers.Qwen2VLForConditionalGeneration(config).to(torch.float32).save_pretrained(out)
    images = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 64)
    parts = {"image_processor": images, "tokenizer": tokenizer, "chat_template": TEMPLATE}
    try:
        processor = transformers.Qwen2VLProcessor(**parts, video_processor=transformers.Qwen2VLVideoProcessor())
    except (ImportError, TypeError):
        processor = transformers.Qwen2VLProcessor(**parts)
    processor.save_pretrained(out)
    written = json.loads((out / "config.json").read_text())
    written["vision_config"]["in_chans"] = 3
    (out / "config.json").write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
