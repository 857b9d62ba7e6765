"""The real Prometheus (Debian's package), scraping what a test names."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

from shoal_dev.lab.errors import LabError
from shoal_dev.lab.network import require_programs
from tests.support.controlplane import free_ports


class Prometheus:
    """One process, its configuration and its data."""

    def __init__(
        self, folder: Path, targets: Mapping[str, Mapping[str, str]], scrape_seconds: int, dropped: str = ""
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": f"{scrape_seconds}s", "scrape_timeout": f"{scrape_seconds}s"},
            "scrape_configs": [
                {
                    "job_name": "shoal",
                    "metric_relabel_configs": [
                        {"source_labels": ["__name__"], "regex": dropped or "none", "action": "drop"}
                    ],
                    "static_configs": [
                        {"targets": [target], "labels": dict(labels)} for target, labels in targets.items()
                    ],
                }
            ],
        }
        path = folder / "prometheus.yaml"
        path.write_text(json.dumps(config))
        self._command = [
            shutil.which("prometheus") or "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(self.url + "/-/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, Mapping[str, str]], scrape_seconds: int = 1, dropped: str = ""
) -> Generator[Prometheus]:
    """`targets`: host:port -> labels, such as namespace and pod. `dropped`: the name of samples that are not kept."""
    try:
        require_programs(print, {"prometheus": "prometheus"})
    except LabError as error:
        pytest.skip(f"the real Prometheus is not to be had here: {error}")
    it = Prometheus(folder, targets, scrape_seconds, dropped)
    it.start()
    try:
        yield it
    finally:
        it.stop()
