"""What must hold of requests to routes, from the journals and the ledger. Pure.

| somebody saw | verdict |
|---|---|
| a record of a request to a route with another route, or with none; of any other request with one | broken |
| a record with a Model that is no target of the route, or with a replica of another Model than its own | broken |
| a request whose final records in spool and ledger differ in their route or their Model | broken |
| an answer with the words of an adapter and a record without it, or the reverse; or of one that is no target | broken |
| more answers of an external target in the ledger than the target gave, by their tokens; or none of many | broken |
| a broken canary that was not halted, or that got requests after it was | broken |
| a copy for a mirror with two records or a final one, of no request, or of another Model or route | broken |
| a mirror's engine that was sent copies, and no record of one | broken |

That each request has exactly one final record is checked of all requests (verdict.py, metered.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from tests.storm.journals import Attempt, Halt, Journals, UsageRow, by_client
from tests.storm.ledgerrows import LedgerContents, Tokens

HEARD_SECONDS: Final = 5.0
"""From the status that says that a canary is halted, until every gateway knows it; it is about one second."""
ENOUGH: Final = 60
"""So many requests to a route send enough of them to its canary, at one of two gateways at least, to halt it."""


def violations(journals: Journals, contents: LedgerContents | None) -> list[str]:
    """Nothing where there were no routes."""
    if not journals.routes:
        return []
    rows = by_client(journals.rows)
    found = [text for attempt in journals.attempts.values() for text in _of(journals, attempt, rows)]
    found += [text for halt in journals.halts for text in _halted(halt, journals)]
    found += _mirrored(journals)
    if contents is not None:
        found += _in_ledger(journals.rows, contents)
        found += _outside(journals, contents)
    return [f"routes: {text}" for text in found]


def line(journals: Journals) -> str:
    """What became of requests to routes, in one line."""
    rows = by_client(journals.rows)
    sent: Counter[str] = Counter()
    answered: dict[str, Counter[str]] = {}
    for id, attempt in journals.attempts.items():
        if attempt.model not in journals.routes:
            continue
        sent[attempt.model] += 1
        for row in rows.get(id, ()):
            if row.kind == "final" and row.model is not None and row.outcome == "answered":
                answered.setdefault(attempt.model, Counter())[(row.adapter or row.model).partition("/")[2]] += 1
    told = [
        f"{name} {count} requests, answered by "
        + (", ".join(f"{model} {times}" for model, times in sorted(answered.get(name, {}).items())) or "nobody")
        for name, count in sorted(sent.items())
    ]
    copies = sum(row.mirror_of is not None for row in journals.rows)
    halted = sum(halt.since is not None for halt in journals.halts)
    canaries = f"canaries broken {len(journals.halts)}, halted {halted}"
    if journals.externals:
        killed = sum(kill.what == "external" for kill in journals.kills)
        told.append(f"the external target was asked {len(journals.outside)} times and killed {killed} times")
    return "; ".join([*told, canaries, f"copies at mirrors {len(journals.copies())}, recorded {copies}"])


def _of(journals: Journals, attempt: Attempt, rows: Mapping[str, list[UsageRow]]) -> Iterable[str]:
    id, asked = attempt.id, attempt.model
    routed = journals.routes.get(asked)
    for row in rows.get(id, ()):
        named = f"{id} ({row.request}), which was sent to {asked}: its {row.kind} record"
        wanted = None if routed is None else routed.route
        if row.route != wanted:
            yield f"{named} has the route {row.route}"
        if routed is not None and row.model not in routed.models:
            yield f"{named} has the Model {row.model}, which is no target"
        if row.kind == "final" and row.replica is not None and not row.replica.startswith(f"{row.model}-"):
            yield f"{named} has the Model {row.model} and the replica {row.replica}"
        if routed is None:
            continue
        if row.adapter is not None and row.adapter not in routed.adapters:
            yield f"{named} has the adapter {row.adapter}, which is no target"
        adapter = (row.adapter or "").partition("/")[2]
        if row.kind == "final" and row.outcome == "answered" and attempt.weights and adapter not in attempt.weights:
            said = " or ".join(name or "the base" for name in attempt.weights)
            yield f"{named} has the adapter {row.adapter}, and the answer has the words of {said}"


def _outside(journals: Journals, contents: LedgerContents) -> Iterable[str]:
    """The external target's own count. It gives requests ids of its own, so answers are told by their tokens; of those
    under which it was killed it may not have noted the end."""
    externals = journals.externals
    recorded = [row for row in contents.rows if row.model in externals and row.ended]
    answers = [row for row in recorded if row.attempt == 0 and row.outcome == "answered"]
    gave = Counter(Tokens(*one.tokens) for one in journals.outside if one.finished is not None and one.tokens)
    claimed = Counter(row.tokens for row in answers if row.source == "final")
    unfinished = sum(one.finished is None for one in journals.outside)
    named = ", ".join(sorted(externals))
    if (more := (claimed - gave).total()) > unfinished:
        yield f"{more} of {claimed.total()} answers of {named} are not in its own journal"
    if len(journals.outside) >= ENOUGH and not answers:
        yield f"{len(journals.outside)} requests came to {named}, and none of its answers is recorded"


def _mirrored(journals: Journals) -> Iterable[str]:
    """Copies: nobody is billed for one. Of those whose gateway was killed there is no record."""
    requests: dict[str, UsageRow] = {}
    for row in journals.rows:
        if row.mirror_of is None and row.kind in ("open", "final"):
            requests[row.request] = row
    mirrors = {one.route: one.mirror for one in journals.routes.values() if one.mirror is not None}
    copies = [row for row in journals.rows if row.mirror_of is not None]
    for id, count in Counter(row.request for row in copies).items():
        if count > 1:
            yield f"the copy {id} has {count} records"
    for row in copies:
        named = f"the copy {row.request} of {row.mirror_of}"
        request = requests.get(row.mirror_of or "")
        if row.kind != "attempt":
            yield f"{named} has a {row.kind} record"
        if request is None:
            yield f"{named} is one of no request"
        elif row.route != request.route or row.model != mirrors.get(row.route or ""):
            yield f"{named} has the Model {row.model} and the route {row.route}, its request has {request.route}"
    for row in requests.values():
        if row.model in mirrors.values():
            yield f"{row.request}: its {row.kind} record has the mirror {row.model} as its Model"
    sent = len(journals.copies())
    if sent >= ENOUGH and not copies:
        yield f"engines of mirrors were sent {sent} copies, and none has a record"


def _halted(halt: Halt, journals: Journals) -> Iterable[str]:
    """The canary would answer again, but nobody may ask it."""
    what = f"the canary {halt.model} of {halt.route}"
    if halt.since is None:
        # Of requests that are sent in the last seconds nobody knows yet how they end.
        span = (halt.until - halt.seconds, halt.until - HEARD_SECONDS)
        routed = (a for a in journals.attempts.values() if _route_of(journals, a) == halt.route)
        asked = sum(span[0] < attempt.sent < span[1] for attempt in routed)
        if asked >= ENOUGH:
            yield f"{what} refused everything for {halt.seconds:.0f} s, of {asked} requests, and was not halted"
        return
    for row in journals.rows:
        if row.admitted is None or (row.route, row.model) != (halt.route, halt.model):
            continue
        late = datetime.fromisoformat(row.admitted).timestamp() - halt.since
        if HEARD_SECONDS < late < halt.until - halt.since:
            yield f"{row.request} went to {what}, {late:.1f} s after its halt"


def _route_of(journals: Journals, attempt: Attempt) -> str | None:
    routed = journals.routes.get(attempt.model)
    return None if routed is None else routed.route


def _in_ledger(rows: Iterable[UsageRow], contents: LedgerContents) -> Iterable[str]:
    finals = {row.request: row for row in rows if row.kind == "final"}
    for stored in contents.rows:
        row = finals.get(stored.request)
        if row is None or stored.attempt or not stored.ended:
            continue
        if (stored.route, stored.model) != (row.route, row.model):
            yield (
                f"{row.request}: the ledger has {stored.model} by {stored.route}, the spool {row.model} by {row.route}"
            )
