"""The act on engines: one model on SGLang and on vLLM, asked through three APIs by one key; then one bill for both."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import anthropic
import click
import openai
from rich.table import Table

from shoal.api import reasons
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import condition, until

FILE: Final = steps.EXAMPLES / steps.ENGINES_FILE
NAMESPACE: Final = "engines"
MODELS: Final = {"on-sglang": "SGLang", "on-vllm": "vLLM"}
TENANT: Final = "umbrella"
KEY: Final = "sk-demo-engines-4a7f10c9e2"
"""The key whose hash stands in the example: public, not a secret."""
TOKENS: Final = 16
PROMPT: Final = "Which engine runs you?"
_KNOWN_SECONDS: Final = 30.0
"""How long a new key may take to reach the gateways."""


def run(cluster: DemoCluster, stages: Stages, timeout: float) -> None:
    """Plays the act and prints what happened.

    Raises ClickException when a Model does not serve, an API is not answered, or the ledger does not come to what the
    clients were told within `timeout` seconds.
    """
    console = stages.console
    console.print(
        "\n[bold]Two engines[/]: one model on SGLang and on vLLM, asked through the chat, Responses and Messages APIs"
    )
    with stages.stage("Both Models Ready"):
        cluster.kubectl("apply", "-f", str(FILE))
        until(
            cluster,
            "models",
            NAMESPACE,
            lambda found: all(
                name in found and condition(found[name], reasons.READY).get("status") == "True" for name in MODELS
            ),
            timeout,
        )
    tokens: dict[tuple[str, str], tuple[int, int]] = {}
    with cluster.gateway() as url, stages.stage("Six answers: two engines, three APIs", spin=False):
        _until_known(url)
        before = _billed(cluster)
        for name in MODELS:
            for api, ask in _APIS.items():
                tokens[name, api] = ask(url, f"{NAMESPACE}/{name}")
    console.print(_picture(tokens))
    sums = {
        f"{NAMESPACE}/{name}": tuple(
            sum(row[side] for (model, _), row in tokens.items() if model == name) for side in (0, 1)
        )
        for name in MODELS
    }
    with stages.stage("The ledger has what the six answers said"):
        _until_billed(cluster, before, sums, timeout)
    month = time.strftime("%Y-%m", time.gmtime())
    args = ("bill", "--tenant", TENANT, "--month", month)
    console.print(f"kubectl shoal {' '.join(args)}")
    console.print(_shoal(cluster, *args), markup=False, soft_wrap=True)


# --- three APIs, each by its own SDK. Of an answer: the tokens of its prompt, and its own -----------------------------


def _chat(url: str, model: str) -> tuple[int, int]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=TOKENS
        )
    if answer.usage is None:
        raise click.ClickException(f"{model} did not say what it used")
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def _responses(url: str, model: str) -> tuple[int, int]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        answer = client.responses.create(model=model, input=PROMPT, max_output_tokens=TOKENS, store=False)
    if answer.usage is None:
        raise click.ClickException(f"{model} did not say what it used")
    return answer.usage.input_tokens, answer.usage.output_tokens


def _messages(url: str, model: str) -> tuple[int, int]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        answer = client.messages.create(model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=TOKENS)
    cached = answer.usage.cache_read_input_tokens or 0
    return answer.usage.input_tokens + cached, answer.usage.output_tokens


_APIS: Final[Mapping[str, Callable[[str, str], tuple[int, int]]]] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}


def _until_known(url: str) -> None:
    """Waits until the gateway knows the new Tenant and its Models."""
    deadline = time.monotonic() + _KNOWN_SECONDS
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        while True:
            try:
                for name in MODELS:
                    client.models.retrieve(f"{NAMESPACE}/{name}")
                return
            except (openai.AuthenticationError, openai.NotFoundError) as error:
                if time.monotonic() > deadline:
                    raise click.ClickException(f"the gateway does not know the Tenant: {error}") from error
                time.sleep(0.1)


def _billed(cluster: DemoCluster) -> dict[str, tuple[int, ...]]:
    """The ledger's sums of each Model for the act's tenant: prompt tokens, and answer tokens."""
    # Of all tenants: to name one that the ledger has not seen yet is a mistake, and so an error.
    rows = json.loads(_shoal(cluster, "usage", "--by", "tenant,model", "-o", "json"))["rows"]
    return {
        row["model"]: (int(row["inputTokens"] or 0), int(row["outputTokens"] or 0))
        for row in rows
        if row["tenant"] == TENANT
    }


def _until_billed(
    cluster: DemoCluster, before: Mapping[str, tuple[int, ...]], sums: Mapping[str, tuple[int, ...]], timeout: float
) -> None:
    """Waits until the ledger's sums of each Model have grown by those of this run: an earlier run's are in them too."""
    deadline = time.monotonic() + timeout
    while True:
        found = _billed(cluster)
        grown = {
            model: tuple(
                now - then for now, then in zip(found.get(model, (0, 0)), before.get(model, (0, 0)), strict=True)
            )
            for model in sums
        }
        # Records of an earlier run may arrive late.
        if all(a >= b for model, wanted in sums.items() for a, b in zip(grown[model], wanted, strict=True)):
            return
        if time.monotonic() > deadline:
            raise click.ClickException(f"the ledger has {grown} more, and the answers said {dict(sums)}")
        time.sleep(0.5)


def _picture(tokens: Mapping[tuple[str, str], tuple[int, int]]) -> Table:
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("  Model", "engine", "API", "prompt tokens", "answer tokens"):
        table.add_column(heading, justify="right" if heading.endswith("tokens") else "left")
    for (name, api), (prompt, answer) in tokens.items():
        table.add_row(f"  {name}", MODELS[name], api, str(prompt), str(answer))
    return table


def _shoal(cluster: DemoCluster, *args: str) -> str:
    """What `kubectl shoal ARGS` prints."""
    return cluster.tools.run(Path(sys.executable), ("-m", "shoal", *args), None, 60)


def delete(cluster: DemoCluster) -> None:
    """Takes the example away again."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(FILE), timeout=300)
