"""The termination message of a Job that reads a batch of adapters, written by the Job and read by the operator.

A kubelet cuts a termination message at 4096 bytes. To keep it short, shapes are listed once, since adapters of one pool
mostly have the same. Results that do not fit are left out, and another Job reads these adapters.
    {"shapes": [{"modules": {"q_proj": [4096, 4096]}, "layers": 32, "targets": ["q_proj"], "base": "llama"}],
     "adapters": [{"key": "...", "revision": "<64 hex digits>", "rank": 16, "alpha": 32, "bytes": 27262976,
                   "files": 27263500, "shape": 0},
                  {"key": "...", "reason": "RankTooHigh", "message": "..."}]}
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from shoal.api import reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.core.artifacts import CONTAINER
from shoal.core.facts import Pod
from shoal.core.status.observed import ModelProblem

LIMIT_BYTES: Final = 4096
"""A kubelet cuts off longer termination messages."""
_MESSAGES: Final = (600, 300, 150, 80)
"""Characters of one result's message: the longest with which all results fit is used."""

Result = AdapterFacts | ModelProblem


def job_name(pool: str, reads: Iterable[str]) -> str:
    """Name of the Job of a pool that reads a batch with these read keys; equal batches have equal names."""
    said = "\0".join((pool, *sorted(reads)))
    return f"adapter-facts-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


# --- writing --------------------------------------------------------------------------------------------------------


def message(results: Sequence[tuple[str, Result]]) -> str:
    """The termination message of a batch: (key, result) in the order of the batch."""
    for length in _MESSAGES:
        if len((text := _text(results, length)).encode()) <= LIMIT_BYTES:
            return text
    shown = [(key, _sayable(key, result)) for key, result in results]
    while len(shown) > 1 and len(_text(shown, _MESSAGES[-1]).encode()) > LIMIT_BYTES:
        shown.pop()
    return _text(shown, _MESSAGES[-1])


def _sayable(key: str, result: Result) -> Result:
    """The result, or an error in its place if its row alone is too long for a message."""
    if len(_text([(key, result)], _MESSAGES[-1]).encode()) <= LIMIT_BYTES:
        return result
    return ModelProblem(reasons.UNSUPPORTED, "it changes more modules than can be told")


def _text(results: Sequence[tuple[str, Result]], length: int) -> str:
    shapes: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for key, result in results:
        if isinstance(result, ModelProblem):
            rows.append({"key": key, "reason": result.reason, "message": result.message[:length]})
            continue
        shape = {"modules": result.modules, "layers": result.layers, "targets": result.targets, "base": result.base}
        if shape not in shapes:
            shapes.append(shape)
        row: dict[str, Any] = {
            "key": key,
            "revision": result.revision.removeprefix("sha256:"),
            "commit": result.commit,
            "rank": result.rank,
            "alpha": int(result.alpha) if result.alpha == int(result.alpha) else result.alpha,
            "bytes": result.size_bytes,
            "files": result.file_bytes,
            "token": result.added_token,
            "shape": shapes.index(shape),
        }
        rows.append({name: value for name, value in row.items() if value is not None})
    text = json.dumps({"shapes": shapes, "adapters": rows}, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace").decode()  # a file's name may hold bytes that are not UTF-8


# --- reading --------------------------------------------------------------------------------------------------------


def results(pod: Pod) -> dict[str, Result]:
    """Results in the message of a Job's pod, by key; empty while it runs, and if it ended without a message."""
    container = pod.container(CONTAINER)
    if container is None or container.exit_code is None:
        return {}
    return parse(container.exit_message or "")


def parse(text: str) -> dict[str, Result]:
    """Results in a termination message, by key; rows that do not parse are left out."""
    try:
        content = json.loads(text)
        shapes, rows = list(content["shapes"]), list(content["adapters"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    found: dict[str, Result] = {}
    for row in rows:
        try:
            found[str(row["key"])] = _result(cast("dict[str, Any]", row), shapes)
        except (ValueError, KeyError, TypeError, IndexError, ArithmeticError):
            continue
    return found


def _result(row: dict[str, Any], shapes: list[Any]) -> Result:
    if "reason" in row:
        reason = str(row["reason"])
        return ModelProblem(reason if reason in reasons.ADAPTER_REASONS else reasons.STAGE_FAILED, str(row["message"]))
    shape = shapes[int(row["shape"])]
    return AdapterFacts.model_validate(
        {
            "revision": f"sha256:{row['revision']}",
            "commit": row.get("commit"),
            "rank": row["rank"],
            "alpha": row["alpha"],
            "sizeBytes": row["bytes"],
            "fileBytes": row["files"],
            "addedToken": row.get("token"),
            "modules": shape["modules"],
            "layers": shape["layers"],
            "targets": shape["targets"],
            "base": shape["base"],
        }
    )
