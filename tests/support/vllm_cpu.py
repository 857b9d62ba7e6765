"""The real vLLM on the CPU with a model of a given config, for its own figures of its KV cache."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from tests.support.controlplane import free_ports
from tests.support.engines import MODEL, make_models, vllm_launcher

START_SECONDS = 600.0
_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def model_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """A model without weights: its config, and the tokenizer of the tiny models."""
    make_models()
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


@contextlib.contextmanager
def running(model: Path, *args: str) -> Generator[str]:
    """The URL of an engine with random weights; it is ended afterwards. Raises AssertionError with the end of its log
    where it does not start."""
    port, log = free_ports(1)[0], model / "engine.log"
    command = [
        str(vllm_launcher()),
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--load-format",
        "dummy",
        *args,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, cwd=model)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"{url}/health"):
            assert process.poll() is None, f"exit code {process.returncode}: {log.read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < deadline, f"not ready: {log.read_text(errors='replace')[-3000:]}"
            time.sleep(0.5)
        yield url
    finally:
        # Its children outlive it, and it may lose one signal while it loads.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def cache_info(url: str) -> dict[str, str]:
    """The labels of the engine's `vllm:cache_config_info`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = _INFO.search(text)
    assert found, text[:2000]
    return dict(_LABEL.findall(found.group(1)))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
