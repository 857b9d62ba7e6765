"""Makes a tiny Whisper with random weights: speech_model.py FOLDER HEADS. Runs with the engine's Python."""

# pyright: basic, reportMissingImports=false
import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = "the quick brown fox jumps over the lazy dog hello world kubernetes pods serve models"
SPECIAL = (
    "endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev", "nospeech",
    "notimestamps",
)  # fmt: skip


_TEXT = 24
"""Positions before the end of a text. Random weights would go on to the longest, 448."""


def _ends_early(model, end: int) -> None:
    """Later positions look like the end's token, and earlier ones unlike it."""
    decoder = model.model.decoder
    direction = torch.randn(decoder.embed_positions.weight.shape[1])
    with torch.no_grad():
        decoder.embed_positions.weight[:_TEXT] = -50 * direction
        decoder.embed_positions.weight[_TEXT:] = 50 * direction
        decoder.embed_tokens.weight[end] = 4 * direction


def main(out: Path, heads: int) -> None:
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    names = [f"<|{name}|>" for name in SPECIAL]
    names += [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([WORDS] * 20, trainer)
    bpe.model.save(str(out))
    bpe.save(str(out / "tokenizer.json"))
    end = names[0]
    tokenizer = transformers.WhisperTokenizerFast(
        tokenizer_file=str(out / "tokenizer.json"), unk_token=end, bos_token=end, eos_token=end,
        additional_special_tokens=names[1 : len(SPECIAL)],
    )  # fmt: skip
    tokenizer.add_tokens(names)
    last, first = tokenizer.convert_tokens_to_ids(end), tokenizer.convert_tokens_to_ids(names[1])
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=80, encoder_layers=2, decoder_layers=2, d_model=64,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=1500, max_target_positions=448, decoder_start_token_id=first, bos_token_id=last,
        eos_token_id=last, pad_token_id=last, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).to(torch.float32)
    _ends_early(model, last)
    model.save_pretrained(out)
    features = transformers.WhisperFeatureExtractor(feature_size=80, nb_max_frames=3000, chunk_length=30)
    transformers.WhisperProcessor(features, tokenizer).save_pretrained(out)
    written = json.loads((out / "config.json").read_text())
    assert written["architectures"] == ["WhisperForConditionalGeneration"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
