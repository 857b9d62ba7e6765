"""`shoal sim`: simulators of what Shoal runs on."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any

import click

from shoal_dev.sim import args as arguments


@click.group()
def command() -> None:
    """Run the engine simulator: `engine` is SGLang, `vllm` is vLLM."""


_OWN_ARGUMENTS: dict[str, Any] = {
    "ignore_unknown_options": True,
    "help_option_names": [],
    "allow_interspersed_args": False,
}


@command.command("engine", context_settings=_OWN_ARGUMENTS, add_help_option=False)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def engine(argv: tuple[str, ...]) -> None:
    """Imitate an SGLang server: the same arguments, the same HTTP API, the pace of a GPU. --help lists its own."""
    args = arguments.parse(argv, os.environ)
    # Late: a wrong command line is refused before the server's libraries are loaded.
    from shoal_dev.sim import server

    _run(server.serve(args))


@command.command("vllm", context_settings=_OWN_ARGUMENTS, add_help_option=False)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def vllm(argv: tuple[str, ...]) -> None:
    """Imitate a vLLM server: the arguments of `vllm serve`, the same HTTP API, the pace of a GPU."""
    from shoal_dev.sim.vllm import args as vllm_arguments

    args = vllm_arguments.parse(argv, os.environ)
    from shoal_dev.sim.vllm import server

    _run(server.serve(args))


def _run(serving: Coroutine[Any, Any, int]) -> None:
    try:
        sys.exit(asyncio.run(serving))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
