"""Regular expressions that an answer must match.

An engine compiles an expression into a grammar and walks it for each token, in the loop that serves all requests.
xgrammar, SGLang's default, remembers where each repetition began: if a text can be cut into repetitions in many ways,
each token takes longer than the one before. With `(a*a*)*b` the 120th takes 0.9 s, with `a{0,500}a{0,500}b` the 760th
0.6 s. RE2's syntax, which has no look-around and no back-references, is therefore not enough; a pattern must also not

- multiply: RE2 bounds its repetitions, and its program is bounded here;
- repeat something that can continue with a character that it begins with, as in `(a+)+` and `(a?a?)*`;
- have a repetition follow another one with which it shares a character, as in `a*a*`, or anything follow a counted one
  (`a{0,500}`) with which it shares a character.

For the remaining patterns, the next character alone determines whether a repetition continues or begins again.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final, cast

from shoal.core.fields.kinds import Facts, FieldProblem, wrong, wrong_type
from shoal.core.redaction.patterns import PatternInvalid, compiled

LONGEST: Final = 1024
TOO_LARGE: Final = "pattern_too_large"
_MOST_INSTRUCTIONS: Final = 8192
"""Size of RE2's program for a pattern: 26 characters can make a million states."""
MOST_PATTERNS: Final = 64
"""Different ones of a schema: each is compiled in a gateway's event loop."""
MOST_CHARACTERS: Final = 8192
"""Of all different patterns of a schema."""
MOST_TOGETHER: Final = 2 * _MOST_INSTRUCTIONS
"""Size of the programs of all different patterns of a schema."""
_MOST_GROUPS: Final = 32
"""Nesting of groups."""
_ANY: Final = (1 << 129) - 1
"""A set of characters: one bit for each of ASCII, and one for all others."""
_QUANTIFIER: Final = re.compile(r"([*+?]|\{(\d+)(?:(,)(\d*))?\})\??")
_CLASSES: Final = {
    "d": sum(1 << ord(c) for c in "0123456789"),
    "w": sum(1 << n for n in range(128) if chr(n).isalnum() or n == ord("_")),
    "s": sum(1 << ord(c) for c in " \t\n\r\f\v"),
}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


class _Refused(Exception):
    """The pattern may be slow; the message says what it must not contain."""


@dataclass(slots=True)
class _Part:
    """Properties of a part of a pattern. Sets are sets of characters."""

    nullable: bool = True
    first: int = 0
    """With which it can begin."""
    first_repeated: int = 0
    """With which it can begin, inside a repetition."""
    more: int = 0
    """With which it can continue where it might also end."""
    star: int = 0
    """Those of `more` that come from a repetition without bound."""
    counted: int = 0
    """Those of `more` that come from a repetition with a bound."""


@dataclass(frozen=True, slots=True)
class Pattern:
    describe: str = (
        f"a regular expression in RE2's syntax of at most {LONGEST} characters, whose repetitions can be told apart by "
        "the next character"
    )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return pattern_problem(value, at) if isinstance(value, str) else wrong_type(at, self.describe)


@dataclass(slots=True)
class Patterns:
    """The patterns of one schema, which are bounded each and all together."""

    _seen: set[str] = field(default_factory=set[str])
    _characters: int = 0
    _instructions: int = 0

    def problem(self, pattern: str, at: str) -> FieldProblem | None:
        """What is wrong with one, or with all so far; None: nothing."""
        if pattern in self._seen:
            return None
        self._seen.add(pattern)
        self._characters += len(pattern)
        if len(self._seen) > MOST_PATTERNS or self._characters > MOST_CHARACTERS:
            bound = f"at most {MOST_PATTERNS} different ones in a schema, of {MOST_CHARACTERS} characters together"
            return wrong(at, f"one of fewer or shorter patterns: {bound}", TOO_LARGE)
        found = _judged(pattern, at)
        if not isinstance(found, int):
            return found
        self._instructions += found
        if self._instructions > MOST_TOGETHER:
            what = (
                f"one of fewer repetitions in all patterns of a schema: they unroll to more than {MOST_TOGETHER} steps"
            )
            return wrong(at, what, TOO_LARGE)
        return None


def pattern_problem(pattern: str, at: str) -> FieldProblem | None:
    """What is wrong with a regular expression; None: nothing."""
    found = _judged(pattern, at)
    return None if isinstance(found, int) else found


def _judged(pattern: str, at: str) -> FieldProblem | int:
    """What is wrong with a regular expression, else the size of its program."""
    if len(pattern) > LONGEST:
        return wrong(at, f"a regular expression of at most {LONGEST} characters", "string_too_long")
    try:
        program = compiled(pattern.encode())
    except UnicodeEncodeError:
        return wrong(at, "text")
    except PatternInvalid as error:
        return wrong(at, f"a regular expression in RE2's syntax, without look-around and references back ({error})")
    size = int(cast(Any, program).programsize)
    if size > _MOST_INSTRUCTIONS:
        return wrong(at, "a smaller regular expression: its repetitions multiply", TOO_LARGE)
    try:
        _Reader(pattern).whole()
    except _Refused as refused:
        return wrong(at, f"a regular expression without {refused}", "pattern_not_linear")
    return size


class _Reader:
    """Reads a pattern that RE2 has accepted."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._groups = 0

    def whole(self) -> _Part:
        part = self._either()
        if self._at < len(self._text):
            raise _Refused("unbalanced brackets")
        return part

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, characters: int = 1) -> str:
        taken = self._text[self._at : self._at + characters]
        self._at += characters
        if len(taken) < characters:
            raise _Refused("an unfinished escape or class")
        return taken

    def _either(self) -> _Part:
        """Parses alternatives."""
        found = self._sequence()
        while self._peek() == "|":
            self._at += 1
            other = self._sequence()
            found = _Part(
                found.nullable or other.nullable,
                found.first | other.first,
                found.first_repeated | other.first_repeated,
                found.more | other.more,
                found.star | other.star,
                found.counted | other.counted,
            )
        return found

    def _sequence(self) -> _Part:
        found = _Part()
        while (character := self._peek()) and character not in "|)":
            found = _after(found, self._repeated(self._atom()))
        return found

    def _atom(self) -> _Part:
        character = self._take()
        if character == "(":
            return self._group()
        if character in "^$":
            return _Part()
        if character == "[":
            return _one(self._class())
        if character == ".":
            return _one(_ANY & ~(1 << 10))
        return _one(self._escape() if character == "\\" else _bit(character))

    def _group(self) -> _Part:
        self._groups += 1
        if self._groups > _MOST_GROUPS:
            raise _Refused(f"more than {_MOST_GROUPS} groups inside each other")
        if self._peek() == "?" and self._take(2) != "?:":
            raise _Refused("flags and names of groups")
        found = self._either()
        if self._take() != ")":
            raise _Refused("unbalanced brackets")
        self._groups -= 1
        return found

    def _repeated(self, part: _Part) -> _Part:
        times = _QUANTIFIER.match(self._text, self._at)
        if times is None:
            return part
        self._at = times.end()
        if _QUANTIFIER.match(self._text, self._at):
            raise _Refused("a repetition of a repetition")
        if times[2] is None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[times[1]]
        else:
            least = int(times[2])
            most = least if times[3] is None else int(times[4]) if times[4] else None
        return _times(part, least, most)

    def _escape(self) -> int:
        character = self._take()
        if character in "dws":
            return _CLASSES[character]
        if character in "DWS":
            return _ANY & ~_CLASSES[character.lower()]
        if character == "x":
            code = self._take(2)
            if code[0] == "{":
                code = code[1:]
                while not code.endswith("}"):
                    code += self._take()
                code = code[:-1]
            return _bit(chr(int(code, 16)))
        if character in _ESCAPES:
            return _bit(_ESCAPES[character])
        if character.isalnum():
            raise _Refused(f"\\{character}")
        return _bit(character)

    def _class(self) -> int:
        if negated := self._peek() == "^":
            self._at += 1
        found, before = 0, ""
        while True:
            character = self._take()
            if character == "]" and before:
                break
            if character == "[" and self._peek() == ":":
                raise _Refused("named classes")
            low = self._escape() if character == "\\" else _bit(character)
            before = character
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                end = self._take()
                high = self._escape() if end == "\\" else _bit(end)
                # From the lowest bit of one to the highest of the other.
                low = ((1 << high.bit_length()) - 1) & ~((low & -low) - 1)
            found |= low
        return _ANY & ~found | (1 << 128) if negated else found


def _bit(character: str) -> int:
    return 1 << min(ord(character), 128)


def _one(characters: int) -> _Part:
    return _Part(nullable=False, first=characters)


def _after(left: _Part, right: _Part) -> _Part:
    """One part followed by another."""
    if left.counted & right.first or left.star & right.first_repeated:
        raise _Refused("a repetition followed by what it shares a character with, as `a*a*`")
    return _Part(
        left.nullable and right.nullable,
        left.first | (right.first if left.nullable else 0),
        left.first_repeated | (right.first_repeated if left.nullable else 0),
        right.more | (left.more | right.first if right.nullable else 0),
        right.star | (left.star if right.nullable else 0),
        right.counted | (left.counted if right.nullable else 0),
    )


def _times(part: _Part, least: int, most: int | None) -> _Part:
    """A part, repeated."""
    nullable = least == 0 or part.nullable
    if most is None or most > 1:
        if part.more & part.first:
            raise _Refused("a repetition of what can go on with the character that it begins with, as `(a+)+`")
        if least != most:
            return _Part(
                nullable,
                part.first,
                part.first,
                part.more | part.first,
                part.star | (part.first if most is None else 0),
                part.counted | (0 if most is None else part.first),
            )
    return _Part(nullable, part.first, part.first_repeated, part.more, part.star, part.counted)
