"""What changes on the way to vLLM, and in its errors."""

import json

import pytest

from shoal.core.fields.table import TRANSCRIBE
from shoal.engine.vllm.wire import WIRE


@pytest.mark.parametrize(
    ("said", "told"),
    [
        # The same words where the image has no decoder: the client's file may be good.
        ("Invalid or unsupported audio file.", "the engine's image has no decoder for sound"),
        ("Invalid or corrupted audio data. Ensure the input is a valid file.", "Invalid or corrupted audio data."),
    ],
)
def test_a_file_that_is_not_decoded_may_be_the_images_fault(said: str, told: str) -> None:
    error = {"error": {"message": said, "type": "BadRequestError", "param": None, "code": 400}}
    assert told in json.loads(WIRE.plain_error(json.dumps(error).encode()))["error"]["message"]


@pytest.mark.parametrize(("asked", "does"), [(["segment"], True), (["word", "segment"], False), (["word"], False)])
def test_it_has_no_time_stamps_of_words(asked: list[str], does: bool) -> None:
    assert (WIRE.added(TRANSCRIBE, {"timestamp_granularities[]": asked}) is not None) == does
    assert WIRE.differences.fields[TRANSCRIBE]["timestamp_granularities[]"](asked) == does
