"""A tenant's redaction rules: which of them are refused and why, and applying them to a text.

All rules are applied to the same text, and every match is redacted, so no rule can spoil a match of another one. The
rule for secrets is always included.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.api.tenant import Redaction, TenantLogging
from shoal.core.redaction.patterns import BUILTIN, Finder, Pattern, PatternInvalid, Span, compiled, tokens, views

SECRET: Final = "Secret"  # noqa: S105 - a rule's name
MOST_MATCHES: Final = 2_000
"""Matches of one rule in one text. From the next one on, the rest of the text is redacted as a whole: some patterns
need a pass over the text per match."""
_SAMPLES: Final = (b"", b"a", b"a b.\n-1_\t[x]\n")
"""A pattern that can match the empty string does so in one of these."""
_LITERAL_RUN: Final = re.compile(r"[A-Za-z0-9+/_]{16,}")


class RedactionRuleRefused(Exception):
    """A rule that is not used. The message names the rule, says why and what to do; it contains neither the pattern nor
    a name that is itself a secret."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message


@dataclass(frozen=True, slots=True)
class RedactionRule:
    name: str
    find: Finder


@dataclass(frozen=True, slots=True)
class Rules:
    """Compiled rules; the one for secrets is first."""

    rules: tuple[RedactionRule, ...]

    def text(self, text: str, counts: Counter[str] | None = None, *, leave: int = 0) -> str:
        """The text with `[name]` in place of each match; `counts` gets the number of matches by rule. The last `leave`
        characters are searched and dropped: for a text that is cut off, whose last match may be incomplete.
        """
        raw = text.encode(errors="replace")
        end_of_all = len(raw) - len(text[-leave:].encode(errors="replace")) if leave else len(raw)
        searched = views(raw)
        spans = sorted(
            (start, -end, place)
            for place, rule in enumerate(self.rules)
            for view in searched
            for start, end in _bounded(rule.find(view), len(raw))
            if start < end and start < end_of_all
        )
        if not spans and not leave:
            return text
        out: list[bytes] = []
        at = 0
        for start, end, place in _merged(spans):
            name = self.rules[place].name
            out += (raw[at:start], b"[", name.encode(), b"]")
            at = end
            if counts is not None:
                counts[name] += 1
        out.append(raw[at:end_of_all])
        return b"".join(out).decode(errors="replace")


def _bounded(spans: Iterable[Span], length: int) -> Iterator[Span]:
    for number, (start, end) in enumerate(spans):
        if number >= MOST_MATCHES:
            yield start, length
            return
        yield start, end


def _merged(spans: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Joins overlapping spans, given as sorted (start, -end, rule); the first rule names the result."""
    if not spans:
        return
    start, end, place = spans[0][0], -spans[0][1], spans[0][2]
    for first, last, rule in spans[1:]:
        if first < end:
            end, place = max(end, -last), min(place, rule)
        else:
            yield start, end, place
            start, end, place = first, -last, rule
    yield start, end, place


def compile_rules(redact: Sequence[Redaction]) -> Rules:
    """A tenant's rules and the one for secrets. Raises RedactionRuleRefused for the first that must not be used."""
    rules = [RedactionRule(SECRET, BUILTIN[SECRET]), *map(_rule, redact)]
    for number, rule in enumerate(rules):
        _check_name(rule, number)
    for rule in rules[::-1]:
        _check_terms(rule, rules)
    return Rules(tuple(rules))


def refusals(logging: TenantLogging) -> tuple[str, ...]:
    """Why rules of a tenant must not be used, one sentence each; empty: all may. While there is one, the gateway logs
    only metadata of this tenant, no prompts and answers."""
    found: list[str] = []
    usable: list[Redaction] = []
    for rule in logging.redact:
        try:
            compile_rules((rule,))
        except RedactionRuleRefused as refused:
            found.append(refused.message)
        else:
            usable.append(rule)
    if not found:
        try:
            compile_rules(usable)
        except RedactionRuleRefused as refused:
            found.append(refused.message)
    return tuple(found)


def _rule(rule: Redaction) -> RedactionRule:
    name = rule.name
    if rule.builtin is not None:
        return RedactionRule(name, BUILTIN[rule.builtin])
    pattern = (rule.pattern or "").encode()
    if any(True for _ in tokens(pattern)) or _is_literal_secret(rule.pattern or ""):
        raise RedactionRuleRefused(
            name,
            f"redaction rule {name!r}: its pattern holds what looks like a secret itself, and a Tenant is readable to "
            "others: write the form of such secrets, as in acme-[a-z0-9]{20,}, and rotate this one",
        )
    try:
        regexp = compiled(pattern)
    except PatternInvalid as invalid:
        # RE2 quotes the faulty part of the pattern; only the text before the quote may be shown.
        raise RedactionRuleRefused(
            name,
            f"redaction rule {name!r}: its pattern is no RE2 expression ({str(invalid).partition(':')[0]}): "
            "see github.com/google/re2/wiki/Syntax; it has no look-around and no back-references",
        ) from None
    if any(start == end for sample in _SAMPLES for start, end in _spans(regexp, sample)):
        raise RedactionRuleRefused(
            name,
            f"redaction rule {name!r}: its pattern matches the empty string, so it takes nothing out there: let it "
            "match at least one character (+ instead of *)",
        )
    return RedactionRule(name, lambda text: _spans(regexp, text))


def _spans(regexp: Pattern, text: bytes) -> Iterator[Span]:
    return (match.span() for match in regexp.finditer(text))


def _is_literal_secret(pattern: str) -> bool:
    """Whether the pattern contains a long literal run of letters and digits."""
    for run in _LITERAL_RUN.findall(pattern):
        if sum(c.isdigit() for c in run) >= 3 and sum(c.isalpha() for c in run) >= 3:
            return True
    return False


def _check_name(rule: RedactionRule, number: int) -> None:
    """Refuses a rule whose placeholder is itself a match: the name would then be written although it is secret."""
    placeholder = f"[{rule.name}]".encode()
    if _finds(rule, placeholder) or any(any(find(placeholder)) for find in BUILTIN.values()):
        raise RedactionRuleRefused(
            rule.name,
            f"redaction rule number {number}: what it takes out is replaced by the rule's name, and that name is "
            "itself something to take out, so it would be written all the same: choose another name",
        )


def _check_terms(rule: RedactionRule, rules: Sequence[RedactionRule]) -> None:
    """Refuses rules that match the placeholder of `rule`."""
    placeholder = f"[{rule.name}]".encode()
    for other in rules:
        if other is not rule and _finds(other, placeholder):
            raise RedactionRuleRefused(
                other.name,
                f"redaction rule {other.name!r}: its pattern also matches [{rule.name}], which stands for what rule "
                f"{rule.name!r} took out: write a narrower pattern (to log no text at all, set logging.mode to "
                "Metadata)",
            )


def _finds(rule: RedactionRule, text: bytes) -> bool:
    return any(end > start for start, end in rule.find(text))
