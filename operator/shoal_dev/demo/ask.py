"""The question: the `openai` SDK, streamed, as any user of the fleet would ask it."""

import time
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

PROMPT = "Which replica answers me?"


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """What came back."""

    text: str
    request_id: str
    seconds: float
    usage: dict[str, Any]


def ask(base_url: str, api_key: str, model: str, console: Console) -> DemoAnswer:
    """Streams one chat completion and prints it as it comes. Raises ClickException with the API's own error."""
    import openai

    start = time.monotonic()
    parts: list[str] = []
    usage: dict[str, Any] = {}
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, timeout=60, max_retries=2)
    try:
        with client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        ).parse() as stream:
            request_id = stream.response.headers.get("x-request-id", "")
            for chunk in stream:
                if chunk.usage:
                    usage = chunk.usage.model_dump(exclude_none=True)
                for choice in chunk.choices:
                    if choice.delta.content:
                        parts.append(choice.delta.content)
                        console.print(choice.delta.content, end="", style="cyan", markup=False, highlight=False)
            console.print()
    except openai.APIError as e:
        raise click.ClickException(f"the gateway answered: {e}") from e
    finally:
        client.close()
    return DemoAnswer("".join(parts), request_id, time.monotonic() - start, usage)
