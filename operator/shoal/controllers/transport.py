"""Mutual TLS: the authority of the installation, the certificates that it signs, and who speaks it already.

Every operator reads the authority and signs its own certificate. The leader keeps the authority and all other
certificates. Without a leader every connection works for two thirds of a certificate's life.
"""

import asyncio
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import prometheus_client
import structlog

from shoal.api import identity, names
from shoal.api.identity import CertificateIdentity, ProcessRole
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.children.objects import NameTaken, check_owner
from shoal.controllers.world import World
from shoal.core import certificates, children, facts
from shoal.core.certificates import Leaf, Wanted
from shoal.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from shoal.kube.projections import Custom
from shoal.kube.resources import CONFIGMAPS, SECRETS
from shoal.manifests import certificates as manifests
from shoal.manifests.shape import Named
from shoal.net import pki
from shoal.net.authorities import KeptAuthorities
from shoal.net.pki import CertificateAuthority, CertificatePair, CertificateUnusable
from shoal.net.tls import TLSCredentials

log = structlog.get_logger()

READ_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0
"""While there is no authority yet: nobody is ready without."""
ROLES: Final[tuple[ProcessRole, ...]] = ("gateway", "ledger")
"""Processes that get a Secret. The operator signs its own certificate."""
ISSUED: Final = prometheus_client.Counter("shoal_certificates_issued", "Certificates signed, by reason.", ["reason"])
AUTHORITY_EXPIRES: Final = prometheus_client.Gauge(
    "shoal_authority_expires_timestamp_seconds", "Time at which the certificate authority expires."
)


class CertificateIssuer:
    """The trusted authorities and the issued certificates. `changed` is called when the pods of any Model may have to
    change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._settings = world.config.transport.mtls
        self._kept = KeptAuthorities()
        self._issued: dict[str, Leaf] = {}
        """Model's uid -> the certificate that its Secret has."""
        self._silent: tuple[str, ...] | None = None
        self.credentials = TLSCredentials()
        """This operator's own."""
        self.changed: list[Callable[[], None]] = []

    @property
    def issued(self) -> frozenset[str]:
        """Uids of Models whose certificate is known."""
        return frozenset(self._issued) - {""}

    async def wanted(self) -> bool:
        """Whether engine pods must use mutual TLS: all their callers do. An authority that cannot be read raises and
        does not return False, which would roll back pods that use mutual TLS.

        Raises:
            KubeError: the authority could not be read.
            Unusable: it cannot be used.
        """
        if not self._settings.enabled or self._without_mtls():
            return False
        if self._kept.current is None:
            await self.read(leads=True)
        if self._kept.current is None:
            raise CertificateUnusable(
                f"Secret {names.AUTHORITY_SECRET}: another operator has just made it; it is read again"
            )
        return True

    async def run(self, *, leads: bool) -> None:
        """Until cancelled."""
        while True:
            needed = self._settings.enabled or self._mtls_in_use()
            if needed:
                try:
                    await self.read(leads=leads)
                    if leads:
                        await self._processes()
                        await self._publish()
                        await self._models()
                except (KubeError, CertificateUnusable) as error:
                    log.warning("certificates", error=str(error), consequence="those that there are stay in use")
            await asyncio.sleep(RETRY_SECONDS if needed and not self.credentials else READ_SECONDS)

    # --- the authority ------------------------------------------------------------------------------------------------

    async def read(self, *, leads: bool) -> None:
        """Reads the authorities, and takes the next step where this operator leads. Raises KubeError, Unusable."""
        try:
            found = await self._world.client.get(SECRETS, names.AUTHORITY_SECRET, self._world.namespace)
        except NotFound:
            if not leads or not self._settings.enabled:
                return
            found = await self._empty()
        kept = self._parsed(found)
        if leads:
            kept = await self._step(kept, str(found["metadata"]["resourceVersion"]))
        if kept.current is None:
            return
        before, self._kept = self._kept, kept
        AUTHORITY_EXPIRES.set(kept.current.not_after.timestamp())
        self._own(kept.current)
        if before.fingerprints != kept.fingerprints or before.current is None:
            self._notify()

    async def _empty(self) -> JsonObject:
        """The Secret without any authority: what is written into it is written against the version that was read."""
        try:
            secret = manifests.authority(self._world.namespace, {}, None)
            return await self._world.client.create(SECRETS, secret, manager=names.MANAGER_INSTALL)
        except AlreadyExists:
            return await self._world.client.get(SECRETS, names.AUTHORITY_SECRET, self._world.namespace)

    async def _step(self, kept: KeptAuthorities, version: str) -> KeptAuthorities:
        now = self._world.now()
        given = await self._given()
        life = timedelta(hours=self._settings.certificate_hours)
        step = certificates.step(kept.facts(), now, leaf_life=life, given=given and given.fingerprint)
        if step is None:
            return kept
        made = None
        if step.kind in ("Make", "Prepare"):
            name = f"shoal {self._settings.trust_domain} {self._world.namespace} {now:%Y-%m-%d}"
            made = given or CertificateAuthority.make(name, now, timedelta(days=self._settings.authority_days))
        gone = {a.fingerprint for a in kept.facts().former if now >= a.not_after or now - a.since >= life}
        kept = kept.take(step, made, now, gone)
        secret = manifests.authority(self._world.namespace, kept.data(), version)
        try:
            await self._world.client.apply(SECRETS, secret, manager=names.MANAGER_INSTALL)
        except Conflict:
            # Another operator was first: what it wrote is read next.
            return self._kept
        log.info("authority", step=step.kind, reason=step.reason)
        return kept

    async def _given(self) -> CertificateAuthority | None:
        """The authority of the configured Secret, which another tool keeps. Raises CertificateUnusable."""
        name = self._settings.ca_secret_name
        if not name:
            return None
        try:
            found = await self._world.client.get(SECRETS, name, self._world.namespace)
        except NotFound:
            raise CertificateUnusable(f"there is no Secret {name} (transport.mtls.caSecretName)") from None
        try:
            texts = KeptAuthorities.texts(found)
            return CertificateAuthority.read(
                CertificatePair(texts.get(names.CERTIFICATE_FILE, ""), texts.get(names.CERTIFICATE_KEY_FILE, ""))
            )
        except CertificateUnusable as error:
            raise CertificateUnusable(f"Secret {name} (transport.mtls.caSecretName): {error}") from None

    def _parsed(self, found: JsonObject) -> KeptAuthorities:
        try:
            return KeptAuthorities.read(found)
        except CertificateUnusable as error:
            raise CertificateUnusable(
                f"Secret {names.AUTHORITY_SECRET}: {error}; delete it, and another is made"
            ) from None

    def _own(self, current: CertificateAuthority) -> None:
        """This operator's own certificate, which it signs for itself."""
        wanted = self._wants(self._identity("operator"), strict=False)
        if (renewal := certificates.renewal(self._issued.get(""), wanted, self._world.now())) is not None:
            pair, leaf = self._issue(current, wanted, renewal.reason, calls=True)
            self.credentials.put(pair, self._kept.trust)
            self._issued[""] = leaf

    # --- certificates -------------------------------------------------------------------------------------------------

    async def model(self, model: Named) -> None:
        """The certificate that the Model's pods show. Raises NameTaken, KubeError."""
        current, uid = self._kept.current, model.metadata.uid
        if current is None:
            return
        wanted = self._wants(
            identity.model(self._settings.trust_domain, self._world.namespace, uid), strict=True, spread=_spread(uid)
        )
        if certificates.renewal(self._issued.get(uid), wanted, self._world.now()) is None:
            return
        name = children.certificate_secret(model.metadata.name)
        try:
            found = await self._world.client.get_metadata(SECRETS, name, model.metadata.namespace)
        except NotFound:
            leaf = None
        else:
            check_owner(SECRETS, model, found)
            leaf = manifests.read_annotation(found)
        renewal = certificates.renewal(leaf, wanted, self._world.now())
        if renewal is not None:
            pair, leaf = self._issue(current, wanted, renewal.reason, calls=False)
            secret = manifests.of_model(model, pair, self._kept.trust, leaf, caller=self._identity("gateway").uri)
            await self._world.client.apply(SECRETS, secret, manager=names.MANAGER_MODEL)
        if leaf is not None:
            self._issued[uid] = leaf

    def forget_secrets(self) -> None:
        """Checks every Secret again at the next run: one may have been deleted."""
        for uid in self.issued:
            self._issued.pop(uid, None)

    async def _processes(self) -> None:
        """Certificates of gateways and ledger, and whether they may be strict."""
        current, client, namespace = self._kept.current, self._world.client, self._world.namespace
        if current is None:
            return
        strict = self._settings.enabled and not self._without_mtls()
        for role in ROLES:
            try:
                leaf = manifests.read_annotation(
                    await client.get_metadata(SECRETS, manifests.process_name(role), namespace)
                )
            except NotFound:
                leaf = None
            wanted = self._wants(self._identity(role), strict=strict)
            if (renewal := certificates.renewal(leaf, wanted, self._world.now())) is not None:
                pair, leaf = self._issue(current, wanted, renewal.reason, calls=True)
                secret = manifests.process(namespace, role, pair, self._kept.trust, leaf)
                await client.apply(SECRETS, secret, manager=names.MANAGER_INSTALL)

    async def _publish(self) -> None:
        """The trusted authorities, for people and programs that call gateways and ledger without a certificate."""
        client, namespace = self._world.client, self._world.namespace
        if self._kept.current is None:
            return
        wanted = manifests.trusted(namespace, self._kept.trust)
        try:
            try:
                found = await client.get(CONFIGMAPS, names.AUTHORITY_CONFIG_MAP, namespace)
            except NotFound:
                found = None
            if found is None or found.get("data") != wanted["data"]:
                await client.apply(CONFIGMAPS, wanted, manager=names.MANAGER_INSTALL)
        except KubeError as error:
            if error.unanswered:
                raise
            log.warning("ConfigMap of the authorities", name=names.AUTHORITY_CONFIG_MAP, error=error.message)

    async def _models(self) -> None:
        """Those of all pods that show one, whatever becomes of their Models: one that is paused, or not accepted any
        more, goes on serving. A Model at zero replicas gets its own whenever it is looked at."""
        uids = {pod.model_uid for pod in self._world.pods.values() if pod.model_uid and pod.mtls and not pod.finished}
        for uid in uids:
            custom = self._world.model_by_uid(uid)
            if custom is None or custom.metadata.deletion_timestamp is not None:
                continue
            try:
                await self.model(custom)
            except NameTaken as error:
                log.warning("certificates", error=str(error))
            except KubeError as error:
                if error.unanswered:
                    raise
                log.warning("certificate of a Model", model_uid=uid, error=error.message)

    def _wants(self, identity_: CertificateIdentity, *, strict: bool, spread: float = 0.0) -> Wanted:
        current = self._kept.current
        signer = "" if current is None else current.fingerprint
        return Wanted(identity_.uri, identity_.dns, signer, self._kept.fingerprints, spread, strict)

    def _issue(
        self, authority: CertificateAuthority, wanted: Wanted, reason: str, *, calls: bool
    ) -> tuple[CertificatePair, Leaf]:
        now, life = self._world.now(), timedelta(hours=self._settings.certificate_hours)
        pair = authority.issue(CertificateIdentity(wanted.uri, wanted.dns), now, life, calls=calls)
        certificate = pki.read_certificates(pair.certificate)[0]
        ISSUED.labels(reason).inc()
        log.info("issued a certificate", uri=wanted.uri, reason=reason)
        not_before, not_after = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        leaf = Leaf(not_before, not_after, wanted.uri, wanted.dns, wanted.authority, wanted.trust, wanted.strict)
        return pair, leaf

    def _identity(self, role: ProcessRole) -> CertificateIdentity:
        return identity.process(self._settings.trust_domain, self._world.namespace, role)

    # --- who speaks it ------------------------------------------------------------------------------------------------

    def _without_mtls(self) -> tuple[str, ...]:
        return certificates.silent(self._world.processes())

    def _mtls_in_use(self) -> bool:
        """Switched off, it is spoken until the last pod from before is replaced: such pods have to be called, and their
        certificates renewed. A Model that is paused keeps its pods for as long as it is."""
        return any(pod.mtls and not pod.finished for pod in self._world.pods.values())

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is not None and (after is None or after.metadata.uid != before.metadata.uid):
            self._issued.pop(before.metadata.uid, None)

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        """A gateway, operator or ledger came or went: perhaps all that are left speak mutual TLS."""
        if not self._settings.enabled or not any(pod is not None and pod.process for pod in (before, after)):
            return
        silent = self._without_mtls()
        if silent == self._silent:
            return
        if silent:
            log.info("not everybody speaks mutual TLS yet: engine pods are made without", pods=silent)
        elif self._silent:
            log.info("everybody speaks mutual TLS: engine pods are rolled")
        first, self._silent = self._silent is None, silent
        if not first:
            self._notify()

    def _notify(self) -> None:
        for listener in self.changed:
            listener()


def _spread(uid: str) -> float:
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "big") / 2**32
