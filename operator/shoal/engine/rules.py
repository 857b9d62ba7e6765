"""What an engine cannot do of a spec alone, as rules of the API server: `kubectl apply` refuses it with the reason.

The same is refused by `PodSide.problems` and `extra_args_problems`, which know the version and the weights too. For the
adapters beside this file; `kinds.py` joins the rules of all kinds.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from shoal.api.meta import CELRule
from shoal.engine.arguments import EngineArguments
from shoal.engine.fields import FieldArgument

STAGED: Final = "has(self.parallelism) && has(self.parallelism.pipeline) && self.parallelism.pipeline > 1"
"""The replica is divided into stages."""
GROUPED: Final = "has(self.parallelism) && has(self.parallelism.attentionData) && self.parallelism.attentionData > 1"
"""Its attention is divided into groups."""
SPECULATES: Final = "has(self.speculation)"
_IS_SET: Final[Mapping[str, str]] = {
    "speculation": SPECULATES,
    "speculation.method": SPECULATES,
    "speculation.draftPath": f"{SPECULATES} && has(self.speculation.draftPath)",
    "speculation.draftTokens": f"{SPECULATES} && has(self.speculation.draftTokens)",
    "parallelism.attentionData": GROUPED,
    "parallelism.expert": "has(self.parallelism) && has(self.parallelism.expert) && self.parallelism.expert",
    "quantization.weights": "has(self.quantization) && has(self.quantization.weights)",
    "quantization.kvCache": "has(self.quantization) && has(self.quantization.kvCache)",
}
"""Path below `spec.engine` -> whether it says something."""


def given(arguments: EngineArguments, *names: str, families: Sequence[str] = (), off: bool = False) -> str:
    """Whether `extraArgs` have one of these arguments (canonical names) in any of its spellings, or one that begins
    like a family. `off`: also one that switches it off, unless a Model may do that."""
    spellings = {
        spelling
        for table in arguments.tables().values()
        for spelling, argument in table.items()
        if argument.name in names
        and (spelling != f"no-{argument.name}" or (off and not arguments.is_harmless(spelling, argument)))
    }
    words = [*sorted(spellings | set(names)), *(f"(no-)?{each}[^=]*" for each in families)]
    return f"has(self.extraArgs) && self.extraArgs.exists(a, a.matches('^--({'|'.join(words)})([=.]|$)'))"


def owned(arguments: EngineArguments) -> Iterator[CELRule]:
    """A rule for each reason why Models may not set arguments."""
    by_reason: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for name, why in arguments.owned.items():
        by_reason[why][0].append(name)
    for prefix, why in arguments.families:
        by_reason[why][1].append(prefix)
    for why, (names, families) in by_reason.items():
        shown = ", ".join([*(f"--{name}" for name in names), *(f"--{prefix}..." for prefix in families)])
        found = given(arguments, *names, families=families, off=True)
        yield CELRule(f"!({found})", f"`extraArgs` of {arguments.engine} may not have {shown}: {why}")


def said_by_fields(arguments: EngineArguments, fields: Sequence[FieldArgument]) -> Iterator[CELRule]:
    """A rule for each argument that a field says: see `fields.refused`."""
    for each in fields:
        there = given(arguments, each.name)
        if each.values is not None:
            values = "|".join(sorted(each.values))
            alone = _IS_SET[each.field]
            same = f" || self.extraArgs.exists(a, a.matches('^--{each.name}=(?i:{values})$'))" if values else ""
            there = f"{there} && (({alone}){same})"
        yield CELRule(
            f"!({there})", f"`extraArgs` of {arguments.engine} may not have --{each.name}: use `{each.field}`"
        )


def not_in_stages(arguments: EngineArguments, names: Mapping[str, str] | Sequence[str]) -> Iterator[CELRule]:
    """A rule for each argument that does not go with stages."""
    for name in names:
        why = f", since {names[name]}" if isinstance(names, Mapping) else ""
        yield CELRule(
            f"!({STAGED} && {given(arguments, name)})",
            f"`parallelism.pipeline` does not go with --{name} in {arguments.engine}{why}: leave one of them out",
        )
