"""`shoal`: one entry point. Sub-commands load their code only when called, so that the agent stays small."""

import importlib
import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


if os.getpid() == 1:
    # Number 1 of a container ignores what it has no handler for: a pod deleted while Python imports would stay for
    # its whole grace period. Each command replaces this handler by its own. Hence before the imports below.
    signal.signal(signal.SIGTERM, _leave)

import click  # noqa: E402

from shoal.runtime import logs  # noqa: E402

_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    # name: (module:attribute, help shown without importing it)
    "operator": ("shoal.runtime.operatorprocess:command", "Run the operator."),
    "gateway": ("shoal.runtime.gateway:command", "Run the gateway, or look into its spool."),
    "ledger": ("shoal.runtime.ledger:command", "Run the ledger, or look after its database."),
    "agent": ("shoal.runtime.agent:command", "Run an engine pod's agent, stage a model, or read its facts."),
    "cache": ("shoal.runtime.cache:command", "Run the node cache."),
    "explain": ("shoal.cli.explain:command", "Say where Models would run and why, without a cluster."),
    "render": ("shoal.cli.render:command", "Print the objects that the operator would make."),
    "status": ("shoal.cli.status:command", "Show the Models of a cluster and how far they are."),
    "top": ("shoal.cli.scaling.top:command", "Show load, replicas and cost of Models, live."),
    "why": ("shoal.cli.scaling.why:command", "Say why a Model has as many replicas as it has."),
    "logs": ("shoal.cli.logs:command", "Show a tenant's request log, or delete from it."),
    "adapters": ("shoal.cli.adapters:command", "Show where the adapters of LoRA pools are and how they are used."),
    "wake": ("shoal.cli.scaling.wake:command", "Wake a Model that has no replica."),
    "keys": ("shoal.cli.keys:command", "Make, rotate, disable and list the API keys of Tenants."),
    "usage": ("shoal.cli.usage.usage:usage", "Show counted tokens by tenant, model, adapter, day and more."),
    "bill": ("shoal.cli.usage.bill:bill", "Show what a tenant pays for a month, also at other prices."),
    "credits": ("shoal.cli.usage.credits:credits", "Make and list credits."),
    "margin": ("shoal.cli.usage.margin:margin", "Show what GPU classes brought in beside what they cost."),
    "unattributed": ("shoal.cli.usage.unattributed:unattributed", "Show what engines counted beside what was billed."),
    "export": ("shoal.cli.usage.export:export", "Write usage and cost for other systems (FOCUS)."),
    "prices": ("shoal.cli.usage.prices:prices", "Check price lists."),
}


_MORE: Final = "shoal.commands"
"""Group of entry points by which another distribution adds commands; `shoal-dev` does."""
_DEVELOPERS: Final = ("sim", "lab", "demo", "generate")
"""Commands of shoal-dev."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_more()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
            return getattr(importlib.import_module(module), attribute)
        if found := _more().get(cmd_name):
            return found.load()
        if cmd_name in _DEVELOPERS:
            raise click.UsageError(
                f"`shoal {cmd_name}` is for developers: pip install 'shoal[dev]', or make image DEV=1", ctx
            )
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])
        if more := {name: point.load() for name, point in _more().items()}:
            with formatter.section("Commands for developers of Shoal"):
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in more.items()])


def _more() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=_MORE)}


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
def main() -> None:
    """Shoal: a Kubernetes operator and control plane for GPU inference fleets."""
    logs.configure()


def kubectl() -> None:
    """`kubectl-shoal`: what `kubectl shoal` calls. The same commands."""
    main(prog_name="kubectl shoal")


def run(args: Sequence[str]) -> None:
    """Calls `shoal ARGS` in this process; for tests."""
    main(list(args), standalone_mode=False)
