"""When certificates and their authority are renewed, and that trust always goes before signing."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.identity import role_of
from shoal.core.certificates import OVERLAP, Authorities, Leaf, Renewal, Wanted, renewal, silent, step
from shoal.core.facts import Pod
from shoal.net.authorities import KeptAuthorities
from shoal.net.pki import CertificateAuthority, CertificatePair, CertificateUnusable
from tests.support.mutual import InstallationPKI, model, process

NOW = datetime(2027, 3, 1, 12, 0, tzinfo=UTC)
WEEK, YEAR = timedelta(days=7), timedelta(days=365)
LEAF = Leaf(NOW, NOW + WEEK, "spiffe://a/ns/s/gateway", "gateway.a", "one", ("one",))
WANTED = Wanted(LEAF.uri, LEAF.dns, "one", ("one",))


@pytest.mark.parametrize(
    ("leaf", "wanted", "after", "reason"),
    [
        (None, WANTED, timedelta(), "Missing"),
        (LEAF, WANTED, timedelta(), None),
        (LEAF, WANTED, WEEK / 3 - timedelta(seconds=1), None),
        (LEAF, WANTED, WEEK / 3, "Due"),
        (LEAF, replace(WANTED, spread=1.0), WEEK / 3, None),
        (LEAF, replace(WANTED, spread=1.0), WEEK / 2, "Due"),
        (LEAF, WANTED, WEEK, "Expired"),
        (LEAF, replace(WANTED, uri="spiffe://b/ns/s/gateway"), timedelta(), "Names"),
        (LEAF, replace(WANTED, authority="two"), timedelta(), "Authority"),
        (LEAF, replace(WANTED, trust=("one", "two")), timedelta(), "Trust"),
        (LEAF, replace(WANTED, strict=True), timedelta(), "Strict"),
    ],
)
def test_a_certificate_is_renewed_for_a_reason(leaf: Leaf | None, wanted: Wanted, after: timedelta, reason: str | None):
    found = renewal(leaf, wanted, NOW + after)
    assert found == (None if reason is None else Renewal(reason))  # type: ignore[arg-type]


def walk(days: int, hours: int, given_at: dict[int, str] | None = None) -> list[tuple[datetime, KeptAuthorities]]:
    """Takes whatever steps are due, every `hours`."""
    kept, now, states = KeptAuthorities(), NOW, list[tuple[datetime, KeptAuthorities]]()
    others: dict[str, CertificateAuthority] = {}
    given: CertificateAuthority | None = None
    for number in range(days * 24 // hours):
        if given_at and number in given_at:
            given = others.setdefault(given_at[number], CertificateAuthority.make(given_at[number], now, YEAR))
        due = step(kept.facts(), now, leaf_life=WEEK, given=given and given.fingerprint)
        if due is not None:
            made = (given or CertificateAuthority.make("shoal", now, YEAR)) if due.kind in ("Make", "Prepare") else None
            gone = {a.fingerprint for a in kept.facts().former if now >= a.not_after or now - a.since >= WEEK}
            # As it is written and read.
            kept = KeptAuthorities.read({"data": kept.take(due, made, now, gone).data()})
        states.append((now, kept))
        now += timedelta(hours=hours)
    return states


def holds(states: list[tuple[datetime, KeptAuthorities]]) -> set[str]:
    """Whoever signs was trusted by all for OVERLAP before, and stays so while a certificate of it may be valid."""
    trusted_since: dict[str, datetime] = {}
    signed: dict[str, datetime] = {}
    first = states[0][1].current
    assert first is not None
    for now, kept in states:
        assert kept.current is not None
        assert now < kept.current.not_after
        trusted_since = {mark: trusted_since.get(mark, now) for mark in kept.fingerprints}
        signer = kept.current.fingerprint
        if signer != first.fingerprint:
            assert now - trusted_since[signer] >= OVERLAP
        signed[signer] = now
        for mark, last in signed.items():
            assert mark in trusted_since or now - last >= WEEK - timedelta(hours=12)
    return set(signed)


def test_over_years_trust_goes_before_signing():
    states = walk(days=1100, hours=6)
    assert len(holds(states)) >= 4
    assert max(len(kept.fingerprints) for _, kept in states) == 2


def test_an_authority_that_somebody_else_keeps_is_taken_over_in_the_same_steps():
    states = walk(days=40, hours=6, given_at={0: "first", 40: "second", 42: "third"})
    # The second was replaced before it ever signed.
    assert len(holds(states)) == 2


@given(st.lists(st.integers(min_value=1, max_value=30 * 24), min_size=1, max_size=30))
def test_an_operator_that_is_away_for_weeks_never_signs_with_what_is_not_trusted(hours: list[int]):
    kept, now = KeptAuthorities(), NOW
    for pause in hours:
        found = kept.facts()
        due = step(found, now, leaf_life=WEEK)
        if due is not None and due.kind == "Promote":
            assert found.next is not None
            assert found.current is not None
            assert now - found.next.since >= OVERLAP or now >= found.current.not_after
        if due is not None:
            made = CertificateAuthority.make("shoal", now, YEAR) if due.kind in ("Make", "Prepare") else None
            gone = {a.fingerprint for a in found.former if now >= a.not_after or now - a.since >= WEEK}
            kept = kept.take(due, made, now, gone)
        now += timedelta(hours=pause)


def test_without_an_authority_one_is_made():
    found = step(Authorities(), NOW, leaf_life=WEEK)
    assert found is not None
    assert found.kind == "Make"


def test_what_is_no_authority_is_not_taken_for_one():
    pki = InstallationPKI()
    leaf = pki.pair(process("gateway"))
    with pytest.raises(CertificateUnusable, match="isCA: true"):
        CertificateAuthority.read(leaf)
    with pytest.raises(CertificateUnusable, match="does not belong"):
        CertificateAuthority.read(CertificatePair(pki.trust, leaf.key))
    with pytest.raises(CertificateUnusable, match="not PEM"):
        CertificateAuthority.read(CertificatePair("", ""))


def pod(name: str, *, mtls: bool, finished: bool = False, deleting: bool = False) -> Pod:
    return Pod("shoal-system", name, name, None, finished, deleting, True, {}, None, mtls=mtls, process=True)


def test_engines_wait_for_the_last_process_of_a_version_from_before():
    new, old = pod("gateway-0", mtls=True), pod("gateway-1", mtls=False)
    assert silent([new, old]) == ("shoal-system/gateway-1",)
    assert silent([new, replace(old, deleting=True)]) == ("shoal-system/gateway-1",)  # its streams go on
    assert silent([new, replace(old, finished=True)]) == ()
    assert silent([]) == ()


def test_a_model_is_no_process():
    own = model("u-1").uri
    assert role_of(own, process("gateway").uri) == "gateway"
    assert role_of(process("ledger").uri, process("operator").uri) == "operator"
    assert role_of(own, own) is None
    assert role_of(own, "spiffe://elsewhere/ns/shoal-system/gateway") is None
    assert role_of(own, "spiffe://shoal.internal/ns/other/gateway") is None
