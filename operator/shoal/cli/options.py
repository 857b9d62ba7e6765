"""Options of several commands: which cluster, which installation of Shoal in it, and where to call it instead."""

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE: Final = "shoal-system"


def kubeconfig_options(command: Callable[P, R]) -> Callable[P, R]:
    """Which cluster; parameters `kubeconfig` and `context`."""
    command = click.option("--context", help="The context of the kubeconfig to use.")(command)
    return click.option("--kubeconfig", help="Default: KUBECONFIG, else ~/.kube/config.")(command)


def installation_options(namespace: str, *urls: tuple[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Which installation: the options of `kubeconfig_options`; `namespace`, the option that names where Shoal is; and
    for each of `urls` (option, its help) one by which something is called without the API server."""

    def options(command: Callable[P, R]) -> Callable[P, R]:
        for option, said in urls:
            command = click.option(option, help=said)(command)
        command = click.option(
            namespace, envvar="SHOAL_NAMESPACE", default=NAMESPACE, show_default=True, help="Where Shoal is installed."
        )(command)
        return kubeconfig_options(command)

    return options


cluster_options = installation_options(
    "--operator-namespace", ("--operator-url", "Call the operator here, not through the API server.")
)
"""Parameters `kubeconfig`, `context`, `operator_namespace`, `operator_url`."""
