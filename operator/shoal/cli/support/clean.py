"""What is removed from objects and texts before they leave a cluster.

Logs hold what clients sent, so the patterns take time linear in any text: a repetition is bounded, gives nothing back,
or begins only where a run of characters begins.
"""

import re
from collections.abc import Callable
from typing import Any, Final, cast

REMOVED: Final = "(removed)"
_DEEPEST: Final = 64
"""Levels of an object that are kept; no object of Kubernetes has as many."""
_DROPPED: Final = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
"""Fields without information of their own. The second repeats the object as text."""
_SECRET_FIELDS: Final = frozenset({"sha256", "password", "token", "apiKey", "caBundle"})
"""Fields whose value is removed. `sha256` is the hash of a tenant's key, which would allow offline guessing."""

_KEY: Final = r"(?:api|access|private|secret|account|shoal)[ _-]?key"
_SECRET: Final = rf"(?:password|passwd|passphrase|secret|token|{_KEY}|credentials?|signature)"
"""Ends of names whose values are secret. Any prefix goes: HF_TOKEN, clientSecret, X-Amz-Signature."""
_HEADER: Final = r"(?:authorization|cookie)"
"""Ends of the names of headers whose whole value is secret, its blanks and commas included."""
_STRING_FIELD: Final = re.compile(rf"(?i)(?:password|passwd|passphrase|token|{_KEY}|client[_-]?secret|{_HEADER})\Z")
"""Ends of names of fields that are removed if they are strings. Another name that ends in `secret` names an object."""
_FLAG: Final = re.compile(rf"(?i)--?[a-z0-9_-]{{0,64}}?(?P<name>{_SECRET})\Z")

_OPENING: Final = r"""[bru]{0,2}\\{0,7}["']"""
"""An opening quote: also Python's b'...', and one in a JSON string, where backslashes precede it."""
_TO: Final = r"""\\{0,7}["']?[ \t]*+[:=][ \t]*+"""
"""Between a name and its value. A name without a value says nothing of the next line."""
_TO_ITEM: Final = rf"""\\{{0,7}}["'][ \t]*,\s{{0,64}}(?={_OPENING})"""
"""Between a name and its value, where both are items of a list."""
_FIELD: Final = r"\{\w{1,64}:[ \t]"
"""The beginning of an object in YAML: `credentials: {name: provider}`. Its fields are read one by one."""
_NO_SECRET: Final = re.compile(r"(?i)(?:null|none|true|false|\$\(\w+\)|\$\{\w+|[\[{(]+[)\]}]*)[;)\].]{0,3}")
"""Values without a secret: nothing, a switch, the name of a variable, the beginning of an object."""
_ONE_NUMBER: Final = r"-?\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?(?:[mun]?s|%)?"
_NUMBER: Final = re.compile(rf"(?i){_ONE_NUMBER}(?:,{_ONE_NUMBER})*+[;)\].]{{0,3}}")


def _quoted(n: int) -> str:
    """A string with its quotes, up to the end of its line where it does not end. `n` keeps names of groups apart."""
    plain = rf"""(?P<q{n}>["'])(?:[^\\\n"']++|\\[^\n]|(?!(?P=q{n}))["'])*+(?P=q{n})?+"""
    escaped = (
        rf"""(?P<e{n}>\\{{1,7}})(?P<f{n}>["'])"""
        rf"""(?:[^\\\n"']++|(?!(?P=e{n})(?P=f{n}))\\++["']?+|(?!(?P=f{n}))["'])*+(?:(?P=e{n})(?P=f{n}))?+"""
    )
    return rf"[bru]{{0,2}}(?:{plain}|{escaped})"


_RUN: Final = r"""(?:[^\s"',}&\\]++|,(?![\s"',}\\]|\Z|[\w.-]{1,64}+[=:])|\\(?!["']))++"""
"""A value without quotes. A comma is part of it, unless another name or a blank follows."""
_VALUE: Final = rf"(?:{_quoted(1)}|{_RUN})(?:(?<=[:=])[ \t]*+(?:{_quoted(2)}|{_RUN}))*+"
"""A string, or a run of characters. Where a run ends like a name (`token: password: x`), what follows is part of it."""
_LINE: Final = rf"""(?:{_quoted(1)}|(?:[^"'=\n\\]++|=(?:{_quoted(2)})?+|\\(?!["']))++)"""
"""A string, or the rest of a line up to a quote that does not follow `=`."""


def _hidden(found: re.Match[str]) -> str:
    """What is printed for a name and its value."""
    before, name, value = found["before"], found["name"].lower(), found["value"]
    if _NO_SECRET.fullmatch(value) or (name == "token" and _NUMBER.fullmatch(value)):
        # Keys that end in `token` are often measurements: firstToken=0.3.
        return found[0]
    opening = quote[0] if (quote := re.match(_OPENING, value)) else ""
    inner, closing = value[len(opening) :], opening.lstrip("bruBRU")
    if not closing or not inner.endswith(closing):
        closing = ""
    content = inner.removesuffix(closing)
    if not content.strip():
        return found[0]
    # The kind of a header's credentials is no secret, and tells what a client tried.
    kind = re.match(r"(?i)(?:basic|bearer) ", content) if re.fullmatch(_HEADER, name) else None
    return f"{before}{opening}{kind[0] if kind else ''}{REMOVED}{closing}"


_TEXTS: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    # A key whose end is cut off ends with the text.
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----(?:[^-]++|-(?!----))*+(?:-----END [A-Z ]{0,32}PRIVATE KEY-----)?+"
        ),
        REMOVED,
    ),
    (re.compile(r"(?<=://)[^/@\s\"']{1,512}@"), f"{REMOVED}@"),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{6,}"), f"sk-{REMOVED}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{10,}"), f"hf_{REMOVED}"),
    (re.compile(r"\b(A[KS]IA)[A-Z0-9]{12,}"), rf"\1{REMOVED}"),
    (re.compile(r"\b(gh[opsur]_|github_pat_|glpat-|xox[abeprs]-)[A-Za-z0-9_-]{10,}"), rf"\1{REMOVED}"),
    # JSON in base64: tokens of accounts, and passwords for registries.
    (re.compile(r"\beyJ[\w+/=-]{10,}+(?:\.[\w-]{4,}+){0,4}"), REMOVED),
    (re.compile(r"(?i)\b(bearer\s+)[^\s\"',]+"), rf"\1{REMOVED}"),
    (re.compile(r"(?i)([?&]sig=)[^\s\"'&]+"), rf"\1{REMOVED}"),
    (re.compile(rf"(?i)(?P<before>(?P<name>{_HEADER})(?:{_TO}|{_TO_ITEM}))(?P<value>{_LINE})"), _hidden),
    (re.compile(rf"(?i)(?P<before>(?P<name>{_SECRET}){_TO})(?!{_FIELD})(?P<value>{_VALUE})"), _hidden),
    (re.compile(rf"(?i)(?P<before>(?P<name>(?:api|shoal)-key){_TO_ITEM})(?P<value>{_VALUE})"), _hidden),
    (
        re.compile(
            rf"(?i)(?P<before>(?<![\w-])--?[a-z0-9_-]{{0,64}}?(?P<name>{_SECRET})(?:[ \t]++(?!--)|{_TO_ITEM}))"
            rf"(?P<value>{_VALUE})"
        ),
        _hidden,
    ),
)


def clean_text(text: str) -> str:
    """A log or message without credentials: user names and passwords in URLs, keys, tokens."""
    for pattern, instead in _TEXTS:
        text = pattern.sub(instead, text)
    return text


def clean(value: Any, depth: int = 0) -> Any:
    """An object without credentials. Values of environment variables are removed, whatever their names: their names
    stay."""
    if depth > _DEEPEST:
        return REMOVED
    match value:
        case dict():
            return _object(cast("dict[str, Any]", value), depth)
        case list():
            return _items(cast("list[Any]", value), depth)
        case str():
            return clean_text(value)
        case _:
            return value


def _object(fields: dict[str, Any], depth: int) -> dict[str, Any]:
    kept = {name: _field(name, each, depth) for name, each in fields.items() if name not in _DROPPED}
    name, value = kept.get("name"), kept.get("value")
    if isinstance(name, str) and isinstance(value, str) and _STRING_FIELD.search(name):
        kept["value"] = REMOVED  # a header of a probe, a parameter
    return kept


def _items(items: list[Any], depth: int) -> list[Any]:
    """The items of a list; of a command line, without the values of flags such as --api-key."""
    kept: list[Any] = []
    flag: re.Match[str] | None = None
    for each in items:
        if flag is not None and isinstance(each, str) and not each.startswith("--"):
            number = flag["name"].lower() == "token" and _NUMBER.fullmatch(each)
            kept.append(each if number or _NO_SECRET.fullmatch(each) else REMOVED)
        else:
            kept.append(clean(each, depth + 1))
        flag = _FLAG.match(each) if isinstance(each, str) else None
    return kept


def _field(name: str, value: Any, depth: int) -> Any:
    if name in _SECRET_FIELDS or (isinstance(value, str) and _STRING_FIELD.search(name)):
        return REMOVED
    if name == "env":
        return _environment(value, depth)
    return clean(value, depth + 1)


def _environment(value: Any, depth: int) -> Any:
    """Of a container (a list of name and value), or of a Model (name -> value)."""
    match value:
        case list():
            items = [clean(each, depth + 1) for each in cast("list[Any]", value)]
            return [each | {"value": REMOVED} if isinstance(each, dict) and "value" in each else each for each in items]
        case dict():
            return dict.fromkeys(cast("dict[str, Any]", value), REMOVED)
        case _:
            return REMOVED
