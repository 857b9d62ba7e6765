"""When a child is written again."""

import pytest

from shoal.kube.drift import covers

WANTED = {
    "replicas": 1,
    "args": ["--a=1", "--b=2"],
    "containers": [{"name": "engine", "image": "x", "env": [{"name": "HOME", "value": "/h"}]}],
    "paused": False,
    "emptyDir": {},
}


def live(**changes):
    base = {
        "replicas": 1,
        "args": ["--a=1", "--b=2"],
        "dnsPolicy": "ClusterFirst",
        "containers": [
            {"name": "mesh", "image": "m"},
            {"name": "engine", "image": "x", "env": [{"name": "X"}, {"name": "HOME", "value": "/h"}], "tty": False},
        ],
        "emptyDir": {},
    }
    return base | changes


def test_defaults_and_what_others_added_are_no_drift() -> None:
    assert covers(live(), WANTED)


@pytest.mark.parametrize(
    "changed",
    [
        live(replicas=2),
        live(args=["--a=1"]),
        live(args=["--b=2", "--a=1"]),
        live(containers=[]),
        live(containers=[{"name": "engine", "image": "evil", "env": [{"name": "HOME", "value": "/h"}]}]),
        live(containers=[{"name": "engine", "image": "x", "env": []}]),
        live(paused=True),
    ],
)
def test_a_change_of_what_shoal_sent_is_drift(changed) -> None:
    assert not covers(changed, WANTED)
