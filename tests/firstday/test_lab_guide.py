"""docs/lab.md and README.md, step by step, as they are written there: from nothing to an answer and a bill. After it, a
customer with a limit."""

import os
import re
import subprocess
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from shoal_dev.lab import api
from tests.firstday.pages import ROOT, commands, lines, marked, times

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

BEGIN = """set -euo pipefail
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
"""
AFTER_THE_ANSWER = "kill %1"
AFTER_THE_BILL = "kubectl shoal -n demo why"
"""The lines that follow them on the page."""
LIMITED = """
kubectl apply -f - <<'YAML'
apiVersion: shoal.dev/v1alpha1
kind: Tenant
metadata: {name: limited}
spec:
  keys: [{name: first, sha256: HASH}]
  models: [{namespace: chat, name: qwen-0-5b}]
  limits: {requestsPerMinute: LIMIT}
YAML
for pod in 0 1; do
  kubectl -n shoal-system port-forward "pod/shoal-gateway-$pod" "$((8090 + pod)):8080" > /dev/null &
done
for port in 8090 8091; do
  listed="http://127.0.0.1:$port/v1/models"
  until curl -sf -H "Authorization: Bearer KEY" "$listed" | grep qwen-0-5b > /dev/null; do sleep 0.2; done
done
for i in $(seq 0 LIMIT); do
  curl -s -o /dev/null -w 'limited %{http_code}\\n' "http://127.0.0.1:$((8090 + i % 2))/v1/chat/completions" \\
    -H "Authorization: Bearer KEY" \\
    -d '{"model": "qwen-0-5b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'
done
"""
"""One request after the other, in turns at both gateways: as many as the limit, and one more."""
LIMIT, KEY = 8, "sk-limited"
PROGRAMS = 'export PATH="$PWD/.venv/bin:$PATH"\n'


def bash(script: str, state: Path, seconds: float) -> "subprocess.CompletedProcess[str]":
    """Runs it in the checkout, with a lab of its own beside other labs."""
    return subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=os.environ | {"XDG_STATE_HOME": str(state)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def of_the_readme(folder: Path) -> str:
    """The commands of README.md that need Shoal in a cluster. Replaced is what a lab lacks: weights from the internet,
    and a person who ends a command that runs on."""
    _, ask, look, customers = commands("README.md", "## On your GPU cluster")
    (plan,) = commands("README.md", "## Before you apply")
    replaced = {
        "hf://Qwen/Qwen2.5-0.5B-Instruct": "file:///opt/shoal/models/tiny-chat",
        "patch.yaml": str(folder / "patch.yaml"),
        "fleet.yaml": str(folder / "fleet.yaml"),
        "model.yaml": str(folder / "model.yaml"),
        "--month 2026-11": f"--month {datetime.now(UTC):%Y-%m}",
        "--timeout=30m": "--timeout=5m",
        "uv tool install": ": uv tool install",
        "status -A -w": "status -A",
    }
    written = f"kubectl -n chat get model qwen-0-5b -o yaml > {folder / 'model.yaml'}\n"
    script = "\n".join((ask, look, customers))
    for text, instead in replaced.items():
        assert text in script + plan, f"README.md has no {text!r} any more"
        script, plan = script.replace(text, instead), plan.replace(text, instead)
    return script + written + plan


def limited() -> str:
    script = LIMITED.replace("HASH", sha256(KEY.encode()).hexdigest())
    return script.replace("LIMIT", str(LIMIT)).replace("KEY", KEY)


def test_the_guide_leads_from_nothing_to_a_bill(tmp_path: Path) -> None:
    api.require_root()
    install, ask, end = commands("docs/lab.md", "## Shoal in the lab, step by step")
    # What `make` makes is there already: it made the environment of these tests.
    steps = marked(ask, ("answered", AFTER_THE_ANSWER), ("billed", AFTER_THE_BILL))
    install_here = install.replace("make setup models", "true")
    guide = (BEGIN, install_here, "echo == installed", steps, "echo == readme", of_the_readme(tmp_path))
    script = "\n".join((*guide, "echo == limited", limited()))
    for name in ("lab.env", "forward.log"):
        script = script.replace(name, str(tmp_path / name))
    began = time.time()
    try:
        done = bash(script, tmp_path / "state", 800)
    finally:
        down = bash(PROGRAMS + end, tmp_path / "state", 90)
    assert done.returncode == 0, done.stdout + done.stderr
    entered = lines(install + ask)
    for mark, what, after in (("answered", "the first answer", AFTER_THE_ANSWER), ("billed", "a bill", AFTER_THE_BILL)):
        count = next(i for i, line in enumerate(entered) if line.startswith(after))
        print(f"from nothing to {what}: {count} commands, {times(done.stdout)[mark] - began:.0f} s")
    _, _, after = done.stdout.partition("== installed\n")
    answered, _, then = after.partition("== readme\n")
    readme, _, statuses = then.partition("== limited\n")
    codes = re.findall(r"^limited (\d+)$", statuses, re.MULTILINE)
    print(f"429s of a sequential client at its limit: {codes[:LIMIT].count('429')}")
    assert answered.startswith("ok\n")
    assert '"choices"' in answered
    assert "acme" in answered
    assert "Total: 0." in answered
    assert "demo/tiny-chat: 1 wanted, 1 ready" in answered
    assert '"choices"' in readme
    assert "chat/qwen-0-5b: 1 wanted, 1 ready" in readme
    assert "op: add" in (tmp_path / "patch.yaml").read_text()
    assert "tiny-chat" in readme, "what the customer used"
    assert "Total: 0." in readme
    assert "kind: Deployment" in readme
    assert codes == [*["200"] * LIMIT, "429"]
    assert down.returncode == 0, down.stderr
    assert not list((tmp_path / "state").glob("shoal/lab/default/state.json"))
