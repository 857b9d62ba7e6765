"""Which adapter's weights answered: every answer of an adapter carries its signature, the base's carry none.

A signature is a word that the adapter's files decide. It stands before every sentence, so a stream that was cut shows
it too, and a test that knows the files knows what the answer has to say.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

_SHOWN: Final = re.compile(r"\[([0-9a-f]{8})\]")
_CHUNK: Final = 1 << 20
WEIGHTS: Final = ("*.safetensors", "*.bin")


def signature(folder: Path) -> str:
    """Of the adapter in `folder`: 8 hex digits of its configuration and weights. Raises OSError."""
    return signature_of((folder / "adapter_config.json").read_bytes(), folder)


def signature_of(config: bytes, folder: Path) -> str:
    """As `signature`, of an adapter_config.json that was read already. Raises OSError."""
    digest = hashlib.sha256(config)
    for pattern in WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:8]


def signatures_in(text: str) -> tuple[str, ...]:
    """Signatures in the text of an answer, in order; none where the base model answered."""
    return tuple(_SHOWN.findall(text))


def shown(word: str) -> str:
    """As it stands in a text."""
    return f"[{word}] "
