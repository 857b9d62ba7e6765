"""Built-in patterns. They find the spans to redact in a text, as offsets in its UTF-8. Request logs use all of them,
support bundles the forms of keys.

All patterns are RE2's, so no text makes one slow. What a pattern cannot express (a card's check digit, whether an IPv6
address is valid) is checked afterwards. In doubt a match is redacted.
"""

import ipaddress
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import re2  # pyright: ignore[reportMissingTypeStubs]

from shoal.core.redaction.keyblocks import key_blocks

Span = tuple[int, int]
Finder = Callable[[bytes], Iterable[Span]]


class Match(Protocol):
    def span(self, group: int = 0, /) -> Span: ...
    def group(self, group: int = 0, /) -> bytes: ...


class Pattern(Protocol):
    """The used part of a compiled pattern."""

    def finditer(self, text: bytes, /) -> Iterator[Match]: ...
    def search(self, text: bytes, /) -> Match | None: ...


class PatternInvalid(ValueError):
    """A pattern is not in RE2's syntax, or too large; the message says why."""


_MEMORY: Final = 8 << 20
"""Bytes of memory for one pattern, including its automata."""


def compiled(pattern: bytes) -> Pattern:
    """A compiled RE2 pattern. Raises PatternInvalid."""
    engine = cast(Any, re2)
    options = engine.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    try:
        # Not through re2's own cache, which would keep patterns of tenants that are gone.
        return cast(Pattern, engine.compile(pattern, options))
    except engine.error as error:
        why = error.args[0] if error.args else b""
        raise PatternInvalid(why.decode(errors="replace") if isinstance(why, bytes) else str(why)) from None


# --- secrets --------------------------------------------------------------------------------------------------------

_WORD: Final = "[A-Za-z0-9_-]"


@dataclass(frozen=True, slots=True)
class TokenForm:
    """A form of keys and tokens: a word that begins with `prefix`, and `rest`. Both are RE2 expressions that Python's
    `re` understands too."""

    prefix: str
    rest: str = f"{_WORD}{{16,}}"
    digit: bool = False
    """Whether `rest` has a digit: sk-learn-compatible-estimators is no key."""
    shorter: str | None = None
    """A rest that only a key has in what programs write: shorter, or without a digit."""
    prompts_only: bool = False
    """Whether objects have such names (shoal-gateway-7d9f8b6c5d-x2x4z): a key in a prompt, not in a log."""


TOKEN_FORMS: Final[tuple[TokenForm, ...]] = (
    TokenForm("sk-", digit=True, shorter=f"{_WORD}{{6,}}"),  # OpenAI, Anthropic, LiteLLM and their like, Shoal
    TokenForm("(?:pk|rk)-", digit=True),
    TokenForm("(?:sk|pk|rk)_(?:live_|test_)?", "[A-Za-z0-9_]{16,}", digit=True),  # Stripe
    TokenForm("shoal-", digit=True, prompts_only=True),
    TokenForm("shoal_", "[A-Za-z0-9_]{16,}", digit=True, prompts_only=True),
    TokenForm("(?:AKIA|ASIA|ABIA|ACCA)", "[A-Z0-9]{12,}"),  # AWS
    TokenForm("gh[pousr]_", "[A-Za-z0-9]{16,}", shorter=f"{_WORD}{{10,}}"),
    TokenForm("github_pat_", "[A-Za-z0-9_]{16,}", shorter=f"{_WORD}{{10,}}"),
    TokenForm("gl(?:pat|dt|rt|cbt|ptt|soat)-", shorter=f"{_WORD}{{10,}}"),  # GitLab
    TokenForm("(?:xox[a-z]|xapp)-", "[A-Za-z0-9-]{10,}", shorter=f"{_WORD}{{10,}}"),  # Slack
    TokenForm(r"hooks\.slack\.com/(?:services|workflows|triggers)/", "[A-Za-z0-9/_-]+"),
    TokenForm("(?:AIza|GOCSPX-)"),  # Google
    TokenForm(r"ya29\.", rf"(?:[a-z]\.)?{_WORD}{{16,}}"),
    TokenForm("hf_", "[A-Za-z0-9]{30,}", shorter="[A-Za-z0-9]{10,}"),  # Hugging Face: mostly without a digit
    TokenForm("(?:hf|fw|r8|npm)_", digit=True),
    TokenForm("(?:hf|fw|r8|npm)-", digit=True, prompts_only=True),
    TokenForm("(?:dop_v1|gsk|glsa)_"),
    TokenForm("(?:dop_v1|gsk|glsa)-", prompts_only=True),
    TokenForm("(?:pplx|nvapi|tvly)[_-]"),
    TokenForm("dckr_pat_"),
    TokenForm("pypi-", digit=True),
    TokenForm(r"SG\.", rf"{_WORD}{{16,}}(?:\.{_WORD}+)?"),  # SendGrid
    TokenForm(r"hvs\."),  # Vault
    # JSON in base64: web tokens, and passwords for registries.
    TokenForm("", r"eyJ[A-Za-z0-9_+/=-]{10,}(?:\.[A-Za-z0-9_-]*){0,4}"),
)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """All forms, of which some need a digit."""

    certain: Pattern
    with_digit: Pattern
    key_blocks: Finder

    @classmethod
    def of(cls, certain: Iterable[str], with_digit: Iterable[str], key_blocks: Finder) -> "_Tokens":
        one, other = (compiled("|".join(rf"\b{form}" for form in forms).encode()) for forms in (certain, with_digit))
        return cls(one, other, key_blocks)

    def find(self, text: bytes) -> Iterator[Span]:
        yield from (match.span() for match in self.certain.finditer(text))
        for match in self.with_digit.finditer(text):
            if any(48 <= byte <= 57 for byte in match.group()[3:]):
                yield match.span()
        yield from self.key_blocks(text)


def _key_blocks(text: bytes) -> Iterator[Span]:
    """Private keys in a prompt or an answer. One without its end is redacted to the end of the text: in doubt too
    much."""
    return (match.span() for match in _KEY_BLOCK.finditer(text))


_KEY_BLOCK: Final = compiled(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?s:.*?)"
    rb"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\z)"
)
_IN_PROMPTS: Final = _Tokens.of(
    (form.prefix + form.rest for form in TOKEN_FORMS if not form.digit),
    (form.prefix + form.rest for form in TOKEN_FORMS if form.digit),
    _key_blocks,
)
_IN_LOGS: Final = _Tokens.of(
    (
        form.prefix + (form.shorter or form.rest)
        for form in TOKEN_FORMS
        if not form.prompts_only and (form.shorter or not form.digit)
    ),
    (form.prefix + form.rest for form in TOKEN_FORMS if not form.prompts_only and form.digit and not form.shorter),
    key_blocks,
)
_PREFIX: Final = re.compile("|".join(form.prefix for form in TOKEN_FORMS if form.prefix).encode())
_QUOTE: Final = rb"[\\]{0,4}[\"'`]?"
_PLACES: Final = (
    # By place: after a name that announces a secret, in a header, in a URL.
    compiled(
        rb"(?i)(?:api[_ -]?key|apikey|access[_ -]?key|secret[_ -]?key|private[_ -]?key|client[_ -]?secret|secret"
        rb"|(?:subscription|functions)[_-]key"
        rb"|(?:auth|access|refresh|bearer|session|api)[_ -]?token|token|password|passwd|passphrase|pwd)"
        + _QUOTE
        + rb"\s{0,8}(?::=|=>|[:=])\s{0,8}"
        + _QUOTE
        + rb"([^\s\"'`,;\\<>{}\[\]()]{6,})"
    ),
    compiled(rb"(?i)\b(?:bearer|basic|digest|apikey)[ \t]{1,8}([A-Za-z0-9._~+/=-]{12,})"),
    compiled(rb"(?i)\b[a-z][a-z0-9+.-]{1,30}://[^\s/:@\"']{0,256}:([^\s/@\"']{1,256})@"),
)
_CURL: Final = compiled(
    rb"(?i)\bcurl\b(?:[^\n;|`]|\\\n)*?[ \t](?:-u|--user|--proxy-user)[ \t=]{1,8}[\"']?"
    rb"([^\s:\"'$<{]{1,128}):([^\s\"'$<{/][^\s\"']*)"
)
_ESCAPED: Final = re.compile(rb"\\+(?:[abfnrtv\"'/]|[ux][0-9A-Fa-f]{2,4})|%[0-9A-Fa-f]{2}")


def views(text: bytes) -> tuple[bytes, ...]:
    """The text, and where it has escapes, the text with blanks in their place: in `\\nsk-...` the key is no word
    `nsk`. Offsets are the same in all."""
    if b"\\" not in text and b"%" not in text:
        return (text,)
    return text, _ESCAPED.sub(lambda match: b" " * len(match[0]), text)


def tokens(text: bytes) -> Iterator[Span]:
    """Keys and tokens in a prompt or an answer, recognised by their own form."""
    return _IN_PROMPTS.find(text)


def tokens_in_logs(text: bytes) -> Iterator[tuple[int, int, int]]:
    """Keys and tokens in what programs write: start, end of the prefix that tells the kind of key, end."""
    for start, end in _IN_LOGS.find(text):
        prefix = _PREFIX.match(text, start, end)
        yield start, prefix.end() if prefix else start, end


def secret(text: bytes) -> Iterator[Span]:
    """Keys and tokens, recognised by form or by place."""
    yield from tokens(text)
    for pattern in _PLACES:
        yield from (match.span(1) for match in pattern.finditer(text))
    for match in _CURL.finditer(text):
        if not (match.group(1) + match.group(2)).isdigit():  # -u 1000:1000 is an option of another program
            yield match.span(2)


# --- persons --------------------------------------------------------------------------------------------------------

_EMAIL: Final = compiled(
    rb"[\p{L}\p{N}.!#$%&'*+/=?^_`{|}~-]+(?:@|%40|\(at\)|\[at\])[\p{L}\p{N}-]+(?:\.[\p{L}\p{N}-]+)+"
)
_SEPARATOR: Final = rb"(?:[ .\-\x{a0}\x{2009}\x{202f}\x{2010}-\x{2015}]{1,2})"
_DIGITS: Final = compiled(rb"[0-9](?:" + _SEPARATOR + rb"?[0-9]){11,}")
_GROUP: Final = re.compile(rb"[0-9]+")
_CARD: Final = re.compile(rb"4|5[0-9]|2[2-7]|3[04-9]|6")
_CARD_DIGITS: Final = range(12, 20)
_MOST_GROUPS: Final = 8
_IPV4: Final = compiled(rb"(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])(?:\.(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])){3}")
_IPV6: Final = compiled(rb"(?:[0-9A-Fa-f]{0,4}:){2,8}(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9A-Fa-f]{0,4})")
_GROUP_OF_HEX: Final = re.compile(rb"[0-9A-Fa-f]+")
_GAP: Final = rb"[ \t()./\-\x{a0}\x{2010}-\x{2013}]"
_PHONES: Final = (
    compiled(rb"(?:\+|\b00)[0-9](?:" + _GAP + rb"{0,3}[0-9]){6,14}"),
    compiled(rb"\(?\b[2-9][0-9]{2}\)?" + _GAP + rb"{1,2}[0-9]{3}" + _GAP + rb"[0-9]{4}\b"),
    compiled(rb"(?:\b|\()0[1-9][0-9]{0,4}" + _GAP + rb"{1,3}[0-9]{2,}(?:" + _GAP + rb"[0-9]{2,}){0,4}"),
)
_PHONE_DIGITS: Final = range(7, 16)


def email(text: bytes) -> Iterator[Span]:
    """E-mail addresses, also with `%40` or `(at)`."""
    return (match.span() for match in _EMAIL.finditer(text))


def card(text: bytes) -> Iterator[Span]:
    """Numbers of 12 to 19 digits that begin like card numbers and whose check digit is right (ISO/IEC 7812-1, annex B),
    in groups or not. In a longer row of groups, each run of whole groups is tried."""
    for match in _DIGITS.finditer(text):
        start = match.span()[0]
        groups = [(found.start() + start, found.end() + start) for found in _GROUP.finditer(match.group())]
        at = 0
        while at < len(groups):
            for last in range(min(len(groups), at + _MOST_GROUPS) - 1, at - 1, -1):
                digits = b"".join(text[first:end] for first, end in groups[at : last + 1])
                if len(digits) in _CARD_DIGITS and _CARD.match(digits) and _luhn(digits):
                    yield groups[at][0], groups[last][1]
                    at = last
                    break
            at += 1


def _luhn(digits: bytes) -> bool:
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = (digit - 48) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def address(text: bytes) -> Iterator[Span]:
    """IPv4 and IPv6 addresses."""
    yield from (match.span() for match in _IPV4.finditer(text))
    for match in _IPV6.finditer(text):
        start, end = match.span()
        found = match.group()
        # A colon that only precedes or follows the address ("at:2001:db8::1", "::1:") is not part of it.
        for first, last in itertools.product((0, 1), (0, 1)):
            part = found[first : len(found) - last]
            if part and _is_ipv6(part) and not _inside_word(text, start + first, end - last, part):
                yield start + first, end - last
                break


def _inside_word(text: bytes, start: int, end: int, part: bytes) -> bool:
    """Whether the match is part of a word: std::vector contains `d::`, which would be an address."""
    around = text[start - 1 : start] + text[end : end + 1]
    return any(chr(byte).isalnum() for byte in around) and len(_GROUP_OF_HEX.findall(part)) < 3


def _is_ipv6(part: bytes) -> bool:
    if part == b"::":
        return False
    try:
        ipaddress.IPv6Address(part.decode("ascii"))
    except ValueError:
        return False
    return True


def phone(text: bytes) -> Iterator[Span]:
    """Phone numbers of 7 to 15 digits (ITU-T E.164) that are recognisable: by `+` or `00`, by a trunk prefix `0` with
    groups after it, or in the North American form 555-555-0100."""
    for pattern in _PHONES:
        for match in pattern.finditer(text):
            if sum(48 <= byte <= 57 for byte in match.group()) - 2 * match.group().startswith(b"00") in _PHONE_DIGITS:
                yield match.span()


BUILTIN: Final[Mapping[str, Finder]] = {
    "Secret": secret,
    "Email": email,
    "CreditCard": card,
    "IPAddress": address,
    "PhoneNumber": phone,
}
