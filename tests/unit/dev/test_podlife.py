"""The life-cycle suite's own eyes: what it sees of pods when the API server ends a watch."""

import asyncio
import stat
from pathlib import Path

import pytest

from tests.support import podlife

KUBECTL = """#!/bin/sh
case "$*" in
*--watch*pods*|*pods*--watch*)
    if [ -e "$0.watched" ]; then exec sleep 60; fi
    touch "$0.watched"
    for name in gone stays; do echo '{"type":"ADDED","object":{"metadata":{"name":"'$name'"}}}'; done ;;
*--watch*) exec sleep 60 ;;
*jsonpath=*items*) printf "stays collector new" ;;
*jsonpath=*) printf "10.0.0.1" ;;
*) echo "{}" ;;
esac
"""


async def test_a_pod_that_goes_between_two_watches_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podlife, "MISSED_SECONDS", 0.2)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    cluster = podlife.Cluster(str(kubectl), {"PATH": "/usr/bin:/bin"})
    cluster.timelines["gone"] = podlife.Timeline()
    await cluster.start()
    try:
        await cluster.until(lambda: cluster.timelines["gone"].find("api", "DELETED"), "the end of the pod", 20)
        assert set(cluster.pods) == {"stays"}
    finally:
        for watch in cluster._watches:
            watch.cancel()
        await asyncio.gather(*cluster._watches, return_exceptions=True)
