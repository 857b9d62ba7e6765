"""What the simulator answers: readable English, the same for the same seed and prompt."""

import hashlib
import random
from typing import Final

from shoal_dev.sim.signatures import shown
from shoal_dev.sim.tokenizer import Tokenizer

_SENTENCES: Final = (
    "This answer comes from the engine simulator, not from a model.",
    "It was generated token by token, at the pace of the GPU that it imitates.",
    "The same prompt and the same seed always give the same words.",
    "Its tokens are counted, cached and billed like those of a real engine.",
    "Prompts that begin alike share their prefix in the cache.",
    "When many ask at once, they are served together in one batch.",
    "A long prompt is read in chunks, so that others do not wait for it.",
    "If the cache is full, the oldest prefixes make room.",
    "Someone who hangs up frees the place for the next in the queue.",
    "The meaning is missing, but the numbers are honest.",
    "A shoal moves as one, though every fish swims for itself.",
    "Water finds its level, and so does the load between replicas.",
    "Nothing here was learned, and nothing will be remembered.",
    "Ask a real model for wisdom, and this one for load.",
    "The tide brings requests in, and the stream carries answers out.",
    "Small models start fast, large ones take their time to load.",
)
_OPENING: Final = "Hello from Shoal."


class SimulatedAnswer:
    """A few sentences in an order that the seed, the prompt and the adapter decide; without end if asked to ignore the
    end. `signature` stands before each of an adapter's."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: tuple[int, ...], *, seed: int, choice: int, signature: str | None = None
    ) -> None:
        source = (seed, choice, prompt) if signature is None else (seed, choice, prompt, signature)
        digest = hashlib.blake2b(repr(source).encode(), digest_size=8).digest()
        self._random = random.Random(digest)  # noqa: S311 - reproducible on purpose
        self._tokenizer = tokenizer
        self._sign = "" if signature is None else shown(signature)
        self._tokens = tokenizer.pieces(self._sign + _OPENING)
        self._sentences = self._random.randint(3, 7)
        self._written = 0
        self._length: int | None = None
        """Tokens before the end of the answer, once that much was written."""

    def token(self, index: int) -> tuple[int, str, bool]:
        """See `scheduler.Answer`. The end is the end-of-sequence token; what follows is for those who ignore it."""
        while index >= len(self._tokens):
            if self._written == self._sentences and self._length is None:
                self._length = len(self._tokens)
                self._tokens.append((self._tokenizer.eos_id, ""))
                continue
            self._tokens += self._tokenizer.pieces(f" {self._sign}{self._random.choice(_SENTENCES)}")
            self._written += 1
        token, text = self._tokens[index]
        return token, text, index == self._length
