"""Engines as real processes: the simulator, or SGLang on the CPU. Both take the same arguments."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.support.controlplane import free_ports

Kind = Literal["sim", "sglang"]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "images" / "shoal" / "rootfs" / "opt" / "shoal" / "models" / "tiny-chat"
API_KEY = "key-of-the-gateway"
ADMIN_KEY = "key-of-the-agent"
SERVED = "team-a/tiny"
CONTEXT = 4096
MAX_RUNNING = 4
MAX_QUEUED = 2
LORA_RANK, LORA_SLOTS, LORA_LOADED = 8, 3, 4
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = (
    "--enable-lora", "--max-lora-rank", str(LORA_RANK), "--lora-target-modules", *LORA_MODULES,
    "--max-loras-per-batch", str(LORA_SLOTS), "--max-loaded-loras", str(LORA_LOADED), "--lora-backend", "torch_native",
)  # fmt: skip
"""Arguments of an engine with LoRA; one of the slots is the base model's."""
SILENT = "silent"
"""What an engine shows that takes a connection and does not answer for seconds: its event loop is busy loading."""
START_SECONDS = {"sim": 120.0, "sglang": 300.0}


def sglang_launcher() -> Path:
    """What `images/engine-cpu/install.sh` installs. Raises FileNotFoundError that says so."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("SHOAL_ENGINE_VENV") or cache / "shoal" / "engine-cpu" / "venv")
    launcher = venv / "bin" / "sglang-cpu"
    if not launcher.is_file():
        raise FileNotFoundError(f"{launcher} is missing: run images/engine-cpu/install.sh")
    return launcher


@dataclass(slots=True)
class EngineProcess:
    """A running engine."""

    kind: Kind
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    states: list[str] = field(default_factory=list[str])
    """What GET /ready showed while it started, without repetitions: refused, or a status."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready_state(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            return str(connection.getresponse().status)
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return SILENT
        finally:
            connection.close()

    def wait_ready(self, timeout: float) -> None:
        """Raises AssertionError with the end of the log."""
        deadline = time.monotonic() + timeout
        while True:
            state = self.ready_state()
            if state != SILENT and (not self.states or self.states[-1] != state):
                self.states.append(state)
            if state == "200":
                return
            assert self.process.poll() is None, f"exit code {self.process.returncode}: {self.tail()}"
            assert time.monotonic() < deadline, f"not ready after {timeout} s: {self.states} {self.tail()}"
            time.sleep(0.02)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def command(
    kind: Kind, port: int, config: Path, *more: str, model: Path = MODEL, program: list[str] | None = None
) -> list[str]:
    """The command line that both kinds understand, after the program's own name."""
    own = [sys.executable, "-m", "shoal", "sim", "engine"] if kind == "sim" else [str(sglang_launcher())]
    program = program or own
    simulated = ["--sim-load-seconds", "0.3", "--sim-warmup-seconds", "1"] if kind == "sim" else []
    return [
        *program,
        *("--model-path", str(model), "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-total-tokens", "20000", "--max-running-requests", str(MAX_RUNNING)),
        *("--max-queued-requests", str(MAX_QUEUED), "--enable-metrics", "--enable-cache-report"),
        *("--config", str(config), *simulated, *more),
    ]


@contextlib.contextmanager
def running_engine(
    kind: Kind,
    folder: Path,
    *more: str,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
    model: Path = MODEL,
    program: list[str] | None = None,
) -> Generator[EngineProcess]:
    """Starts an engine with its keys in a --config file, as in a pod, and kills it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    make_models()
    config = folder / "engine.yaml"
    config.write_text(f"api-key: {API_KEY}\nadmin-api-key: {ADMIN_KEY}\n")
    port, log = free_ports(1)[0], folder / "engine.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(kind, port, config, *more, model=model, program=program),
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )
    engine = EngineProcess(kind, port, process, log)
    try:
        if wait:
            engine.wait_ready(START_SECONDS[kind])
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            # The whole session: SGLang has child processes.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def make_models() -> None:
    """The tiny models and adapters, if they are not there yet."""
    if not (MODEL.is_dir() and (MODEL.parents[1] / "adapters").is_dir()):
        subprocess.run([sys.executable, str(ROOT / "images" / "shoal" / "make_models.py")], check=True, timeout=60)
