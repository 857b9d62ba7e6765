"""What an administrator runs for a user who may not read Shoal's kinds."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from shoal.api.rights import VIEWER
from shoal.cli.roletokens import binding_name, subject, user_name
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden


@asynccontextmanager
async def explaining_refusals(client: KubeClient, namespace: str | None) -> AsyncGenerator[None]:
    """Adds to a refusal of the API server what grants the right. `namespace`: where is read; None: in the cluster."""
    try:
        yield
    except Forbidden as error:
        who = await user_name(client)
        kind, where = ("clusterrolebinding", "") if namespace is None else ("rolebinding", f" -n {namespace}")
        binding = f"{binding_name(VIEWER, who)} --clusterrole={VIEWER} {subject(who)}"
        text = (
            f"{error.message}\nThis needs the ClusterRole {VIEWER} "
            f"{'in the whole cluster' if namespace is None else f'in namespace {namespace}'}. An administrator runs:\n"
            f"  kubectl{where} create {kind} {binding}"
        )
        raise Forbidden(text, status=error.status, reason=error.reason) from None
