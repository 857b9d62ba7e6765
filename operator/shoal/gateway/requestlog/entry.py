"""One request's line of the log: metadata; with Full also the request and its answer, redacted."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import orjson

from shoal.api.tenant import Redaction, TenantLogging
from shoal.core.redaction.content import Content
from shoal.core.redaction.rules import Refused, Rules, compile_rules
from shoal.gateway.requestlog.capture import Taken

_ANSWERED = ("content", "reasoning_content", "refusal", "tool_calls")


class Job(NamedTuple):
    """A request that ended, on its way to the writer."""

    tenant: str
    logging: TenantLogging
    meta: dict[str, Any]
    taken: Taken | None
    """None: only metadata."""
    size: int
    """What it holds of the room."""


class Refusal(NamedTuple):
    """Of a tenant's rules; `why` is for the operator's log."""

    tenant: str
    why: str


class Lines:
    """Makes lines of jobs; of the writer's thread only. Rules are compiled once."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._rules: dict[str, tuple[tuple[Redaction, ...], Rules | Refused]] = {}
        self._secrets = compile_rules(())

    def line(self, job: Job) -> tuple[bytes, Refusal | None]:
        """The line with its end, and what is wrong with the rules; where something is, the entry has no content."""
        compiled = self._compiled(job.tenant, job.logging.redact)
        refusal = None
        if isinstance(compiled, Refused):
            refusal, rules = Refusal(job.tenant, compiled.message), self._secrets
        else:
            rules = compiled
        entry = {name: value for name, value in job.meta.items() if value is not None}
        for name in ("user", "clientRequestId"):
            if (value := entry.pop(name, None)) is not None:
                redacted = rules.text(value)
                if name == "user" and (redacted != value or refusal is not None):
                    entry["userHash"] = user_hash(job.tenant, value)
                if refusal is None:
                    entry[name] = redacted
        if job.taken is not None and refusal is None:
            entry |= self._content(rules, job.taken)
        elif job.taken is not None:
            entry["leftOut"] = ["request", "answer"]
        return orjson.dumps(entry) + b"\n", refusal

    def _content(self, rules: Rules, taken: Taken) -> dict[str, Any]:
        asked, said = Content(rules, self._most), Content(rules, self._most)
        out: dict[str, Any] = {}
        if taken.request is not None:
            out["request"] = asked.request(_object(taken.request))
        choices: Sequence[Mapping[str, Any]] = taken.choices
        if taken.answer is not None:
            choices = _choices(_object(taken.answer))
        if choices:
            out["answer"] = said.answer(choices, whole=not taken.answer_cut)
        if counts := asked.counts + said.counts:
            out["redacted"] = dict(counts)
        cut = [name for name, is_cut in (("request", asked.cut), ("answer", said.cut or taken.answer_cut)) if is_cut]
        if cut:
            out["cut"] = cut
        if taken.left_out:
            out["leftOut"] = list(taken.left_out)
        return out

    def _compiled(self, tenant: str, redact: tuple[Redaction, ...]) -> Rules | Refused:
        known = self._rules.get(tenant)
        if known is not None and known[0] == redact:
            return known[1]
        try:
            compiled: Rules | Refused = compile_rules(redact)
        except Refused as refused:
            compiled = refused
        self._rules[tenant] = (redact, compiled)
        return compiled


def user_hash(tenant: str, user: str) -> str:
    """By which a user is found whose name was redacted."""
    return hashlib.sha256(f"{tenant}\0{user}".encode()).hexdigest()[:32]


def _object(raw: bytes) -> dict[str, Any]:
    try:
        decoded: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return cast(dict[str, Any], decoded) if isinstance(decoded, dict) else {}


def _choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of an answer that was no stream, in the form of those that were; what else it says is not logged."""
    out: list[dict[str, Any]] = []
    choices: object = answer.get("choices")
    if not isinstance(choices, list):
        return out
    for choice in cast(list[dict[str, Any]], choices):
        message: dict[str, Any] = choice.get("message") or {}
        logged: dict[str, Any] = {"index": choice.get("index", len(out))}
        logged |= {name: message[name] for name in _ANSWERED if message.get(name)}
        logged |= {name: choice[name] for name in ("text", "finish_reason") if isinstance(choice.get(name), str)}
        out.append(logged)
    return out
