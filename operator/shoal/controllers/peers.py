"""The processes that the operator calls and listens to, with the keys that each of them has."""

from shoal.api import keys
from shoal.controllers.installkey import InstallKeys
from shoal.core import facts
from shoal.net.stream import StreamPeer, agent_peer, gateway_peer
from shoal.net.tls import TLSCredentials


def agent(pod: facts.Pod, install: InstallKeys, model_uid: str, credentials: TLSCredentials | None) -> StreamPeer:
    """Of an engine pod, which names the install key from which its keys were made, and knows no other."""
    said = install.of(pod.install_key).bearer_for("operator", model_uid)
    return agent_peer(
        pod.uid, pod.name, pod.ip or "", said, model_uid=model_uid, mtls=pod.mtls, credentials=credentials
    )


def gateway(pod: facts.Pod, install: InstallKeys, credentials: TLSCredentials | None) -> StreamPeer:
    """Its mounted key may be older than the Secret."""
    first, *others = install.bearers_for("operator", keys.DEMAND)
    return gateway_peer(
        pod.uid,
        pod.name,
        pod.ip or "",
        first,
        mtls=pod.mtls,
        credentials=credentials,
        other_keys=tuple(others),
    )
