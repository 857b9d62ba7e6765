"""The status of a ModelRoute, computed from observations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shoal.api import reasons
from shoal.api.meta import ConditionStatus
from shoal.api.modelroute import CanaryStatus, ExternalTargetStatus, ModelRoute, ModelRouteStatus
from shoal.core.routing import servednames
from shoal.core.routing.canary import CanaryHalt
from shoal.core.routing.consent import some
from shoal.core.routing.external import ExternalProblem
from shoal.core.routing.routeexplain import unreached
from shoal.core.routing.routes import DeclaredRoute, DeclaredRule, TargetRef, declared_route
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.core.status.observed import ModelProblem, ServedNames


@dataclass(frozen=True, slots=True)
class SeenTarget:
    """What is known of a target."""

    exists: bool = True
    permitted: bool = True
    """Its namespace lets the route name it. What does not exist in another namespace is not permitted: otherwise a
    person who writes routes could find out what exists there."""
    is_route: bool = False
    """There is another ModelRoute of this name, and no Model or adapter."""
    not_ready: str = ""
    """Why it cannot serve; "": it can, perhaps after waking."""
    problem: ExternalProblem | None = None
    """Why gateways do not use an external target, or `Pending`: its Secret was not read yet."""


@dataclass(frozen=True, slots=True)
class SeenRoute:
    """The observations that the status is computed from."""

    route: ModelRoute
    served: ServedNames
    targets: Mapping[TargetRef, SeenTarget]
    """Every target that the route names."""
    halts: Mapping[str, CanaryHalt] = field(default_factory=dict[str, CanaryHalt])
    """Canaries that gateways have halted, by revision."""


def status(seen: SeenRoute, now: datetime) -> ModelRouteStatus:
    """The whole status. Equal observations give an equal status, except for transition times of conditions."""
    route = seen.route
    before = route.status.conditions if route.status else ()
    generation = route.metadata.generation
    return ModelRouteStatus(
        conditions=merge(before, _findings(seen), generation=generation, now=now),
        observed_generation=generation,
        served_names=seen.served.owned,
        canaries=canaries(seen),
        external_targets=tuple(_unused(seen)),
    )


def canaries(seen: SeenRoute) -> tuple[CanaryStatus, ...]:
    """The state of each canary. What was halted stays so while its specification is the same."""
    known = {one.revision: one for one in (seen.route.status.canaries if seen.route.status else ())}
    found: list[CanaryStatus] = []
    for rule in declared_route(seen.route).rules:
        if (canary := rule.canary) is None:
            continue
        old, halt = known.get(canary.revision), seen.halts.get(canary.revision)
        if canary.halted and old is not None:
            found.append(old)
        elif halt is not None:
            state = CanaryStatus(
                rule=rule.name, state="Halted", revision=canary.revision, message=f"{canary.ref}: {halt.describe()}"
            )
            found.append(state)
        else:
            found.append(CanaryStatus(rule=rule.name, state="Running", revision=canary.revision))
    return tuple(found)


def new_halts(route: ModelRoute, now: ModelRouteStatus) -> list[str]:
    """What to tell of each canary that is halted `now` and was not before."""
    before = {one.revision for one in (route.status.canaries if route.status else ()) if one.state == "Halted"}
    return [_describe_halts([one]) for one in now.canaries if one.state == "Halted" and one.revision not in before]


def former_problem(route: ModelRoute, target: str) -> ExternalProblem | None:
    """What the status says is wrong with the Secret of an external target; None: nothing, or the specification is newer
    than the status."""
    status = route.status
    if status is None or status.observed_generation != route.metadata.generation:
        return None
    for one in status.external_targets:
        if one.name == target and one.reason in (reasons.SECRET_NOT_FOUND, reasons.SECRET_REFUSED):
            return ExternalProblem(one.reason, one.message)
    return None


def _describe_halts(halted: Sequence[CanaryStatus]) -> str:
    text = "; ".join(f"canary of rule {one.rule} halted: {one.message}" for one in halted)
    return f"{text}. A change of `canary` ends the halt"


def _unused(seen: SeenRoute) -> Iterator[ExternalTargetStatus]:
    """The external targets that gateways do not use."""
    for target in seen.route.spec.external_targets:
        found = seen.targets.get(TargetRef("External", seen.route.external_key(target.name)))
        if found is not None and (problem := found.problem) is not None:
            yield ExternalTargetStatus(name=target.name, reason=problem.reason, message=problem.message[:1024])


def _findings(seen: SeenRoute) -> list[ConditionUpdate]:
    declared = declared_route(seen.route)
    problem = _problem(seen, declared)
    if problem is not None:
        text, halts = problem.message, _with_halts(seen)
        return [
            ConditionUpdate(kind, status, problem.reason, text + halts if kind == reasons.READY else text)
            for kind, status in _REFUSED
        ]
    described = _described(declared) + _without_weight(declared) + unreached(declared)
    accepted = ConditionUpdate(reasons.ACCEPTED, "True", reasons.VALID, described)
    if seen.served.lost:
        text = servednames.describe_lost(seen.route.key, seen.served) + unreached(declared)
        accepted = ConditionUpdate(reasons.ACCEPTED, "True", reasons.NAME_CLAIMED, text)
    ready = _ready(seen, declared)
    if ready.status == "True":
        return [accepted, ready]
    return [accepted, ready, ConditionUpdate(reasons.RECONCILING, "True", ready.reason, ready.message)]


_REFUSED: tuple[tuple[str, ConditionStatus], ...] = (
    (reasons.ACCEPTED, "False"),
    (reasons.READY, "False"),
    (reasons.STALLED, "True"),
)


def _problem(seen: SeenRoute, declared: DeclaredRoute) -> ModelProblem | None:
    """Why the route is not accepted; None: it is. Gateways serve what can be served of it all the same."""
    refs = list(declared.references())
    if circular := [ref for ref in refs if seen.targets[ref].is_route]:
        named = _named(circular)
        text = f"there is no {named}, only a ModelRoute of that name. Only Models and LoRAAdapters can be targets"
        return ModelProblem(reasons.CIRCULAR_ROUTE, text)
    if foreign := [ref for ref in refs if not seen.targets[ref].permitted]:
        # Whether it exists is not for those of another namespace to learn.
        text = (
            f"{_named(foreign)} has to list the namespace {declared.namespace} in spec.routeNamespaces before this "
            "route may name it, or there is no such object"
        )
        return ModelProblem(reasons.NOT_PERMITTED, text)
    if missing := [ref for ref in refs if not seen.targets[ref].exists]:
        return ModelProblem(reasons.TARGET_NOT_FOUND, f"there is no {_named(missing)}; the other targets are used")
    for ref in refs:
        # A Secret that was not read yet is no fault of the route.
        if (wrong := seen.targets[ref].problem) is not None and wrong.reason != reasons.PENDING:
            return ModelProblem(wrong.reason, f"{wrong.message}. The other targets are used")
    if empty := [rule.name for rule in declared.rules if not _weighted(rule) and not rule.fallback]:
        text = f"all weights are 0 in rule {', '.join(empty)}: its requests have no target"
        return ModelProblem(reasons.WEIGHTS_SUM_TO_ZERO, text)
    names = {name for name, _ in seen.served.lost}
    if not seen.served.owned and seen.route.key in names:
        return ModelProblem(reasons.NAME_TAKEN, servednames.describe_lost(seen.route.key, seen.served))
    return None


def _ready(seen: SeenRoute, declared: DeclaredRoute) -> ConditionUpdate:
    kind = reasons.READY
    for rule in declared.rules:
        used = _weighted(rule) or rule.fallback
        if all(seen.targets[ref].not_ready for ref in used):
            why = "; ".join(f"{ref}: {seen.targets[ref].not_ready}" for ref in used)
            text = f"no target of rule {rule.name}: {why}{_with_halts(seen)}"
            return ConditionUpdate(kind, "False", reasons.TARGETS_NOT_READY, text)
    if halted := _halted(seen):
        return ConditionUpdate(kind, "True", reasons.CANARY_HALTED, _describe_halts(halted))
    waiting = [f"{ref}: {seen.targets[ref].not_ready}" for ref in declared.references() if seen.targets[ref].not_ready]
    text = f"each rule has a target that can serve; not yet {some(waiting)}" if waiting else "every target can serve"
    return ConditionUpdate(kind, "True", reasons.TARGETS_READY, text + _without_weight(declared))


def _halted(seen: SeenRoute) -> list[CanaryStatus]:
    return [one for one in canaries(seen) if one.state == "Halted"]


def _with_halts(seen: SeenRoute) -> str:
    """What the message of another problem ends with, if canaries are halted."""
    halted = _halted(seen)
    return f". {_describe_halts(halted)}" if halted else ""


def _weighted(rule: DeclaredRule) -> list[TargetRef]:
    """The targets among which a rule's requests are drawn."""
    return [target.ref for target in rule.targets if target.weight]


def _without_weight(declared: DeclaredRoute) -> str:
    """What a route's messages end with, if it has rules of which only the fallbacks serve."""
    names = ", ".join(rule.name for rule in declared.rules if not _weighted(rule))
    return f". All weights are 0 in rule {names}: its fallback serves in place of its targets" if names else ""


def _described(declared: DeclaredRoute) -> str:
    rules, targets = len(declared.rules), len(list(declared.references()))
    text = f"{rules} {'rule' if rules == 1 else 'rules'}, {targets} {'target' if targets == 1 else 'targets'}"
    limits: list[str] = []
    if (tokens := declared.limits.max_output_tokens) is not None:
        limits.append(f"{tokens} output tokens")
    if (seconds := declared.limits.request_seconds) is not None:
        limits.append(f"{seconds} s")
    return f"{text}; a request has at most {' and '.join(limits)}" if limits else text


def _named(refs: list[TargetRef]) -> str:
    return some([str(ref) for ref in refs])
