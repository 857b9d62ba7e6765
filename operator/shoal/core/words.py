"""What a client can put in `model`, and what that means to its tenant.

`namespace/name` means that object. A short name belongs to the oldest claimant (creationTimestamp, then uid) among the
Models and adapters that the tenant may use, so that nobody outside its grants can take a name from it. A Model and an
adapter of one `namespace/name` are two claimants of it.

An index, kept up to date one object at a time: of 20,000 adapters one that changes costs microseconds, and so does a
request.
"""

from bisect import insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

from shoal.api import reasons
from shoal.core.access import Identity
from shoal.core.resolve import ServedModel
from shoal.core.resolve_adapters import EVERYONE, DeclaredAdapter, DeclaredPool, problem_of

_FAR: Final = datetime.max.replace(tzinfo=UTC)


class _Claim(NamedTuple):
    """Sorts the oldest first."""

    created: datetime
    uid: str
    of_adapter: bool
    key: str


class Words:
    """Models, adapters and pools by `namespace/name`, and who claims which word."""

    def __init__(self) -> None:
        self.models: Mapping[str, ServedModel] = {}
        self._pools: Mapping[str, DeclaredPool] = {}
        self._adapters: dict[str, DeclaredAdapter] = {}
        self._uids: dict[str, str] = {}
        self._claims: dict[str, list[_Claim]] = {}
        self._listing: dict[str, dict[str, None]] = {}
        """By name of a Tenant: adapters that list it."""
        self._open: dict[str, dict[str, None]] = {}
        """By pool: adapters for everyone who may use its Model."""
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
            for table, entry in self._tables(old):
                del table[entry][key]
                if not table[entry]:
                    del table[entry]
        if adapter is not None:
            self._adapters[key] = adapter
            self._uids[adapter.uid] = key
            self._claim(_claim_of(adapter), (adapter.key, *adapter.claims))
            for table, entry in self._tables(adapter):
                table.setdefault(entry, {})[key] = None

    def retain(self, keys: Collection[str]) -> None:
        """Forgets adapters that are none of these."""
        for key in [key for key in self._adapters if key not in keys]:
            self.put(key, None)

    # --- asking -----------------------------------------------------------------------------------------------------

    def find(self, word: str, identity: Identity) -> ServedModel | None:
        """What serves the tenant under this word; None: nothing does, or what the word means does not answer now."""
        for claim in self._claims.get(word, ()):
            if not claim.of_adapter:
                if claim.key in identity.grants:
                    return self.models[claim.key]
            elif self._may_use(self._adapters[claim.key], identity):
                return self._answering(self._adapters[claim.key])
        return None

    def why_not(self, word: str, identity: Identity) -> str | None:
        """The reason for which an adapter that the tenant may use, and that the word means, does not answer now."""
        for claim in self._claims.get(word, ()):
            if not claim.of_adapter:
                if claim.key in identity.grants:
                    return None
            elif self._may_use(self._adapters[claim.key], identity):
                return self._problem(self._adapters[claim.key])
        return None

    def listed(self, identity: Identity) -> list[tuple[str, ServedModel]]:
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

    def _usable(self, identity: Identity) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Addresses and claims of the Models and adapters that the tenant may use."""
        for key in identity.grants:
            if (model := self.models.get(key)) is not None:
                yield key, model.claims
        keys = dict(self._listing.get(identity.tenant, {}))
        for pool, adapters in self._open.items():
            if (declared := self._pools.get(pool)) is not None and declared.model_key in identity.grants:
                keys.update(adapters)
        for key in keys:
            if self._adapters[key].pool_key in self._pools:
                yield key, self._adapters[key].claims

    def _may_use(self, adapter: DeclaredAdapter, identity: Identity) -> bool:
        """One whose pool does not exist belongs to no Model, and has no names."""
        pool = self._pools.get(adapter.pool_key)
        if pool is None:
            return False
        return identity.tenant in adapter.tenants or (EVERYONE in adapter.tenants and pool.model_key in identity.grants)

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

    def _claim(self, claim: _Claim, words: tuple[str, ...]) -> None:
        for word in _words(claim, words):
            insort(self._claims.setdefault(word, []), claim)

    def _withdraw(self, claim: _Claim, words: tuple[str, ...]) -> None:
        for word in _words(claim, words):
            claims = self._claims[word]
            claims.remove(claim)
            if not claims:
                del self._claims[word]

    def _tables(self, adapter: DeclaredAdapter) -> Iterator[tuple[dict[str, dict[str, None]], str]]:
        for tenant in adapter.tenants:
            yield (self._open, adapter.pool_key) if tenant == EVERYONE else (self._listing, tenant)


def _words(claim: _Claim, words: tuple[str, ...]) -> Iterator[str]:
    """Each once; nobody but the object itself can claim a `namespace/name`."""
    return (word for word in dict.fromkeys(words) if "/" not in word or word == claim.key)


def _claim_of(one: ServedModel | DeclaredAdapter) -> _Claim:
    return _Claim(one.created or _FAR, one.uid, isinstance(one, DeclaredAdapter), one.key)


def _same_claims(old: ServedModel, new: ServedModel) -> bool:
    return (old.uid, old.created, old.claims) == (new.uid, new.created, new.claims)
