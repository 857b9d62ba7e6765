"""The story of a lost request: every journal's lines about it, in the order of time."""

from collections.abc import Iterator
from datetime import datetime

from tests.storm.journals import Attempt, Journals
from tests.storm.verdict import Findings, Trail, trails

_AROUND_SECONDS = 20.0
"""Faults so long before and after are part of a story."""


def stories(journals: Journals, findings: Findings, limit: int | None = None) -> Iterator[str]:
    """One text per lost request."""
    known = trails(journals)
    for id in findings.lost()[:limit]:
        attempt = journals.attempts[id]
        told = sorted(_lines(journals, attempt, known[id]))
        begin = attempt.sent
        text = "\n".join(f"  {at - begin:+9.3f}  {line}" for at, line in told)
        yield f"{id}: {findings.verdicts[id].why}\n{text}"


def _lines(journals: Journals, attempt: Attempt, trail: Trail) -> Iterator[tuple[float, str]]:
    yield attempt.sent, f"client   sends {attempt.kind} to {attempt.model} ({_clock(attempt.sent)})"
    if attempt.head is not None:
        yield attempt.head, f"client   hears status {attempt.status}"
    if attempt.first is not None:
        yield attempt.first, "client   first byte of the answer"
    if attempt.ended is not None:
        yield attempt.ended, f"client   {attempt.outcome}: {attempt.why}"
    for row in trail.rows:
        at = datetime.fromisoformat(row.at).timestamp()
        tail = (
            f", {row.outcome}, status {row.status}, {row.attempts} attempts, {row.replica}"
            if row.kind != "open"
            else ""
        )
        yield at, f"{row.gateway}   {row.kind} record of {row.request}{tail}"
    for sequence in trail.sequences:
        yield sequence.asked, f"{sequence.engine}   asked"
        if sequence.finished is not None:
            yield sequence.finished, f"{sequence.engine}   {sequence.outcome}"
    end = attempt.ended or attempt.sent
    for life in journals.lives:
        if life.engine in trail.engines:
            for at, what in ((life.started, "starts"), (life.sigterm, "SIGTERM"), (life.exiting, "exits")):
                if at is not None and attempt.sent - _AROUND_SECONDS <= at <= end + _AROUND_SECONDS:
                    yield at, f"{life.engine}   {what}"
    for at, text in journals.faults:
        if attempt.sent - _AROUND_SECONDS <= at <= end + _AROUND_SECONDS:
            yield at, f"fault    {text}"
    for scale in journals.scales:
        if scale.model == attempt.model and attempt.sent - _AROUND_SECONDS <= scale.at <= end + _AROUND_SECONDS:
            yield scale.at, f"scale    {scale.deployment} to {scale.replicas}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
