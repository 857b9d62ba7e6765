"""The proof that a gateway admitted a request: once, for one pod and path, for a short time."""

import pytest

from shoal.core import admission
from shoal.core.admission import LIFE_SECONDS, SKEW_SECONDS, Admissions, proof

KEY, HOST, PATH, NOW = "engine-key", "10.0.0.1", "/v1/completions", 1_800_000_000.0


def made(nonce: str = "n1", *, key: str = KEY, host: str = HOST, path: str = PATH, now: float = NOW) -> str:
    return proof(key, host, path, nonce, now)


def test_a_proof_is_taken_once() -> None:
    pod = Admissions(HOST)
    assert pod.take(KEY, PATH, made(), NOW) == "admitted"
    assert pod.take(KEY, PATH, made(), NOW) == "used"
    assert pod.take(KEY, PATH, made(now=NOW + 1), NOW + 1) == "used"  # the same nonce, whatever else
    assert pod.take(KEY, PATH, made("n2"), NOW) == "admitted"


@pytest.mark.parametrize(
    "told",
    [
        made(key="another Model's key"),
        made(host="10.0.0.2"),
        made(path="/v1/chat/completions"),
        made()[:-1] + ("0" if made()[-1] != "0" else "1"),
        made().replace(".n1.", ".n2."),
    ],
    ids=["key", "pod", "path", "signature", "nonce"],
)
def test_a_proof_for_something_else_is_none(told: str) -> None:
    assert Admissions(HOST).take(KEY, PATH, told, NOW) == "forged"


@pytest.mark.parametrize(
    "told", ["", "v1", "v1.x.n.m", "v2" + made()[2:], "v1..n.m", "v1.1..m", "v1.²." + "n.m", "a" * 999]
)
def test_what_is_no_proof_is_refused(told: str) -> None:
    assert Admissions(HOST).take(KEY, PATH, told, NOW) == "malformed"


def test_a_proof_ends_and_clocks_may_differ_a_little() -> None:
    late = LIFE_SECONDS + SKEW_SECONDS
    assert Admissions(HOST).take(KEY, PATH, made(), NOW + late) == "admitted"
    assert Admissions(HOST).take(KEY, PATH, made(), NOW + late + 1) == "expired"
    assert Admissions(HOST).take(KEY, PATH, made(), NOW - SKEW_SECONDS) == "admitted"
    assert Admissions(HOST).take(KEY, PATH, made(), NOW - SKEW_SECONDS - 1) == "expired"


def test_what_is_remembered_is_bounded_and_never_forgotten_while_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_REMEMBERED", 2)
    pod = Admissions(HOST)
    assert [pod.take(KEY, PATH, made(f"n{n}"), NOW) for n in range(3)] == ["admitted", "admitted", "full"]
    assert pod.take(KEY, PATH, made("n0"), NOW + LIFE_SECONDS) == "used"
    after = NOW + LIFE_SECONDS + SKEW_SECONDS + 1
    assert pod.take(KEY, PATH, made("n3", now=after), after) == "admitted"
