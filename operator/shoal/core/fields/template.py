"""`chat_template_kwargs`: variables of the model's own chat template."""

from dataclasses import dataclass
from typing import Any, Final, cast

from shoal.core.fields.kinds import Facts, FieldProblem, wrong, wrong_type

_MOST: Final = 16
_LONGEST: Final = 1024
_LARGEST: Final = 10_000_000
_TAKEN: Final = frozenset(
    {
        # Arguments of the tokenizer's apply_chat_template and of what it calls: given twice, or of the wrong type, they
        # are a TypeError, which SGLang answers with 500; `chat_template` would be code.
        *("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "tokenizer", "processor_kwargs"),
        *("template_kwargs", "kwargs", "args", "processor", "text", "images", "videos", "audio"),
        # What templates call: a value in its place cannot be called.
        *("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop"),
        *("super", "caller", "varargs", "context"),
        # Not of the template: SGLang takes it for its decoder, unchecked.
        "spaces_between_special_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    describe: str = (
        f"an object of at most {_MOST} variables of the model's chat template: true, false, a number up to {_LARGEST}, "
        f"or a string of at most {_LONGEST} characters; not those that the engine sets itself"
    )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, dict):
            return wrong_type(at, "an object")
        variables = cast(dict[str, Any], value)
        if len(variables) > _MOST:
            return wrong(at, f"an object of at most {_MOST} variables")
        for name, given in variables.items():
            here = f"{at}.{name[:64]}"
            if not (name.isascii() and name.isidentifier() and len(name) <= 64) or name.startswith("_"):
                return wrong(here, "named with letters, digits and `_`")
            if name in _TAKEN or name.endswith(("_token", "special_tokens")):
                return FieldProblem(here, f"`{here}` is set by the engine itself.", "not_allowed")
            if given is None or type(given) is bool:
                continue
            if isinstance(given, str):
                if len(given) > _LONGEST:
                    return wrong(here, f"at most {_LONGEST} characters", "string_too_long")
            elif not isinstance(given, int | float):
                return wrong_type(here, "true, false, a number or a string")
            elif not -_LARGEST <= given <= _LARGEST:
                return wrong(here, f"a number from {-_LARGEST} to {_LARGEST}")
        return None
