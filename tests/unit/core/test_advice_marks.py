"""What a gateway keeps of prompts: enough to see what two have in common, and nothing else."""

from typing import Any

import pytest

from shoal.api.traffic import MARK, TrafficRow
from shoal.core.advice.facts import PromptMark, after_answer, prompt_marks_of
from shoal.core.advice.marks import MarkSealer, prompt_marks

SYSTEM = {"role": "system", "content": "You are a careful assistant of the harbour office. " * 20}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def marks(
    fields: dict[str, Any], *, secret: int = 7, tokens: int = 10_000, key: bytes = b"key"
) -> tuple[PromptMark, ...]:
    packed = prompt_marks(secret, fields)
    assert packed is not None
    row = TrafficRow(0.0, 0, 0, 0, tokens, 0, 0, 0, 0, 0, 0, len(packed) // 8)
    return prompt_marks_of(row, MarkSealer(key).seal(packed))


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def common(first: tuple[PromptMark, ...], second: tuple[PromptMark, ...]) -> set[int]:
    return {mark.key for mark in first} & {mark.key for mark in second}


def test_a_later_turn_begins_with_the_earlier_prompt_and_its_answer() -> None:
    first = marks(chat(SYSTEM, user("When does the tide turn?")))
    later = marks(chat(SYSTEM, user("When does the tide turn?"), answer("At nine."), user("And tomorrow?")))
    whole = first[-1].key
    keys = [mark.key for mark in later]
    assert whole in keys
    assert keys[keys.index(whole) + 1] == after_answer(whole)


def test_a_much_later_turn_still_has_the_marks_of_the_turns_before_it() -> None:
    turns: list[dict[str, Any]] = [SYSTEM]
    wholes: list[int] = []
    for number in range(12):
        turns.append(user(f"Question {number}: " + "about ships " * 30))
        wholes.append(marks(chat(*turns))[-1].key)
        turns.append(answer(f"Answer {number}: " + "with anchors " * 50))
    keys = [mark.key for mark in marks(chat(*turns, user("the last one")))]
    assert set(wholes[-3:]) <= set(keys)
    assert after_answer(wholes[-1]) in keys


def test_questions_on_one_long_document_have_its_beginning_in_common() -> None:
    document = "".join(f"Paragraph {number} of the treaty. " for number in range(2000))
    one, other = marks(chat(user(f"{document} Who signed?"))), marks(chat(user(f"{document} When?")))
    shared = [mark for mark in one if mark.key in common(one, other)]
    assert shared[-1].tokens > 10_000 * 2 / 3
    assert one[-1].key != other[-1].key


@pytest.mark.parametrize("at", [0, 300, 3_000, 7_900])
def test_a_changed_character_changes_all_marks_after_it(at: int) -> None:
    text = "".join(f"line {number:05d} " for number in range(1000))
    changed = f"{text[:at]}#{text[at + 1 :]}"
    one, other = prompt_marks(7, {"prompt": text}), prompt_marks(7, {"prompt": changed})
    assert one is not None
    assert other is not None
    for mark in range(0, len(one), 8):
        before = int.from_bytes(one[mark + 4 : mark + 8], "little") <= at
        assert (one[mark : mark + 4] == other[mark : mark + 4]) is before


def test_equal_prompts_of_two_tenants_have_nothing_in_common() -> None:
    fields = chat(SYSTEM, user("The same words. " * 500))
    assert not common(marks(fields, secret=1), marks(fields, secret=2))


def test_what_leaves_the_process_cannot_be_computed_without_the_key() -> None:
    fields = chat(SYSTEM, user("The same words. " * 500))
    assert not common(marks(fields, key=b"one key"), marks(fields, key=b"another"))
    packed = prompt_marks(7, fields)
    assert packed is not None
    sealed = MarkSealer(b"key").seal(packed)
    for name, _ in MARK.iter_unpack(sealed):
        assert name[:4] not in packed
        assert name[4:] not in packed


def test_tools_and_calls_are_part_of_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "looks it up " * 100}}
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    with_call = chat(user("hello " * 100), {"role": "assistant", "content": None, "tool_calls": [call]}, user("go on"))
    plain = chat(user("hello " * 100), answer(""), user("go on"))
    assert marks(with_call)[-1].key != marks(plain)[-1].key
    assert not common(marks({**plain, "tools": [tool]}), marks(plain))


@pytest.mark.parametrize(
    "fields",
    [
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}),
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": []},
        {"prompt": [2**70]},
        {"prompt": None},
        {},
        chat(*[user("again")] * 1000),
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": 7}]},
        {"prompt": ""},
    ],
)
def test_what_is_not_understood_has_no_marks(fields: dict[str, Any]) -> None:
    assert prompt_marks(7, fields) is None


def test_token_ids_and_texts_in_parts_have_marks() -> None:
    one = marks({"prompt": list(range(5000))})
    other = marks({"prompt": [*range(4000), 1, 2, 3]})
    assert common(one, other)
    whole, parts = user("One. Two."), user("")
    parts["content"] = [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]
    assert marks(chat(whole)) == marks(chat(parts))


def test_marks_of_the_largest_prompts_are_few() -> None:
    huge = prompt_marks(7, {"prompt": "x" * (16 << 20)})
    long = prompt_marks(7, chat(*[SYSTEM, *[user("a " * 9000), answer("b " * 9000)] * 60, user("end")]))
    for packed in (huge, long):
        assert packed is not None
        assert len(packed) // 8 <= 40


def test_lengths_are_in_the_engines_tokens() -> None:
    found = marks(chat(SYSTEM, user("And now? " * 400)), tokens=1000)
    assert [mark.tokens for mark in found] == sorted(mark.tokens for mark in found)
    assert found[-1].tokens == 1000
    assert found[0].tokens == pytest.approx(1000 * 1020 / (1020 + 3600), abs=2)
