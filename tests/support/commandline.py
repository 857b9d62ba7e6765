"""Whether a `shoal` command that a text quotes is one that the command line takes."""

import shlex

import click

from shoal.cli.main import main


def parse(line: str) -> None:
    """Parses a command line, without its `shoal`, and runs nothing. One that only names a command needs no arguments.
    Raises UsageError."""
    command: click.Command = main
    context = click.Context(main, info_name="shoal")
    args = shlex.split(line)
    while isinstance(command, click.Group) and args:
        _, rest, _ = command.make_parser(context).parse_args(list(args))
        if not rest:
            return  # options of a group that is a command too
        name, found, args = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, click.Context(found, context, info_name=name)
    if args:
        command.make_context(command.name, args, parent=context.parent)
