"""The shell that starts the engine: signals go through, the exit code comes back, nothing lingers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.manifests.pod import HAND_ON, start_script

GRACEFUL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(0)))
print("up", flush=True)
while True: time.sleep(1)
"""


def start(tmp_path: Path, program: str) -> subprocess.Popen[str]:
    script = start_script(*(str(tmp_path / name) for name in ("boot", "stalled", "drain")))
    return subprocess.Popen(
        ["sh", "-c", script, "engine", sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(20)
    finally:
        process.kill()
        if process.stdout:
            process.stdout.close()


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_the_engines(tmp_path: Path, code: int) -> None:
    for stale in ("stalled", "drain"):
        (tmp_path / stale).touch()
    assert end(start(tmp_path, f"raise SystemExit({code})")) == code
    assert (tmp_path / "boot").read_text().strip()
    assert [file.name for file in tmp_path.iterdir()] == ["boot"]


def test_an_engine_that_drains_is_waited_for(tmp_path: Path) -> None:
    process = start(tmp_path, GRACEFUL)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert end(process) == 0


def test_each_start_has_another_boot_id(tmp_path: Path) -> None:
    end(start(tmp_path, "pass"))
    first = (tmp_path / "boot").read_text()
    end(start(tmp_path, "pass"))
    assert (tmp_path / "boot").read_text() != first


def test_a_signal_at_the_start_is_not_swallowed() -> None:
    """By a child that has its parent's trap until it has become the program."""
    for number in range(120):
        process = subprocess.Popen(["sh", "-c", HAND_ON, "x", "sleep", "5"], stderr=subprocess.DEVNULL)
        time.sleep(number % 30 / 10_000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(4) in (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_number_one_an_engine_without_a_handler_ends_at_sigterm(tmp_path: Path) -> None:
    """As in a container. The mutation beside it: without the shell the signal is ignored."""
    loading = 'import time; print("loading", flush=True); time.sleep(60)'
    script = start_script(*(str(tmp_path / name) for name in ("boot", "stalled", "drain")))
    for command, ends in ((["sh", "-c", script, "engine"], True), ([], False)):
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", *command, sys.executable, "-c", loading],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        subprocess.run(["kill", "-TERM", children[0]], check=True)
        if ends:
            process.wait(20)
        else:
            time.sleep(2)
            assert process.poll() is None
        end_now(process)


LOSES_SIGNALS: str = """
import signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: (heard.append(1), len(heard) > 2 and sys.exit(0)))
print("up", flush=True)
while True: time.sleep(1)
"""
"""Loses the first two signals, as vLLM does while it loads."""


@pytest.mark.parametrize(("repeat", "ends"), [(0.2, True), (None, False)])
def test_an_engine_that_may_lose_the_signal_gets_it_again(tmp_path: Path, repeat: float | None, ends: bool) -> None:
    script = start_script(*(str(tmp_path / name) for name in ("boot", "stalled", "drain")), repeat=repeat)
    process = subprocess.Popen(
        ["sh", "-c", script, "engine", sys.executable, "-c", LOSES_SIGNALS], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    try:
        process.send_signal(signal.SIGTERM)
        if ends:
            assert process.wait(10) == 0
        else:
            time.sleep(1)
            assert process.poll() is None
    finally:
        subprocess.run(["kill", "-KILL", child], check=False, stderr=subprocess.DEVNULL)
        end_now(process)


def end_now(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    if process.stdout:
        process.stdout.close()
