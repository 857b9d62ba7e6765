"""Tokens of prompts and answers: the model's own tokenizer.json where there is one, else words."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, cast

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

_PLAIN_TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CONTINUED: Final = "CONTINUE_FINAL_MESSAGE_TAG"
_WORD = re.compile(r"<\|\w+\|>|\s?\w+|\s?[^\w\s]|\s+")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    eos_id: int

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special`: with the tokens that the tokenizer puts around a text."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: with the text of special tokens. Raises OverflowError for ids that are no 32-bit numbers."""
        ...

    def pieces(self, text: str) -> list[tuple[int, str]]:
        """Tokens with the text that each adds; the texts joined give `text`."""
        ...


@dataclass(slots=True)
class WordTokenizer:
    """One token per word or mark. Ids are given in the order in which words are first seen."""

    eos_id: int = 0
    _ids: dict[str, int] = field(default_factory=lambda: {"": 0})
    _words: list[str] = field(default_factory=lambda: [""])

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [self._id(word) for word in _WORD.findall(text)]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(self._words[i] for i in ids if 0 <= i < len(self._words))

    def pieces(self, text: str) -> list[tuple[int, str]]:
        return [(self._id(word), word) for word in _WORD.findall(text)]

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


class ModelTokenizer:
    """The tokenizer.json of a model's folder."""

    def __init__(self, path: Path, eos_token: str | None) -> None:
        self._tokenizer = FastTokenizer.from_file(str(path))
        found = self._tokenizer.token_to_id(eos_token) if eos_token else None
        self.eos_id = 0 if found is None else found

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def pieces(self, text: str) -> list[tuple[int, str]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        found: list[tuple[int, str]] = []
        at = 0
        # From the end of one token to the end of the next: some tokenizers leave blanks out of a token's own span.
        for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
            found.append((token, text[at:end]))
            at = max(at, end)
        return found


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What the simulator reads of a model: no weights."""

    tokenizer: Tokenizer
    context_length: int
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    config: Mapping[str, Any]
    """config.json."""
    longest_text: int
    """The tokenizer's own bound, which it only reports; the context length where it has none."""
    _template: str
    _special: Mapping[str, str]

    @classmethod
    def load(cls, model_path: str) -> "ModelFolder":
        """Reads config.json, tokenizer.json and tokenizer_config.json, as far as they are there."""
        folder = Path(model_path)
        config = _json(folder / "config.json")
        settings = _json(folder / "tokenizer_config.json")
        special: dict[str, str] = {}
        for key, value in settings.items():
            text: Any = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                special[key] = text
        file = folder / "tokenizer.json"
        template = settings.get("chat_template")
        extra = folder / "chat_template.jinja"
        if extra.is_file():
            template = extra.read_text()
        return cls(
            tokenizer=ModelTokenizer(file, special.get("eos_token")) if file.is_file() else WordTokenizer(),
            context_length=int(config.get("max_position_embeddings", 8192)),
            model_type=str(config.get("model_type", "llama")),
            architectures=tuple(config.get("architectures", ("LlamaForCausalLM",))),
            hidden_size=int(config.get("hidden_size", 64)),
            config=config,
            longest_text=int(settings.get("model_max_length") or config.get("max_position_embeddings", 8192)),
            _template=template if isinstance(template, str) else _PLAIN_TEMPLATE,
            _special=special,
        )

    @property
    def labels(self) -> dict[int, str]:
        """Labels of a model that classifies, by index; transformers has two where the config names none."""
        named: dict[str, str] = self.config.get("id2label") or {}
        count = int(self.config.get("num_labels") or 2)
        return {int(index): label for index, label in named.items()} or {n: f"LABEL_{n}" for n in range(count)}

    def chat_prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, opens: bool = True
    ) -> str:
        """Renders the chat template. `opens`: with the beginning of the answer. Raises ValueError with the template's
        own complaint."""

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse  # pyright: ignore[reportArgumentType]
        try:
            return environment.from_string(self._template).render(
                messages=messages, tools=tools, add_generation_prompt=opens, **self._special
            )
        except TemplateError as error:
            raise ValueError(str(error)) from None

    def continued_prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Renders the chat template up to the end of the last message's text, as transformers does. Raises ValueError
        if the template leaves the text out."""
        *before, last = messages
        text = self.chat_prompt([*before, {**last, "content": last["content"] + _CONTINUED}], tools, opens=False)
        return text[: text.rindex(_CONTINUED)]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
