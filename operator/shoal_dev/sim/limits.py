"""What a prompt and its answer may be long, with SGLang's messages."""


class BadRequestError(ValueError):
    """Refused with 400 and this message."""


def new_tokens(prompt: tuple[int, ...], asked: int | None, context: int, capacity: int) -> int:
    """How many tokens may be generated, of `asked` (None: as many as possible), with a context length and the capacity
    of the KV cache, all in tokens. Raises BadRequestError."""
    tokens = len(prompt)
    if tokens >= context:
        raise BadRequestError(
            f"The input ({tokens} tokens) is longer than the model's context length ({context} tokens)."
        )
    if asked is not None and tokens + asked > context:
        raise BadRequestError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
            f"a total of {tokens + asked} tokens: {tokens} tokens from the input messages and {asked} tokens for "
            "the completion. Please reduce the number of tokens in the input messages or the completion to fit "
            "within the limit."
        )
    longest = min(context, capacity) - 1
    if tokens >= longest:
        raise BadRequestError(
            f"Input length ({tokens} tokens) exceeds the maximum allowed length ({longest} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    return min(longest - tokens, longest if asked is None else asked)
