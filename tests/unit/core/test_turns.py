"""Messages of a chat as engines read them (`core/fields/turns.py`)."""

from typing import Any

import pytest

from shoal.core.fields.turns import write_turns


def turn(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


USER = turn("user", "hi")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([turn("developer", "A"), USER], [turn("system", "A"), USER]),
        ([turn("system", "A"), turn("developer", "B"), USER], [turn("system", "A\n\nB"), USER]),
        (
            [turn("developer", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]), turn("system", "C")],
            [turn("system", "A\nB\n\nC")],
        ),
        # Later ones stay where they are.
        ([USER, turn("developer", "A"), USER], [USER, turn("system", "A"), USER]),
        # What is no text is not joined.
        ([turn("developer", None), turn("system", "A")], [turn("system", None), turn("system", "A")]),
        # Without a developer nothing changes.
        ([turn("system", "A"), turn("system", "B"), USER], [turn("system", "A"), turn("system", "B"), USER]),
    ],
)
def test_what_a_developer_says_is_the_systems_at_an_engine(given: list[Any], expected: list[Any]) -> None:
    messages = [dict(message) for message in given]
    write_turns(messages, engine=True)
    assert messages == expected
    outside = [dict(message) for message in given]
    write_turns(outside, engine=False)
    assert outside == given
