"""What a message says about its cause. Engines, kubelets, the scheduler and the API server write them; no field of the
API says the same.

Only known phrases count. A message without one keeps the reason that it came with.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.core.layers import faults, phrases, xids

LONGEST: Final = 8192
"""Characters of a message that are read, from its end: an engine's last lines say why."""
_LONGEST_QUOTE: Final = 300
LONGEST_CONDITION: Final = 1024
"""Characters that a condition's message has at most; sums for each GPU class fill it."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """A known phrase in a message."""

    reason: str
    quote: str
    """The line that it is in."""
    meaning: str = ""
    """What a number in it means."""

    @property
    def explained(self) -> str:
        """The line, with the meaning."""
        return f"{self.quote} ({self.meaning})" if self.meaning else self.quote


_OWN_LIMIT: Final = re.compile(r"exceed(s|ed) (the|its) (total |local |ephemeral |storage ){0,4}limit", re.IGNORECASE)
_RAISED: Final = re.compile(r".{0,200}?(\w{0,80}(Error|Exception)\b|\b(error|ERROR|fatal|FATAL):)")
_POINTS: Final = re.compile(
    r"see root cause above|failed core proc|(scheduler|detokenizer) is dead"
    r"|from a child process|child process(es)? failed",
    re.I,
)
"""In a line that says only that another one says why."""
_TRACED: Final = re.compile(r"(\([^)]{0,80}\) |\S{0,80}\] )?\s*(File \"|Traceback|raise |\^)")
_ENDINGS: Final = tuple(row for row in (*phrases.GPU, *phrases.ENGINE) if faults.advice(row[1]).state == "fault")
"""What may have ended an engine."""
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_XID: Final = re.compile(
    r"\bxid(?: \([^)]{0,80}\))?[:= ]{1,3}(\d{1,3})\b|\bnvidiaxid(\d{1,3})|xid\w{0,40}: errorcode:(\d{1,3})\b",
    re.IGNORECASE,
)
"""As drivers log it, and as monitors name their conditions."""


def engine(text: str) -> Phrase | None:
    """Why an engine or a container of a pod ended; also for kubelets' messages about GPUs. The most upstream cause of
    those that the text names."""
    found = _worst(xid(text), _first(text, _ENDINGS))
    return found if found is not None and _is_fault(found) else None  # what is only worth knowing ended nothing


def about(text: str) -> Phrase | None:
    """What the error of an engine is about that no phrase is known of."""
    return _first(raised(text), phrases.VOCABULARY)


def gpu(text: str) -> Phrase | None:
    """What a node's condition or event says of its GPUs."""
    return _worst(xid(text), _first(text, phrases.GPU))


def xid(text: str) -> Phrase | None:
    """The worst of the Xid messages in a text: of faults the most upstream, and notes after them."""
    found: list[Phrase] = []
    for match in _XID.finditer(text[-LONGEST:]):
        number, line = int(match[1] or match[2] or match[3]), _line(text[-LONGEST:], match)
        if (known := xids.of(number, line)) is not None:
            found.append(Phrase(known.reason, line, f"Xid {number}: {known.meaning}"))
    return min(found, key=_severity, default=None)


def source(text: str) -> Phrase | None:
    """Why a source of weights gives nothing, though its address is right."""
    return _first(text, phrases.SOURCE)


def fetch(text: str) -> Phrase | None:
    """Why a fetch of weights failed that gives no reason of its own."""
    return _first(text, phrases.FETCH)


def node(text: str) -> Phrase | None:
    """What a node's event says of the machine itself."""
    return _first(text, phrases.MACHINE)


def of_machine(text: str) -> Phrase | None:
    """What a warning about a node is about that no phrase is known of. What an Xid says is known, also where it is that
    nothing is wrong."""
    return None if _XID.search(text[-LONGEST:]) else _first(text, phrases.OF_MACHINES)


def taint(text: str) -> Phrase | None:
    """What a taint says of its node."""
    return _first(text, phrases.TAINTS)


def evicted(text: str) -> Phrase | None:
    """Of what a node ran short, when its kubelet evicted a pod; None: of what the pod itself used."""
    return _first(text, phrases.EVICTIONS)


def own_limit(text: str) -> bool:
    """Whether a pod was evicted for a limit of its own, and not because its node ran short."""
    return _OWN_LIMIT.search(text[-LONGEST:]) is not None


def pull(text: str) -> Phrase | None:
    """Why an image cannot be pulled."""
    return _first(text, phrases.PULL)


def setup(text: str) -> Phrase | None:
    """Why a container cannot be set up."""
    return _first(text, (*phrases.GPU, *phrases.SETUP))


def adapter(text: str) -> Phrase | None:
    """Why an engine does not load an adapter."""
    return _first(text, phrases.ADAPTER)


def mount(text: str) -> Phrase | None:
    """Why a volume cannot be mounted."""
    return _first(text, phrases.MOUNT)


def ended(text: str) -> Phrase | None:
    """What a Model's condition says of its engine's exit code, where the engine's own words say nothing."""
    return _first(text, phrases.ENDED)


def admission(text: str) -> Phrase | None:
    """Why the API server refuses an object."""
    return _first(text, phrases.ADMISSION)


def scheduler(text: str) -> Phrase | None:
    """Why the scheduler finds no node."""
    return _first(text, phrases.SCHEDULER)


def shorten(text: str, longest: int = _LONGEST_QUOTE) -> str:
    """A message as one line, at most so long, without control characters: engines colour their logs, and people who may
    write a status could otherwise write to the reader's terminal."""
    line = " ".join(_CONTROL.sub(" ", _ESCAPE.sub("", text)).split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."


def brief(text: str, longest: int = _LONGEST_QUOTE) -> str:
    """`shorten`, cut after a whole part of a sentence: half a sum would be read as another sum."""
    line = shorten(text, LONGEST_CONDITION)
    if len(line) <= longest:
        return line
    ends = [each.end() - 1 for each in _PART.finditer(line[: longest - 4])]
    return f"{line[: ends[-1]]} ..." if ends else shorten(line, longest)


_PART: Final = re.compile(r"[;.] ")


def _is_fault(phrase: Phrase) -> bool:
    return faults.advice(phrase.reason).state == "fault"


def _severity(phrase: Phrase) -> tuple[bool, int, bool]:
    """A contained error may come with one that is not."""
    contained = phrase.reason == faults.GPU_ECC_CONTAINED
    return not _is_fault(phrase), faults.advice(phrase.reason).layer.order, contained


def _worst(of_xid: Phrase | None, other: Phrase | None) -> Phrase | None:
    """What an Xid says, unless it is a note beside a fault."""
    if of_xid is None or (other is not None and not _is_fault(of_xid)):
        return other
    return of_xid


def _first(text: str, known: Iterable[tuple[re.Pattern[str], str]]) -> Phrase | None:
    read = text[-LONGEST:]
    for pattern, reason in known:
        if match := pattern.search(read):
            return Phrase(reason, _line(read, match))
    return None


def raised(text: str) -> str:
    """The last line that tells of an error, without a traceback's own lines: those name files and code. "": none."""
    lines = text[-LONGEST:].splitlines()
    found = (line for line in reversed(lines) if _RAISED.match(line) and not _TRACED.match(line))
    return next((line for line in found if not _POINTS.search(line)), "")


def _line(text: str, match: re.Match[str]) -> str:
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    line = text[begin : end if end >= 0 else len(text)].strip()
    if len(line) <= _LONGEST_QUOTE:
        return line
    start = max(0, match.start() - begin - 40)
    return shorten(line[start:])
