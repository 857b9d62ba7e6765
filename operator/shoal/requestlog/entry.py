"""One request's line in the log: metadata; in mode Full also the redacted request and answer."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import orjson

from shoal.api.tenant import Redaction, TenantLogging
from shoal.core.redaction.content import Content
from shoal.core.redaction.rules import RedactionRuleRefused, Rules, compile_rules
from shoal.requestlog.capture import Captured

_ANSWERED = ("content", "reasoning_content", "refusal", "tool_calls")


class LogEntry(NamedTuple):
    """An ended request, on its way to the writer."""

    tenant: str
    logging: TenantLogging
    meta: dict[str, Any]
    taken: Captured | None
    """None: only metadata."""
    size: int
    """Bytes that the entry holds of the memory budget."""


class Refusal(NamedTuple):
    """A refused redaction rule of a tenant; `why` is for the gateway's log."""

    tenant: str
    why: str


class Lines:
    """Formats entries as lines, in the writer thread only. Rules are compiled once."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._rules: dict[str, tuple[tuple[Redaction, ...], Rules | RedactionRuleRefused]] = {}
        self._secrets = compile_rules(())

    def line(self, job: LogEntry) -> tuple[bytes, Refusal | None]:
        """The line with its newline, and the refusal of the tenant's rules; with a refusal the entry has no content."""
        compiled = self._compiled(job.tenant, job.logging.redact)
        refusal = None
        if isinstance(compiled, RedactionRuleRefused):
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

    def _content(self, rules: Rules, taken: Captured) -> dict[str, Any]:
        request, answer = Content(rules, self._most), Content(rules, self._most)
        out: dict[str, Any] = {}
        if taken.request is not None:
            out["request"] = request.request(_object(taken.request))
        choices: Sequence[Mapping[str, Any]] = taken.choices
        if taken.answer is not None:
            choices = _choices(_object(taken.answer))
        if choices:
            out["answer"] = answer.answer(choices, whole=not taken.answer_cut)
        if counts := request.counts + answer.counts:
            out["redacted"] = dict(counts)
        cut = [
            name for name, is_cut in (("request", request.cut), ("answer", answer.cut or taken.answer_cut)) if is_cut
        ]
        if cut:
            out["cut"] = cut
        if taken.left_out:
            out["leftOut"] = list(taken.left_out)
        return out

    def _compiled(self, tenant: str, redact: tuple[Redaction, ...]) -> Rules | RedactionRuleRefused:
        known = self._rules.get(tenant)
        if known is not None and known[0] == redact:
            return known[1]
        try:
            compiled: Rules | RedactionRuleRefused = compile_rules(redact)
        except RedactionRuleRefused as refused:
            compiled = refused
        self._rules[tenant] = (redact, compiled)
        return compiled


def user_hash(tenant: str, user: str) -> str:
    """The hash by which entries of a user with a redacted name are found."""
    return hashlib.sha256(f"{tenant}\0{user}".encode()).hexdigest()[:32]


def _object(raw: bytes) -> dict[str, Any]:
    try:
        decoded: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return cast(dict[str, Any], decoded) if isinstance(decoded, dict) else {}


def _choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of a non-streaming answer, in the format of streamed ones; the rest is not logged."""
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
