"""As `test_fields_fuzz.py`, for the endpoints that rank, score, label and tokenize: what passes the check of the fields
leaves an engine alive and as quick as before."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from shoal.core.fields.table import CLASSIFY, DETOKENIZE, RERANK, SCORE, TABLE, TOKENIZE
from tests.contract.test_fields_fuzz import FROM, REAL, REQUESTS, ROOMY, SEED, Mutator, fuzz, kinds
from tests.support.behaviour import WORDS
from tests.support.classifiers import make_classifier
from tests.support.engines import MODEL, Kind, running_engine

NEEDED: Final = {SCORE: ("items",), RERANK: ("query", "documents"), CLASSIFY: ("input",), DETOKENIZE: ("tokens",)}
GENERATES: Final = (SCORE, TOKENIZE, DETOKENIZE)
CLASSIFIES: Final = (RERANK, SCORE, CLASSIFY)
LABELS: Final[dict[str, tuple[str, ...]]] = {"SGLang": ("a", "b", "c"), "vLLM": ("a",)}
"""SGLang ranks by the first of several labels; vLLM serves rerank and score of a model with one label only."""
CANARIES: Final[dict[tuple[str, ...], tuple[str, dict[str, Any]]]] = {
    GENERATES: (SCORE, {"model": "fuzz", "query": "a", "items": [" canary"], "label_token_ids": [300]}),
    CLASSIFIES: (CLASSIFY, {"model": "fuzz", "input": "a canary"}),
}


PASSING: Final = (
    "hello",
    "a ",
    "\x00",
    "\ud7ff",
    "\u202e",
    "\u200b",
    "\ufeff",
    "\x7f",
    "<|eos|>",
    "{{ 1/0 }}",
    "<image>",
)


class Scorer(Mutator):
    """Bodies of these endpoints, the same for the same seed."""

    def request(self) -> tuple[str, dict[str, Any]]:
        pick = self.random
        path = pick.choice(self.paths)
        body: dict[str, Any] = {"model": "fuzz"}
        for name in (
            *NEEDED.get(path, ()),
            *pick.sample(sorted(TABLE[path].keys() - {"model"}), pick.choice((0, 0, 1, 2))),
        ):
            body[name] = self.value(name, path)
        if path == SCORE and self.paths == GENERATES and pick.random() < 0.8:
            body["label_token_ids"] = sorted(set(self._tokens()))
        if path == TOKENIZE and pick.random() < 0.8:
            body = {key: value for key, value in body.items() if key not in ("prompt", "messages")}
            body |= {"messages": self._messages()} if pick.random() < 0.5 else {"prompt": self._prompt()}
        return path, body

    def _user(self) -> str:
        return "me"

    def _query(self) -> Any:
        return self.random.choice((self._one()[:2000], "hello", "hello", self._tokens()))

    def _documents(self) -> Any:
        pick = self.random
        if pick.random() < 0.02:
            return ["x"] * pick.choice((1024, 1025))
        return [self._one() for _ in range(pick.choice((0, 1, 1, 2, 2, 5, 20)))]

    def _one(self) -> str:
        """Mostly a text that passes: one that does not is the end of a whole list."""
        return self._text() if self.random.random() < 0.2 else self.random.choice(PASSING)

    def _items(self) -> Any:
        tokens, texts = [self._tokens() for _ in range(self.random.choice((1, 2, 9)))], self._documents()
        return self.random.choice((self._text(), texts, texts, tokens, [[], [1]]))

    def _label_token_ids(self) -> Any:
        return self.random.choice((self._tokens(), [300], [300, 301], list(range(128)), list(range(129))))

    def _temperature(self) -> Any:
        return self.random.choice((0.001, 1, 1000, 0.5, 0, 1e-300))

    def _prompt(self) -> Any:
        return self.random.choice((self._text(), [self._text()], ["", "x"], ["x"] * 128, ["x"] * 129))


@pytest.mark.parametrize("paths", [GENERATES, CLASSIFIES], ids=["generates", "classifies"])
@pytest.mark.parametrize("kind", kinds(400 + 2 * REQUESTS))
async def test_what_passes_leaves_an_engine_that_scores_alive_and_quick(
    kind: Kind, paths: tuple[str, ...], tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = WORDS[kind]
    model, more = MODEL, ROOMY[words.name]
    if paths == CLASSIFIES:
        model, more = make_classifier(tmp_path / "model", LABELS[words.name]), (*more, *words.pooling)
    with running_engine(kind, tmp_path / "run", *more, model=model) as engine, capsys.disabled():
        counts = await fuzz(
            engine, REQUESTS if kind in REAL else 300, SEED, FROM,
            mutator=Scorer(SEED, paths), alive=CANARIES[paths], generates=paths == GENERATES,
        )  # fmt: skip
    record_property("fuzz", dict(counts))
    with capsys.disabled():
        print(f"\n{kind}: {json.dumps(counts.most_common(40), indent=1)}")
    assert counts["passed"] > counts["refused"] / 4
