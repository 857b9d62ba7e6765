"""What is removed from objects and texts before they leave a cluster.

Keys are recognised by the forms that request logs know (core/redaction/patterns.py), and here by names and places.

Logs hold what clients sent, so the patterns take time linear in any text: a repetition is bounded, gives nothing back,
or begins only where a run of characters begins.
"""

import re
from collections.abc import Callable
from typing import Any, Final, cast

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core.redaction.patterns import tokens_in_logs, views

REMOVED: Final = "(removed)"
_DEEPEST: Final = 64
"""Levels of an object that are kept; no object of Kubernetes has as many."""
_DROPPED: Final = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
"""Fields without information of their own. The second repeats the object as text."""
_OWN_NOTES: Final = (f"{names.GROUP}/", "app.kubernetes.io/", "helm.sh/", "meta.helm.sh/")
"""Prefixes of the labels and annotations of a Tenant that are kept."""
_SECRET_FIELDS: Final = frozenset({"sha256", "password", "token", "apiKey", "caBundle"})
"""Fields whose value is removed. `sha256` is the hash of a tenant's key, which would allow offline guessing."""

_KEY: Final = r"(?:api|access|private|secret|account|shoal|subscription|functions)[ _-]?key"
_PASSWORDS: Final = r"(?:password|passwd|passphrase|pwd|(?<![a-z])pass|(?-i:(?<=[a-z])Pass))"
"""Of `pass` only a whole word, as in DB_PASS and dbPass: not bypass."""
_SECRET: Final = rf"(?:{_PASSWORDS}|secret|token|{_KEY}|credentials?|signature)"
"""Ends of names whose values are secret. Any prefix goes: HF_TOKEN, clientSecret, X-Amz-Signature."""
_HEADER: Final = r"(?:authorization|cookie)"
"""Ends of the names of headers whose whole value is secret, its blanks and commas included."""
_STRING_FIELD: Final = re.compile(rf"(?i)(?:{_PASSWORDS}|token|{_KEY}|client[_-]?secret|{_HEADER})\Z")
"""Ends of names of fields that are removed if they are strings. Another name that ends in `secret` names an object."""
_USER_FLAG: Final = r"(?:-u|--user|--proxy-user)"
"""Flags of curl before USER:PASSWORD; of other programs before ids."""
_USER: Final = r"(?!\d{1,10}:\d{1,10}(?!\S))[^\s:\"'\\]{1,256}:(?!//)"
_USER_AND_PASSWORD: Final = re.compile(rf"\A({_USER})(?!\$[({{]).+\Z", re.DOTALL)
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
    (re.compile(r"(?<=://)[^/@\s\"']{1,512}@"), f"{REMOVED}@"),
    (re.compile(r"(?i)\b(bearer\s+)[^\s\"',]+"), rf"\1{REMOVED}"),
    (re.compile(r"(?i)([?&]sig=)[^\s\"'&]+"), rf"\1{REMOVED}"),
    (re.compile(rf"(?i)(?P<before>(?P<name>{_HEADER})(?:{_TO}|{_TO_ITEM}))(?P<value>{_LINE})"), _hidden),
    (re.compile(rf"(?i)(?P<before>(?P<name>{_SECRET}){_TO})(?!{_FIELD})(?P<value>{_VALUE})"), _hidden),
    (
        re.compile(rf"(?i)(?P<before>(?P<name>(?:api|shoal|subscription|functions)-key){_TO_ITEM})(?P<value>{_VALUE})"),
        _hidden,
    ),
    (
        re.compile(
            rf"(?i)(?P<before>(?<![\w-])--?[a-z0-9_-]{{0,64}}?(?P<name>{_SECRET})(?:[ \t]++(?!--)|{_TO_ITEM}))"
            rf"(?P<value>{_VALUE})"
        ),
        _hidden,
    ),
    (
        re.compile(
            rf"(?i)(?P<before>(?<![\w-])(?P<name>{_USER_FLAG})(?:[ \t]++|=|{_TO_ITEM})"
            rf"(?:[bru]{{0,2}}\\{{0,7}}(?P<quote>[\"']))?{_USER})"
            r"(?P<value>(?(quote)(?:(?!(?P=quote))[^\n\\])++|[^\s\"'\\]++))"
        ),
        _hidden,
    ),
)


def clean_text(text: str) -> str:
    """A log or message without credentials: user names and passwords in URLs, keys, tokens."""
    text = _without_tokens(text)
    for pattern, instead in _TEXTS:
        text = pattern.sub(instead, text)
    return text


def _without_tokens(text: str) -> str:
    raw = text.encode(errors="replace")
    found = sorted(each for view in views(raw) for each in tokens_in_logs(view))
    if not found:
        return text
    parts: list[bytes] = []
    at = 0
    for start, secret, end in found:
        if start >= at:
            parts += (raw[at:secret], REMOVED.encode())
        at = max(at, end)
    return b"".join([*parts, raw[at:]]).decode(errors="replace")


def clean_tenant(tenant: JsonObject) -> JsonObject:
    """A Tenant without what no issue needs: the customer's id, patterns of redaction rules, which may name what is
    secret, and values of labels and annotations that are neither Shoal's nor Helm's."""
    metadata: JsonObject = tenant.get("metadata") or {}
    spec: JsonObject = tenant.get("spec") or {}
    logging: JsonObject = spec.get("logging") or {}
    rules: list[JsonObject] = logging.get("redact") or []
    kept = {name: _noted(metadata[name]) for name in ("labels", "annotations") if metadata.get(name)}
    if rules:
        logging = logging | {"redact": [rule | dict.fromkeys(rule.keys() & {"pattern"}, REMOVED) for rule in rules]}
    hidden = dict.fromkeys(spec.keys() & {"externalID"}, REMOVED) | ({"logging": logging} if rules else {})
    whole: JsonObject = clean(tenant | {"metadata": metadata | kept, "spec": spec | hidden})
    return whole


def _noted(notes: JsonObject) -> JsonObject:
    return {name: value if name.startswith(_OWN_NOTES) else REMOVED for name, value in notes.items()}


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
    user = False
    for each in items:
        if user and isinstance(each, str):
            kept.append(_USER_AND_PASSWORD.sub(rf"\1{REMOVED}", clean_text(each)))
        elif flag is not None and isinstance(each, str) and not each.startswith("--"):
            number = flag["name"].lower() == "token" and _NUMBER.fullmatch(each)
            kept.append(each if number or _NO_SECRET.fullmatch(each) else REMOVED)
        else:
            kept.append(clean(each, depth + 1))
        flag = _FLAG.match(each) if isinstance(each, str) else None
        user = isinstance(each, str) and re.fullmatch(_USER_FLAG, each, re.IGNORECASE) is not None
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
