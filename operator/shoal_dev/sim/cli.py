"""`shoal sim`: simulators of what Shoal runs on."""

import asyncio
import os
import sys

import click

from shoal_dev.sim import args as arguments


@click.group()
def command() -> None:
    """Run the engine simulator."""


@command.command(
    "engine",
    context_settings={"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def engine(argv: tuple[str, ...]) -> None:
    """Imitate an SGLang server: the same arguments, the same HTTP API, the pace of a GPU. --help lists its own."""
    args = arguments.parse(argv, os.environ)
    # Late: a wrong command line is refused before the server's libraries are loaded.
    from shoal_dev.sim import server

    try:
        sys.exit(asyncio.run(server.serve(args)))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
