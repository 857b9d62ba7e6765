"""From a client's body to a request for one target: what is checked, counted and reserved before the request is
accepted, and the body for the engine.

A request is prepared again when its media were fetched, when its tenant's limits have room again, and for each fallback
and mirror of its route. The decoded body is never kept meanwhile: it is several times as large as the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from shoal.core.access import KeyIdentity
from shoal.core.advice.marks import Marks, prompt_marks
from shoal.core.fields import remote
from shoal.core.fields.kinds import Facts
from shoal.core.fields.mediasize import has_media, media_size
from shoal.core.fields.pairs import pairs_of, repeated, write_documents
from shoal.core.fields.prompts import prompts_of
from shoal.core.fields.table import CHAT, CLASSIFY, EMBEDDINGS, FORMS, GENERATING, PAIRS, RERANK, TOKENIZING
from shoal.core.fields.turns import write_turns
from shoal.core.nativeapi import NativeApi
from shoal.core.routing.affinity import SHARED, prefix_space, prompt_of
from shoal.core.routing.prefixes import points_of
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.reuse import Prompt
from shoal.engine.wires import added_of
from shoal.gateway import audioform
from shoal.gateway.ability import needs_salt, refuse_begun_answer, refuse_incapable, takes_salt
from shoal.gateway.arrival import Arrival
from shoal.gateway.body import (
    Parsed,
    bound_answer,
    bound_native,
    check_size,
    checked,
    engine_body,
    parse,
    prompts,
    translated,
    untranslated,
)
from shoal.gateway.costchoice import CostChoice, CostNote, RequestSize, TooCostly
from shoal.gateway.dialects import Dialect
from shoal.gateway.externalwire import external_body, native_body
from shoal.gateway.prepared import Prepared
from shoal.gateway.requester import Requester
from shoal.gateway.routechoice import RouteChoice, Routed
from shoal.gateway.shared import Gateway
from shoal.gateway.upstream import RequestBody
from shoal.metering.meter import Meter
from shoal.net.errors import ApiError
from shoal.requestlog.capture import Capture

_NO_HOSTS: Final[frozenset[str]] = frozenset()
_JSON: Final = "application/json"


class Incomplete(NamedTuple):
    """A request whose media must still be fetched. Its tenant's limits count it, but its full cost is not yet
    reserved."""

    model: ServedModel
    media: Sequence[remote.Wanted]


class Fetched(NamedTuple):
    """The request's media as `data:` URLs, in order."""

    model: ServedModel
    media: Sequence[str]


class ClientBody(NamedTuple):
    """A body as the client sent it, and what was fetched for it."""

    raw: bytes
    fetched: Fetched | None = None

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.raw) if self.fetched is None else len(self.raw) + sum(map(len, self.fetched.media))


class Ready(NamedTuple):
    """A request for one target."""

    prepared: Prepared
    body: RequestBody
    """For the engine."""
    routed: Routed | None
    """What chose the target; None: the client named it."""
    entry: Capture | None = None
    """Of the request log."""
    note: CostNote | None = None
    """What its cost has decided."""


class _Asked(NamedTuple):
    """What a body asks for."""

    parsed: Parsed
    """In the engine's API, if it can be translated."""
    original: Parsed
    """In the client's API."""
    translatable: bool
    shown: dict[str, Any]
    """What estimates and sessions go by: messages as a chat has them, where there are some."""
    form: audioform.AudioForm | None = None


class _EngineBody(NamedTuple):
    body: RequestBody
    content_type: str = _JSON
    dialect: Dialect | None = None
    """Into which the answer is translated."""
    salted: bool = False


class Preparation:
    """Prepares one request. Has its meter from the first time on."""

    __slots__ = ("_app", "_arrival", "_requester", "_routes", "meter")

    def __init__(self, app: Gateway, arrival: Arrival, requester: Requester, routes: RouteChoice) -> None:
        self._app = app
        self._arrival = arrival
        self._requester = requester
        self._routes = routes
        self.meter: Meter

    def admit(self, identity: KeyIdentity, body: ClientBody) -> Ready | Incomplete:
        """Prepares the request for what its body names, or for a fallback that is cheaper by the conditions of its
        route: the first one that can do it. Limits and budget reserve for the one that it goes to. Raises ApiError."""
        found = self._for_name(identity, body, leaves=True)
        if not isinstance(found, TooCostly):
            return found
        before = self._requester.reserved
        for model, routed in found.cheaper:
            try:
                ready = self._for_target(identity, body, self._asked(body.raw), model, routed)
            except ApiError as error:
                if error.status == 429 or self._requester.reserved is not before:
                    raise
                continue  # it cannot do what the target could
            if isinstance(ready, Ready):
                return ready._replace(note=CostNote(found.left.address, found.trigger, found.why))
        ready = self._for_name(identity, body, leaves=False)
        if isinstance(ready, TooCostly):
            raise RuntimeError("a request that stays with its target leaves it")
        if isinstance(ready, Incomplete):
            return ready
        why = f"{found.why}, but no cheaper fallback can do the request"
        return ready._replace(note=CostNote(found.left.address, None, why))

    def again(
        self, identity: KeyIdentity, body: ClientBody, model: ServedModel, routed: Routed, *, id: str | None = None
    ) -> Ready | None:
        """An accepted request for another target: nothing is reserved for it and its meter stays as it is. None: its
        media would have to be fetched. `id`: of a copy. Raises ApiError if the target cannot do it."""
        found = self._for_target(identity, body, self._asked(body.raw), model, routed, first=False, id=id)
        return found if isinstance(found, Ready) else None

    def _for_name(self, identity: KeyIdentity, body: ClientBody, *, leaves: bool) -> Ready | Incomplete | TooCostly:
        asked = self._asked(body.raw)
        name = asked.parsed.model_name
        model, routed = self._routes.meaning(identity, name, asked.shown, len(body.raw))
        if self._requester.reserved is None:  # else both quotas have counted the request
            self._requester.route_quota = (
                None
                if routed is None or routed.limited is None
                else self._app.quotas.of_route(identity.tenant, routed.limited)
            )
        if body.fetched is not None and not self._means_the_same(body.fetched.model, model, routed):
            raise self._routes.unknown(identity, name)
        return self._for_target(identity, body, asked, model, routed, leaves=leaves)

    def _means_the_same(self, before: ServedModel, model: ServedModel, routed: Routed | None) -> bool:
        """Whether the name that meant a Model before media were fetched still does. A route may choose another one, by
        the same draw: meanwhile a canary may have halted, or a weight may have changed."""
        if routed is not None and routed.route == self.meter.fields.get("route"):
            return True
        return (model.uid, model.address) == (before.uid, before.address)

    def _asked(self, raw: bytes) -> _Asked:
        """Decodes the body. Raises ApiError."""
        path, dialect = self._arrival.engine_path, self._arrival.dialect
        if path in FORMS:
            form = audioform.read(self._arrival.content_type, raw)
            return _Asked(form.parsed, form.parsed, True, form.parsed.fields, form)
        check_size(raw, self._app.json_bounds)
        original = parse(raw, path)
        if path == RERANK:
            write_documents(original.fields)
        if dialect is None:
            return _Asked(original, original, True, original.fields)
        try:
            parsed = translated(original, dialect)
        except ApiError:  # an external target may serve this API itself
            native = dialect.native
            shown = original.fields if native is None else {"messages": native.turns(original.fields)}
            return _Asked(original, original, False, shown)
        return _Asked(parsed, original, True, parsed.fields)

    def _for_target(
        self,
        identity: KeyIdentity,
        body: ClientBody,
        asked: _Asked,
        model: ServedModel,
        routed: Routed | None,
        *,
        first: bool = True,
        leaves: bool = False,
        id: str | None = None,
    ) -> Ready | Incomplete | TooCostly:
        """`first`: the request is not accepted yet, so it is counted and reserved for. `leaves`: it may go to a cheaper
        fallback."""
        path, fields, native = self._arrival.engine_path, asked.parsed.fields, self._native(model)
        wanted: Sequence[remote.Wanted] = ()
        size = len(body.raw)
        if native is None:
            wanted, size = self._check(asked, model, body)
        else:
            asked = asked._replace(original=untranslated(asked.original, native))
        if first:
            self._count(identity, asked, model, routed, resumed=body.fetched is not None)
        allowed, bound = self._bounds(asked, native, model)
        choices, prompt_count = fields.get("n"), prompts(fields)
        choices = choices if type(choices) is int else 1
        answers = max(1, choices) * prompt_count if path in GENERATING else 0
        meter, note = self.meter, None
        read = 0 if meter.free else meter.read_bytes(size)
        if leaves and routed is not None and routed.cost is not None and not wanted and not meter.free:
            costs = CostChoice(self._app, self._arrival, self._requester, self._routes)
            use = RequestSize(path, read, answers, allowed, meter.units(), meter.media.sound_ms is not None)
            note = costs.decide(identity, model, routed, use)
            if isinstance(note, TooCostly):
                return note
        quota, beside = self._requester.quota, self._requester.route_quota
        if quota is None:  # the tenant has no limits of its own
            quota, beside = beside, None
        if first and quota is not None:
            self._requester.reserved = quota.reserve(
                model,
                identity.plan,
                read,
                answers,
                bound,
                units=meter.units(),
                grows=bool(wanted),
                begun=self._requester.reserved,
                beside=beside,
            )
        if wanted:
            return Incomplete(model, wanted)
        # The engine's body is made before the usage record is opened, so that its errors leave no record to close.
        space = prefix_space(model, identity)
        encoded = self._engine_body(asked, body.raw, native, model, space, id or self._arrival.id)
        if asked.form is not None:
            fields = audioform.loggable(fields)
        among = len(self._app.directory.snapshot.replicas_of(model))
        marks = self._marks(space, fields, model, among)
        prepared = Prepared(
            path if native is None else self._arrival.path,
            asked.parsed.model_name,
            asked.parsed.stream,
            asked.parsed.wants_usage,
            asked.parsed.wants_continuous,
            model,
            bound,
            choices,
            identity.priority,
            prompt_count,
            self._prompt(space, fields, model, read, marks, among),
            dialect=encoded.dialect,
            native=native,
            content_type=encoded.content_type,
            top_n=fields.get("top_n"),
            documents=fields.get("return_documents") is not False,
            texts=_texts(path, fields),
            plain=asked.form is not None and fields.get("response_format") == "text",
            added=added_of(path, fields),
            salted=encoded.salted,
            media=path in FORMS or (path == CHAT and bool(model.facts.media) and has_media(fields)),
            target=None if routed is None else routed.target,
            marks=marks if self._app.traffic.most else None,
        )
        entry = None
        if first and identity.logging is not None:
            as_sent = body.fetched is None and self._arrival.dialect is None and asked.form is None
            original = body.raw if as_sent else None
            entry = self._app.logs.logger.begin(identity, self._requester.key_hash, original, fields)
        return Ready(prepared, encoded.body, routed, entry, note)

    def _native(self, model: ServedModel) -> NativeApi | None:
        """The API of the client, where the external target serves it itself; None: it is chat completions, or is
        translated into them."""
        dialect = self._arrival.dialect
        native = None if dialect is None else dialect.native
        if native is None or model.external is None or native.endpoint not in model.external.endpoints:
            return None
        return native

    def _check(self, asked: _Asked, model: ServedModel, body: ClientBody) -> tuple[Sequence[remote.Wanted], int]:
        """Checks the fields against what the Model can do. Returns the media that must be fetched first, and the bytes
        of the body with its media. Raises ApiError."""
        app, arrival, fields, given = self._app, self._arrival, asked.parsed.fields, asked.original.fields
        path, dialect = arrival.engine_path, arrival.dialect
        if dialect is not None and not asked.translatable:
            translated(asked.original, dialect)  # raises again
        refuse_incapable(model, path, asked.parsed.model_name, arrival.path)
        if dialect is not None:
            refuse_begun_answer(model, fields)
        facts, size = model.facts, len(body.raw)
        if fields.get("tools") and not facts.compiles_tools and self._has_compiling_replica(model):
            facts = replace(facts, compiles_tools=True)
        wanted: Sequence[remote.Wanted] = ()
        if body.fetched is not None:
            # The body now contains the media and is checked as if it had arrived so. No host is allowed any more: only
            # `data:` URLs pass.
            size += remote.put(fields, body.fetched.media)
            checked(fields, path, _without_hosts(facts), size, dialect, given)
        elif model.facts.media_hosts and app.settings.media_egress and path == CHAT:
            checked(fields, path, facts, size, dialect, given)
            wanted = remote.wanted(fields, model.facts.media_hosts)
        else:
            checked(fields, path, _without_hosts(facts), size, dialect, given)
        if (turns := fields.get("messages")) is not None:
            write_turns(turns, engine=model.external is None)
        return wanted, size

    def _has_compiling_replica(self, model: ServedModel) -> bool:
        """Whether a replica makes grammars of tools, although the Model's engine does not: by the chart's settings, or
        while it is replaced."""
        return any(replica.compiles_tools for replica in self._app.directory.snapshot.replicas_of(model))

    def _count(
        self, identity: KeyIdentity, asked: _Asked, model: ServedModel, routed: Routed | None, *, resumed: bool
    ) -> None:
        """Begins the request's meter, or, with its media, tells it the Model that the name means now."""
        app, arrival, fields = self._app, self._arrival, asked.parsed.fields
        path = arrival.engine_path
        if resumed:
            self.meter.reroute(model)
        else:
            self.meter = Meter(
                arrival.id,
                app.settings.installation,
                identity,
                model,
                endpoint=arrival.path,
                model_name=asked.parsed.model_name,
                stream=asked.parsed.stream,
                client_request_id=arrival.client_id,
                gateway=app.boot,
                route=None if routed is None else routed.route,
            )
            self.meter.free = path in TOKENIZING
            if path in PAIRS:
                self.meter.reads(len(pairs_of(fields)[1]), repeated(fields))
            elif asked.form is not None:
                recording = asked.form.recording
                self.meter.hears(recording.most_seconds, recording.milliseconds)
        if path == CHAT and model.facts.media:
            self.meter.sees(media_size(asked.shown))

    def _bounds(self, asked: _Asked, native: NativeApi | None, model: ServedModel) -> tuple[int | None, int | None]:
        """Longest answer in tokens that the client allows, and that the Model allows too. The second is written into
        the body. None: not bounded."""
        path, cap = self._arrival.engine_path, model.max_output_tokens
        if native is None:
            fields = asked.parsed.fields
            allowed = bound_answer(fields, path, None)
            return allowed, allowed if cap is None else bound_answer(fields, path, cap)
        fields = asked.original.fields
        return bound_native(fields, native.bound, path, None), bound_native(fields, native.bound, path, cap)

    def _engine_body(
        self, asked: _Asked, raw: bytes, native: NativeApi | None, model: ServedModel, space: str, id: str
    ) -> _EngineBody:
        path, dialect = self._arrival.engine_path, self._arrival.dialect
        salt = None
        if space != SHARED and takes_salt(path, model):
            salt = self._app.key_ring.cache_salt(model.uid, space)
        salted = salt is not None and needs_salt(path, model)
        if native is not None:
            return _EngineBody(native_body(asked.original.fields, model.engine_name), salted=salted)
        if model.external is not None:
            translated_body = dialect is not None
            encoded = external_body(asked.parsed, path, model.engine_name, translated=translated_body)
            return _EngineBody(encoded, dialect=dialect, salted=salted)
        if asked.form is None:
            return _EngineBody(engine_body(asked.parsed, path, model.engine_name, id, salt), _JSON, dialect, salted)
        form = audioform.engine_form(asked.form, raw, model.engine_name)
        dialect = audioform.STREAM if asked.parsed.stream else None
        return _EngineBody(form.body, form.content_type, dialect, salted)

    def _prompt(
        self, space: str, fields: Mapping[str, Any], model: ServedModel, read: int, marks: Marks | None, among: int
    ) -> Prompt | None:
        """What the choice of a replica `among` so many goes by. `read`: bytes that the engine reads."""
        app, meter = self._app, self.meter
        # While the Model has no replica, the request waits for several, maybe.
        if model.external is not None or meter.free or among == 1:
            return None
        points = () if app.fleet.scores is None else points_of(marks)
        prompt = prompt_of(f"{model.uid} {space}", fields, read, points, medium=meter.media.each)
        return prompt if model.keeps_prefixes else Prompt(prompt.tokens)

    def _marks(self, space: str, fields: Mapping[str, Any], model: ServedModel, among: int) -> Marks | None:
        """Checksums of the prompt's beginnings, for advice and for the choice `among` several replicas."""
        app = self._app
        if model.external is not None or self._arrival.engine_path not in GENERATING or not model.keeps_prefixes:
            return None
        chosen = app.fleet.scores is not None and among != 1
        if not app.traffic.most and not chosen:
            return None
        adapter = "" if model.adapter is None else model.adapter.uid
        return prompt_marks(app.key_ring.mark_secret(model.uid, adapter, space), fields)


def _without_hosts(facts: Facts) -> Facts:
    return replace(facts, media_hosts=_NO_HOSTS) if facts.media_hosts else facts


def _texts(path: str, fields: Mapping[str, Any]) -> int:
    """Texts of a checked body that each have a result in the answer."""
    if path in PAIRS:
        return len(pairs_of(fields)[1])
    return len(prompts_of(fields)) if path in (EMBEDDINGS, CLASSIFY) else 0
