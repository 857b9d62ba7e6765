"""Options of several commands: the cluster, the installation of Shoal in it, and how to reach its services."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar, cast

import click

from shoal.api import names
from shoal.kube.client import KubeClient

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE: Final = "shoal-system"


@dataclass(frozen=True, slots=True)
class Installation:
    """An installation of Shoal and how to reach one of its services, made from the options below."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    """Shoal's namespace."""
    url: str | None = None
    """URL of the service. None: it is called through the API server's proxy."""
    key: str | None = None
    """Key for the service. None: the client reads it from the cluster."""
    ca_file: str | None = None
    """File with the CA of the installation. None: the client reads it from the cluster."""

    async def connect(self) -> KubeClient:
        """Connects to the cluster. Raises ValueError, OSError."""
        return await KubeClient.from_environment(kubeconfig=self.kubeconfig, context=self.context)


def kubeconfig_options(command: Callable[P, R]) -> Callable[P, R]:
    """Adds the parameters `kubeconfig` and `context`."""
    command = click.option("--context", help="Context of the kubeconfig.")(command)
    return click.option("--kubeconfig", help="Default: KUBECONFIG, else ~/.kube/config.")(command)


def ca_option(command: Callable[P, R]) -> Callable[P, R]:
    """Adds the parameter `ca_file`."""
    return click.option(
        "--ca-file",
        envvar="SHOAL_CA_FILE",
        show_envvar=True,
        help=f"CA for an https URL. Default: from the ConfigMap {names.AUTHORITY_CONFIG_MAP}.",
    )(command)


def _service_options(
    namespace: str,
    url: str,
    url_help: str,
    key: str | None = None,
    key_help: str = "",
    key_variable: str | None = None,
    *,
    tls: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a decorator that adds the options of a service as one parameter `installation`. `namespace`, `url` and
    `key` are names of options; `tls`: the service may speak TLS."""

    def options(command: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(command)
        def with_installation(*args: Any, **values: Any) -> Any:
            found = Installation(
                values.pop("kubeconfig"),
                values.pop("context"),
                values.pop(_parameter(namespace)),
                values.pop(_parameter(url)),
                values.pop(_parameter(key)) if key is not None else None,
                values.pop("ca_file") if tls else None,
            )
            return cast("Callable[..., Any]", command)(*args, installation=found, **values)

        wrapped: Any = with_installation
        if tls:
            wrapped = ca_option(wrapped)
        if key is not None:
            wrapped = click.option(key, envvar=key_variable, show_envvar=True, help=key_help)(wrapped)
        wrapped = click.option(url, help=url_help)(wrapped)
        wrapped = click.option(
            namespace, envvar="SHOAL_NAMESPACE", default=NAMESPACE, show_default=True, help="Namespace of Shoal."
        )(wrapped)
        return kubeconfig_options(wrapped)

    return options


operator_options = _service_options(
    "--operator-namespace",
    "--operator-url",
    "URL of the operator. Default: through the API server's proxy.",
    tls=False,
)
gateway_options = _service_options(
    "--operator-namespace",
    "--gateway-url",
    "URL of a gateway's operations port. Default: through the API server's proxy.",
)
ledger_options = _service_options(
    "--ledger-namespace",
    "--ledger-url",
    "URL of the ledger. Default: through the API server's proxy.",
    "--ledger-key",
    "Key for the ledger. Default: from the Secret shoal-key-billing.",
    "SHOAL_LEDGER_KEY",
)


def _parameter(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
