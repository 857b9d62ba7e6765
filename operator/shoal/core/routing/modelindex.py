"""What a client can put in `model`, and what that means to its tenant.

A name, short or `namespace/name`, has claimants: Models, and adapters. Of those that a tenant may use (consent.py), a
Model comes before every adapter; among Models, and among adapters, the oldest comes first (creationTimestamp, then
uid). What a tenant may not use counts for nothing, however old, so nobody outside its grants can take a name from it.

An index, kept up to date one object at a time: of 20,000 adapters one that changes costs microseconds, and so does a
request. It is by namespace, and a request looks only where its tenant was granted something: what is claimed elsewhere
costs it nothing.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

from shoal.api import reasons
from shoal.core.access import KeyIdentity
from shoal.core.routing.consent import EVERYONE, may_use
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.resolveadapters import DeclaredAdapter, DeclaredPool, problem_of

_FAR: Final = datetime.max.replace(tzinfo=UTC)


class _Claim(NamedTuple):
    """Sorts by precedence: Models first, then the oldest."""

    of_adapter: bool
    created: datetime
    uid: str
    key: str


class ModelIndex:
    """Models, adapters and pools by `namespace/name`, and who claims which word."""

    def __init__(self) -> None:
        self.models: Mapping[str, ServedModel] = {}
        self._pools: Mapping[str, DeclaredPool] = {}
        self._adapters: dict[str, DeclaredAdapter] = {}
        self._uids: dict[str, str] = {}
        self._claims: dict[str, dict[str, list[_Claim]]] = {}
        """By word, then by namespace of who claims it."""
        self._listing: dict[tuple[str, str], dict[str, None]] = {}
        """By namespace and name of a Tenant, or `EVERYONE`: adapters that list it."""
        self._served: dict[str, tuple[ServedModel, DeclaredAdapter, ServedModel]] = {}
        """What was made of a Model and an adapter last."""

    @property
    def adapter_uids(self) -> Collection[str]:
        """Of all adapters."""
        return self._uids.keys()

    # --- keeping up -------------------------------------------------------------------------------------------------

    def set_models(self, models: Mapping[str, ServedModel]) -> None:
        """All Models; the mapping is kept, and must not be changed."""
        before, self.models = self.models, models
        for key in before.keys() | models.keys():
            old, new = before.get(key), models.get(key)
            if old is not None and new is not None and _same_claims(old, new):
                continue
            if old is not None:
                self._withdraw(_claim_of(old), (old.key, *old.claims))
            if new is not None:
                self._claim(_claim_of(new), (new.key, *new.claims))

    def set_pools(self, pools: Mapping[str, DeclaredPool]) -> None:
        """All pools; the mapping is kept, and must not be changed."""
        self._pools = pools

    def put(self, key: str, adapter: DeclaredAdapter | None) -> None:
        """One adapter as it is now; None: there is none."""
        old = self._adapters.get(key)
        if old == adapter:
            return
        if old is not None:
            del self._adapters[key], self._uids[old.uid]
            self._served.pop(key, None)
            self._withdraw(_claim_of(old), (old.key, *old.claims))
            for tenant in old.tenants:
                listing = self._listing[old.namespace, tenant]
                del listing[key]
                if not listing:
                    del self._listing[old.namespace, tenant]
        if adapter is not None:
            self._adapters[key] = adapter
            self._uids[adapter.uid] = key
            self._claim(_claim_of(adapter), (adapter.key, *adapter.claims))
            for tenant in adapter.tenants:
                self._listing.setdefault((adapter.namespace, tenant), {})[key] = None

    def retain(self, keys: Collection[str]) -> None:
        """Forgets adapters that are none of these."""
        for key in [key for key in self._adapters if key not in keys]:
            self.put(key, None)

    # --- asking -----------------------------------------------------------------------------------------------------

    def find(self, name: str, identity: KeyIdentity) -> ServedModel | None:
        """What serves the tenant under this word; None: nothing does, or what the word means does not answer now."""
        claim = self._first_claim(name, identity)
        if claim is None:
            return None
        return self._answering(self._adapters[claim.key]) if claim.of_adapter else self.models[claim.key]

    def why_not(self, name: str, identity: KeyIdentity) -> str | None:
        """The reason for which an adapter that the tenant may use, and that the word means, does not answer now."""
        claim = self._first_claim(name, identity)
        return None if claim is None or not claim.of_adapter else self._problem(self._adapters[claim.key])

    def listed(self, identity: KeyIdentity) -> list[tuple[str, ServedModel]]:
        """What a list of models shows: the short names, and `namespace/name` of what owns no short name."""
        found: list[tuple[str, ServedModel]] = []
        for address, claims in self._usable(identity):
            owned: list[tuple[str, ServedModel]] = []
            for word in dict.fromkeys(claims):
                served = self.find(word, identity)
                if served is not None and served.address == address and served.claims == claims:
                    owned.append((word, served))
            if not owned and (served := self.find(address, identity)) is not None and served.claims == claims:
                owned.append((address, served))
            found += owned
        return sorted(found, key=lambda pair: pair[0])

    def _usable(self, identity: KeyIdentity) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Addresses and claims of the Models and adapters that the tenant may use."""
        for key in identity.grants:
            if (model := self.models.get(key)) is not None:
                yield key, model.claims
        keys: dict[str, None] = {}
        for namespace in identity.namespaces:
            for tenant in (identity.tenant, EVERYONE):
                keys.update(self._listing.get((namespace, tenant), {}))
        for key in keys:
            if self._may_use(self._adapters[key], identity):
                yield key, self._adapters[key].claims

    def _first_claim(self, name: str, identity: KeyIdentity) -> _Claim | None:
        """Whose claim to the word comes first of those that the tenant may use."""
        claims = self._claims.get(name)
        if claims is None:
            return None
        first: _Claim | None = None
        for namespace in self._shared(claims, identity):
            for claim in claims[namespace]:
                if first is not None and first < claim:
                    break
                if self._granted(claim, identity):
                    first = claim
                    break
        return first

    def _shared(self, claims: Mapping[str, object], identity: KeyIdentity) -> Iterable[str]:
        """Namespaces in which there are claims, and something that was granted to the tenant."""
        mine = identity.namespaces
        if len(claims) < len(mine):
            return [namespace for namespace in claims if namespace in mine]
        return [namespace for namespace in mine if namespace in claims]

    def _granted(self, claim: _Claim, identity: KeyIdentity) -> bool:
        if claim.of_adapter:
            return self._may_use(self._adapters[claim.key], identity)
        return claim.key in identity.grants

    def _may_use(self, adapter: DeclaredAdapter, identity: KeyIdentity) -> bool:
        """One whose pool does not exist belongs to no Model, and has no names."""
        pool = self._pools.get(adapter.pool_key)
        if pool is None:
            return False
        return may_use(
            identity.tenant,
            identity.grants,
            identity.consent,
            adapter=adapter.key,
            listed=adapter.tenants,
            model=pool.model_key,
        )

    def _problem(self, adapter: DeclaredAdapter) -> str | None:
        pool = self._pools[adapter.pool_key]
        return problem_of(adapter, pool) or (None if pool.model_key in self.models else reasons.MODEL_NOT_FOUND)

    def _answering(self, adapter: DeclaredAdapter) -> ServedModel | None:
        if adapter.current is None or self._problem(adapter) is not None:
            return None
        base = self.models[self._pools[adapter.pool_key].model_key]
        known = self._served.get(adapter.key)
        if known is not None and known[0] is base and known[1] is adapter:
            return known[2]
        served = replace(base, claims=adapter.claims, created=adapter.created, adapter=adapter.current)
        self._served[adapter.key] = (base, adapter, served)
        return served

    def _claim(self, claim: _Claim, names: tuple[str, ...]) -> None:
        for word in _own_names(claim, names):
            insort(self._claims.setdefault(word, {}).setdefault(_namespace(claim), []), claim)

    def _withdraw(self, claim: _Claim, names: tuple[str, ...]) -> None:
        for word in _own_names(claim, names):
            claims = self._claims[word]
            here = claims[_namespace(claim)]
            here.remove(claim)
            if not here:
                del claims[_namespace(claim)]
            if not claims:
                del self._claims[word]


def _namespace(claim: _Claim) -> str:
    return claim.key.partition("/")[0]


def _own_names(claim: _Claim, names: tuple[str, ...]) -> Iterator[str]:
    """Each once; nobody but the object itself can claim a `namespace/name`."""
    return (word for word in dict.fromkeys(names) if "/" not in word or word == claim.key)


def _claim_of(one: ServedModel | DeclaredAdapter) -> _Claim:
    return _Claim(isinstance(one, DeclaredAdapter), one.created or _FAR, one.uid, one.key)


def _same_claims(old: ServedModel, new: ServedModel) -> bool:
    return (old.uid, old.created, old.claims) == (new.uid, new.created, new.claims)
