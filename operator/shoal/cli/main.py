"""`shoal`: one entry point. A sub-command is imported only when it is called, so that the agent stays small."""

import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


if os.getpid() == 1:
    # PID 1 of a container ignores signals without a handler: a pod that is deleted while Python imports would stay for
    # its whole grace period. Hence the handler is set before the imports below. Each command replaces it.
    signal.signal(signal.SIGTERM, _exit_on_signal)

import click  # noqa: E402

from shoal.cli import closedpipe  # noqa: E402
from shoal.runtime import logs  # noqa: E402

_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    # name: (module:attribute, help shown without importing it)
    "operator": ("shoal.runtime.operatorprocess:command", "Run the operator."),
    "gateway": ("shoal.runtime.gateway:command", "Run the gateway, or inspect its spool."),
    "ledger": ("shoal.runtime.ledger:command", "Run the ledger, or maintain its database."),
    "agent": ("shoal.runtime.agent:command", "Run an engine pod's agent, stage a model, or read its facts."),
    "cache": ("shoal.runtime.cache:command", "Run the node cache."),
    "explain": ("shoal.cli.explain:command", "Explain where Models would run, without a cluster."),
    "render": ("shoal.cli.render:command", "Print the objects that the operator would create."),
    "status": ("shoal.cli.status:command", "Show the Models of a cluster and the progress of their replicas."),
    "top": ("shoal.cli.scaling.top:command", "Show load, replicas and cost of Models, live."),
    "why": (
        "shoal.cli.why:command",
        "Explain what is wrong with a Model, adapter, tenant, pod or node: layer, cause, what to do.",
    ),
    "cordon": ("shoal.cli.cordon.command:cordon", "Take GPUs or a node's GPUs out of Shoal's use."),
    "uncordon": ("shoal.cli.cordon.command:uncordon", "Put them back into use, whatever signals say."),
    "doctor": (
        "shoal.cli.doctor:command",
        "Check a whole installation: permissions, kinds, certificates, clocks, classes.",
    ),
    "advise": ("shoal.cli.advise:command", "Say what routing is worth for a Model's own traffic."),
    "logs": ("shoal.cli.logs:command", "Show a tenant's request log, or delete from it."),
    "adapters": ("shoal.cli.adapters:command", "Show the adapters of LoRA pools, their replicas and their use."),
    "wake": ("shoal.cli.scaling.wake:command", "Wake a Model that has no replica."),
    "keys": ("shoal.cli.keys:command", "Create, rotate, disable and list the API keys of Tenants."),
    "usage": ("shoal.cli.usage.usage:usage", "Show counted tokens by tenant, model, adapter, day and more."),
    "bill": ("shoal.cli.usage.bill:bill", "Show the monthly bill of a tenant, also at other prices."),
    "credits": ("shoal.cli.usage.bill:credits", "Create and list credits."),
    "margin": ("shoal.cli.usage.margin:margin", "Show revenue and cost of GPU classes."),
    "unattributed": (
        "shoal.cli.usage.unattributed:unattributed",
        "Show tokens that engines counted and that were not billed.",
    ),
    "export": ("shoal.cli.usage.export:export", "Export usage and cost to other systems (FOCUS)."),
    "support": ("shoal.cli.support:support", "Collect what a bug report needs, without secrets."),
    "prices": ("shoal.cli.usage.prices:prices", "Check price lists."),
}


_PROCESSES: Final = ("operator", "gateway", "ledger", "agent", "cache")
"""Commands that the chart starts. The plugin that krew installs is for people and has none of them."""
_PLUGIN_GROUP: Final = "shoal.commands"
"""Entry point group with which other distributions add commands; `shoal-dev` uses it."""
_COMPLETES: Final = "kubectl_complete-"
"""The programs that complete the arguments of kubectl's plugins are called so."""
_FILES: Final = ":0"
_NO_FILES: Final = ":4"
"""Cobra's directives to a shell: whether it completes names of files too."""
_GLOBAL: Final = ("namespace", "context", "kubeconfig")
"""Options that may stand before the name of a command."""
_DEVELOPER_COMMANDS: Final = ("sim", "lab", "demo", "generate")
"""Commands of shoal-dev."""


class _Lazy(click.Group):
    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        # A process of Shoal, and a command that starts others, end in an order of their own.
        if not {*_PROCESSES, *_DEVELOPER_COMMANDS} & {*(sys.argv[1:] if args is None else args)}:
            closedpipe.end_quietly()
        return super().main(args, *more, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_present(), *_plugins()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _present():
            module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            given = {name: ctx.params[name] for name in _GLOBAL if ctx.params.get(name) is not None}
            ctx.default_map = {cmd_name: _defaults(command, given)}
            return command
        if found := _plugins().get(cmd_name):
            return found.load()
        if cmd_name in _COMMANDS:
            raise click.UsageError(
                f"`{cmd_name}` is a process of Shoal: it is in the image and in the wheel, not in the kubectl plugin",
                ctx,
            )
        if cmd_name in _DEVELOPER_COMMANDS:
            raise click.UsageError(
                f"`shoal {cmd_name}` is for developers: `make setup` in a checkout, or `make image DEV=1`", ctx
            )
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _present().items()])
        if more := {name: point.load() for name, point in _plugins().items()}:
            with formatter.section("Commands for developers of Shoal"):
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in more.items()])


def _present() -> Mapping[str, tuple[str, str]]:
    """The commands that this installation has: `sys.frozen` is set in the plugin that krew installs."""
    if not getattr(sys, "frozen", False):
        return _COMMANDS
    return {name: row for name, row in _COMMANDS.items() if name not in _PROCESSES}


def _defaults(command: click.Command, given: dict[str, str]) -> dict[str, Any]:
    """Click's defaults of a command and of its sub-commands: the options that stand before the command's name. A
    command without such an option ignores it, as kubectl's commands do."""
    nested: Mapping[str, click.Command] = command.commands if isinstance(command, click.Group) else {}
    return {**given, **{name: _defaults(each, given) for name, each in nested.items()}}


def _plugins() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=_PLUGIN_GROUP)}


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
@click.option("-n", "--namespace", help="As the option of a command; kubectl takes it before a command too.")
@click.option("--context", help="The same.")
@click.option("--kubeconfig", help="The same.")
def main(**_: str | None) -> None:
    """Shoal: a Kubernetes operator and control plane for GPU inference fleets."""
    logs.configure()


def kubectl() -> None:
    """`kubectl-shoal`: the plugin that `kubectl shoal` runs, with the same commands; under the name of `complete` that
    program."""
    if Path(sys.argv[0]).name.startswith(_COMPLETES):
        complete()
    else:
        main(prog_name="kubectl shoal")


def complete() -> None:
    """`kubectl_complete-shoal ARGS... BEGINNING`: kubectl's own completion calls it for `kubectl shoal`. Prints a
    candidate per line, and in the last line what the shell does with them."""
    from click.shell_completion import ShellComplete

    closedpipe.end_quietly()
    *args, beginning = sys.argv[1:] or [""]
    found = ShellComplete(main, {}, "kubectl shoal", "").get_completions(args, beginning)
    for each in found:
        if each.type == "plain":
            click.echo(f"{each.value}\t{each.help}" if each.help else each.value)
    click.echo(_NO_FILES if all(each.type == "plain" for each in found) else _FILES)


def run(args: Sequence[str]) -> None:
    """Runs `shoal ARGS` in this process; for tests."""
    main(list(args), standalone_mode=False)
