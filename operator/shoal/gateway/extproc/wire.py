"""Between Envoy's messages and those of the conversation (`core/extproc.py`)."""

from collections.abc import Mapping
from typing import Final

from google.protobuf.json_format import MessageToDict

from shoal.core.extproc import (
    DESTINATION,
    LOAD_BALANCING,
    SUBSET,
    AnswerMutation,
    BodyPart,
    Headers,
    Immediate,
    Message,
    RequestMutation,
)
from shoal.gateway.extproc.protocol import external_processor_pb2 as pb

_NAMESPACES: Final = (SUBSET, LOAD_BALANCING)
_OVERWRITE: Final = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers_of(headers: pb.HeaderMap) -> Headers:
    return [(each.key.encode("latin-1", "replace"), each.raw_value or each.value.encode()) for each in headers.headers]


def metadata_of(request: pb.ProcessingRequest) -> Mapping[str, object]:
    """What Envoy says of the request, in the namespaces that are read."""
    found = request.metadata_context.filter_metadata
    return {name: MessageToDict(found[name]) for name in _NAMESPACES if name in found}


def message(told: Message) -> pb.ProcessingResponse:
    match told:
        case RequestMutation():
            common = pb.CommonResponse(header_mutation=_mutation(told.set, told.remove))
            made = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
            made.dynamic_metadata.get_or_create_struct(LOAD_BALANCING)[DESTINATION] = told.endpoint
            return made
        case AnswerMutation():
            common = pb.CommonResponse(header_mutation=_mutation(told.set, told.remove))
            return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))
        case BodyPart():
            streamed = pb.StreamedBodyResponse(body=told.data, end_of_stream=told.last)
            body = pb.BodyResponse(
                response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
            )
            if told.of_request:
                return pb.ProcessingResponse(request_body=body)
            return pb.ProcessingResponse(response_body=body)
        case Immediate():
            return pb.ProcessingResponse(
                immediate_response=pb.ImmediateResponse(
                    status=pb.HttpStatus(code=told.status),
                    headers=_mutation(told.headers, ()),
                    body=told.body,
                    details="shoal",
                )
            )
        case _:
            trailers = pb.TrailersResponse(header_mutation=_mutation((), told.remove))
            if told.of_request:
                return pb.ProcessingResponse(request_trailers=trailers)
            return pb.ProcessingResponse(response_trailers=trailers)


def _mutation(wanted: Headers, removed: tuple[bytes, ...]) -> pb.HeaderMutation:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name.decode("latin-1"), raw_value=value), append_action=_OVERWRITE
            )
            for name, value in wanted
        ],
        remove_headers=[name.decode("latin-1") for name in removed],
    )
