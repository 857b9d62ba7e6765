"""Why a request for a route goes where it goes: the rule that is for it, and the share of each target; and which rules
are for none."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from shoal.api.modelroute import LengthMatch, RouteMatch
from shoal.core.routing.cost import CostConditions
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routes import DeclaredRoute, DeclaredRule, RequestFacts, TargetRef, matches

TargetRole = Literal["target", "canary", "fallback", "mirror"]


class TargetShare(NamedTuple):
    """A target of a rule, and what it gets of the rule's requests."""

    rule: str
    role: TargetRole
    ref: TargetRef
    percent: float
    """Of the requests that the rule is for. Of a fallback 0, unless none of the rule's `targets` can be used. Of a
    mirror, those that are copied."""
    note: str
    """Why it gets nothing, or, of a canary, all; or at which gateways it gets nothing now. "": it gets its share."""


class RouteExplanation(NamedTuple):
    """Where requests like one go."""

    rule: str | None
    """The rule that is for it; None: none is."""
    shares: tuple[TargetShare, ...]
    """Of that rule."""
    cost: CostConditions | None = None
    """Of that rule: when a request goes to a cheaper fallback."""
    targets: frozenset[str] = frozenset()
    """Keys of what that rule's requests can go to."""


class EffectiveLimits(NamedTuple):
    """The limits of a request through a route at one target, and whose they are: "" where there is no limit."""

    max_output_tokens: int | None = None
    max_output_tokens_of: Literal["route", "target", ""] = ""
    request_seconds: float | None = None
    request_seconds_of: Literal["route", "target", ""] = ""

    def __str__(self) -> str:
        parts: list[str] = []
        if self.max_output_tokens is not None:
            parts.append(f"{self.max_output_tokens} output tokens ({self.max_output_tokens_of})")
        if self.request_seconds is not None:
            parts.append(f"{self.request_seconds:g} s ({self.request_seconds_of})")
        return ", ".join(parts)


def effective_limits(target: ServedModel | None) -> EffectiveLimits:
    """Of a target as the route's requests get it; None: it cannot be served."""
    if target is None:
        return EffectiveLimits()
    tokens, seconds = target.max_output_tokens, target.request_seconds
    return EffectiveLimits(
        tokens,
        "" if tokens is None else "target" if target.max_output_tokens_route is None else "route",
        seconds,
        "" if seconds is None else "target" if target.request_seconds_route is None else "route",
    )


def explain_route(
    route: DeclaredRoute,
    facts: RequestFacts,
    why_not: Callable[[TargetRef], str],
    pause_of: Callable[[TargetRef], str] = lambda ref: "",
    lack_of: Callable[[TargetRef], str] = lambda ref: "",
) -> RouteExplanation:
    """`why_not`: why a target cannot be used by the tenant; "": it can. Of a target that can be used, `pause_of`: at
    which gateways it gets no requests now, and why; `lack_of`: which gateways do not use it, and why; "": none. Both
    change the notes, not the shares."""
    rule = next((rule for rule in route.rules if matches(rule, facts)), None)
    if rule is None:
        return RouteExplanation(None, ())
    targets = frozenset(ref.key for ref in rule.destinations())
    shares = _shares(rule, why_not)
    noted = tuple(
        share._replace(note=_noted(shares, number, lack_of(share.ref), pause_of(share.ref)))
        for number, share in enumerate(shares)
    )
    return RouteExplanation(rule.name, noted, rule.cost, targets)


def unreached(route: DeclaredRoute) -> str:
    """The sentences about rules that no request reaches, each after a full stop; "": there are none."""
    rules = route.rules
    catches_all = (number for number, rule in enumerate(rules) if not rule.matches or any(map(_is_all, rule.matches)))
    last = next(catches_all, len(rules))
    text = ""
    if behind := ", ".join(rule.name for rule in rules[last + 1 :]):
        text += f". No request reaches rule {behind}: rule {rules[last].name}, which is for every request, comes first"
    if empty := ", ".join(rule.name for rule in rules[:last] if all(map(_is_none, rule.matches))):
        text += f". No request reaches rule {empty}: `atLeast` of a length has to be below `lessThan`"
    return text


def _is_all(match: RouteMatch) -> bool:
    """Every request fulfils it."""
    bounded = any(length.at_least or length.less_than is not None for length in _lengths(match))
    return not (match.headers or match.tenants or match.endpoints or bounded)


def _is_none(match: RouteMatch) -> bool:
    """No request fulfils it: the API server refuses it, but not in objects from before that rule."""
    return any(
        length.less_than is not None and (length.at_least or 0) >= length.less_than for length in _lengths(match)
    )


def _lengths(match: RouteMatch) -> tuple[LengthMatch, ...]:
    return tuple(length for length in (match.prompt_bytes, match.prompt_tokens) if length is not None)


def _shares(rule: DeclaredRule, why_not: Callable[[TargetRef], str]) -> tuple[TargetShare, ...]:
    canary, rest = rule.canary, 100.0
    found: list[TargetShare] = []
    usable = [target for target in rule.targets if target.weight and not why_not(target.ref)]
    if canary is not None:
        note = "halted" if canary.halted else why_not(canary.ref)
        percent = 0.0 if note else float(canary.percent)
        if percent and not usable and all(why_not(ref) for ref in rule.fallback):
            percent, note = 100.0, "it gets all: no other target can be used"
        found.append(TargetShare(rule.name, "canary", canary.ref, percent, note))
        rest -= percent
    total = sum(target.weight for target in usable)
    for target in rule.targets:
        note = why_not(target.ref) or ("" if target.weight else "weight 0")
        percent = 0.0 if note else rest * target.weight / total
        found.append(TargetShare(rule.name, "target", target.ref, percent, note))
    left = 0.0 if usable else rest
    for ref in rule.fallback:
        note = why_not(ref)
        found.append(TargetShare(rule.name, "fallback", ref, 0.0 if note else left, note))
        left = left if note else 0.0
    if rule.mirror is not None:
        note = why_not(rule.mirror)
        found.append(TargetShare(rule.name, "mirror", rule.mirror, 0.0 if note else float(rule.mirror_percent), note))
    return tuple(found)


def _noted(shares: tuple[TargetShare, ...], number: int, lack: str, pause: str) -> str:
    """The note of a share, with what becomes of its requests where its target gets none."""
    share = shares[number]
    if not (share.percent or (share.role == "fallback" and not share.note)):
        return share.note
    parts = [share.note] if share.note else []
    for text, instead in ((lack, _without(shares, number)), (pause, _meanwhile(shares, number))):
        if text:
            parts.append(f"{text}: {instead}" if share.percent else text)
    return "; ".join(parts)


def _meanwhile(shares: tuple[TargetShare, ...], number: int) -> str:
    """What becomes of a share where its target gets no requests now."""
    # What comes later may take over: a canary's share its targets, every share the fallbacks.
    later = [one.role for one in shares[number + 1 :] if not one.note]
    if shares[number].role == "canary" and "target" in later:
        return "targets get its share there"
    if "fallback" in later:
        return "a fallback gets its share there"
    return "its requests get 503 external_unavailable there"


def _without(shares: tuple[TargetShare, ...], number: int) -> str:
    """What becomes of a share where its target is not used at all: there the other targets share its requests."""
    role = shares[number].role
    others = [one.role for at, one in enumerate(shares) if at != number and not one.note and one.percent]
    if role == "target" and "target" in others:
        return "other targets get its share there"
    if "canary" in others and not any(one.role == "fallback" and not one.note for one in shares[number + 1 :]):
        return "the canary gets its share there"
    return _meanwhile(shares, number)
