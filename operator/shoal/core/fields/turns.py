"""Messages of a chat as engines and external targets read them. They have been checked (`core/fields/chat.py`)."""

from typing import Any, cast

import orjson


def write_turns(messages: list[dict[str, Any]], *, engine: bool) -> None:
    """Writes messages so that each API reads them, in place.

    Arguments of calls become JSON in a text: vLLM and OpenAI take no object, and SGLang no empty text. For an `engine`,
    what a model thought gets both of its names: SGLang reads one, vLLM the other. And what a developer says is the
    system's there: many chat templates do not know the role and leave the message out, or refuse it.
    """
    developer = False
    for message in messages:
        if engine and (thought := message.get("reasoning_content") or message.get("reasoning")):
            message |= {"reasoning_content": thought, "reasoning": thought}
        if engine and message["role"] == "developer":
            message["role"] = "system"
            developer = True
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            if isinstance(arguments, dict) or arguments == "":
                call["function"]["arguments"] = orjson.dumps(arguments or {}).decode()
    if developer:
        messages[:] = one_system(messages)


def one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that the system says before anybody else, as one message: many templates know one system message, at the
    beginning."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [_text(message.get("content")) for message in messages[:count]]
    if count < 2 or None in texts:
        return messages
    return [{"role": "system", "content": "\n\n".join(cast("list[str]", texts))}, *messages[count:]]


def _text(content: object) -> str | None:
    if isinstance(content, str):
        return content
    texts = (
        [part.get("text") for part in cast("list[dict[str, Any]]", content)] if isinstance(content, list) else [None]
    )
    return "\n".join(cast("list[str]", texts)) if all(isinstance(text, str) for text in texts) else None
