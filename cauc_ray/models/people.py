"""A last stage that is a person, who answers in words through files, or nobody."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic_core import to_json

from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import make_folder, write_bytes
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.models.answers import SAID, Answers, Batch, Model, ModelFacts, batch_size, require_columns
from cauc_ray.models.kind import InputColumns, KindSpec, Location, Placement
from cauc_ray.models.words import Rule, in_words
from cauc_ray.numbers.answer_arrays import ANSWER
from cauc_ray.numbers.answer_keys import AnswerFormat
from cauc_ray.numbers.answer_rules import DEFAULT_RULE
from cauc_ray.numbers.logits import ANSWERS, LogitKind

ASKED, ANSWERED, SUFFIX = "asked", "answered", ".jsonl"


class SilentSpec(KindSpec):
    """A stage without a model that answers in words.

    Attributes:
        rule: By which answers are the same, as of the pool's models.
    """

    LOGITS: ClassVar[LogitKind] = ANSWERS
    rule: Rule = DEFAULT_RULE

    @property
    def answer_format(self) -> AnswerFormat:
        """Return that it says how sure it is of nothing."""
        return AnswerFormat(self.rule, ())


class HumanSpec(SilentSpec):
    """`{kind: human, queue: reviews}`: a person, whose price is the stage's cost.

    Rows are written to queue/asked/*.jsonl, with example_id, columns and what stages before have said. Their answers
    are read from queue/answered/*.jsonl, with example_id and answer (null for a row that has none). A row without one
    yet is a failed row; `cauc run --resume --retry-failed` takes those that have come.

    Attributes:
        queue: A folder or a URI.
        columns: Those that a person sees; all of the input by default.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.people:Human"
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = KindSpec.EXCLUDED_FROM_IDENTITY | {"queue"}
    TAKES_LONG: ClassVar[bool] = True
    kind: Literal["human"]
    queue: Location
    columns: tuple[str, ...] = ()

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns that a person sees, and the ids."""
        names = frozenset(self.columns)
        return InputColumns(names | {"example_id"}, frozenset() if names else None)


class AbstainSpec(SilentSpec):
    """`{kind: abstain}`: nobody, at no cost: rows that reach it have no answer."""

    LOADER: ClassVar[str] = "cauc_ray.models.people:Nobody"
    kind: Literal["abstain"]

    @property
    def columns_read(self) -> InputColumns:
        """Return that it reads none."""
        return InputColumns()


class Nobody(Model):
    """Has no answer."""

    def __init__(self, spec: AbstainSpec, placement: Placement) -> None:
        self.facts, self._words = ModelFacts("nobody", ANSWERS), spec.answer_format

    def __call__(self, batch: Batch) -> Answers:
        """Return that rows have no answer, at no cost."""
        n = batch_size(batch)
        return in_words([None] * n, {}, self._words, costs=np.zeros(n))


class Human(Model):
    """Asks a person by files."""

    def __init__(self, spec: HumanSpec, placement: Placement) -> None:
        self.facts, self._spec = ModelFacts(f"a person, by {spec.queue}", ANSWERS), spec
        self._queue = path_of(spec.queue)
        self._asked: dict[str, frozenset[str]] = {}

    def __call__(self, batch: Batch) -> Answers:
        """Return the answers that have come, and ask for the others.

        Raises:
            DataError: It lacks ids.
            ConfigError: A file of the queue cannot be read.
        """
        require_columns(batch, "example_id")
        ids = [str(example) for example in batch["example_id"]]
        answered = self._answers()
        waiting = [row for row, example in enumerate(ids) if example not in answered]
        self._ask(batch, ids, waiting)
        why = f"it waits for a person, who answers by {self._queue / ANSWERED}"
        texts = [answered.get(example) for example in ids]
        return in_words(texts, {}, self._spec.answer_format, dict.fromkeys(waiting, why), waiting=frozenset(waiting))

    def _answers(self) -> dict[str, str | None]:
        """Return the answers that have come by the ids of their rows: the last of several."""
        return {
            str(row["example_id"]): answer if isinstance(answer, str | None) else json.dumps(answer, ensure_ascii=False)
            for path in _files(self._queue / ANSWERED)
            for row in _rows(path, ANSWER)
            for answer in [row[ANSWER]]
        }

    def _ask(self, batch: Batch, ids: Sequence[str], rows: Sequence[int]) -> None:
        """Write the rows that nobody has asked for before."""
        for path in _files(self._queue / ASKED):
            if path.name not in self._asked:
                self._asked[path.name] = frozenset(str(row["example_id"]) for row in _rows(path))
        before = frozenset[str]().union(*self._asked.values())
        new = {ids[row]: row for row in rows if ids[row] not in before}
        if not new:
            return
        names = self._spec.columns or sorted(batch.keys() - {"example_id", SAID})
        require_columns(batch, *names)
        lines = [
            {"example_id": example, "columns": {name: batch[name][row] for name in names}}
            | ({"said": batch[SAID][row]} if SAID in batch else {})
            for example, row in new.items()
        ]
        options: dict[str, Any] = {"bytes_mode": "base64", "inf_nan_mode": "null", "fallback": _plain}
        content = b"".join(to_json(line, **options) + b"\n" for line in lines)
        name = hashlib.blake2b(content, digest_size=8).hexdigest() + SUFFIX
        make_folder(self._queue / ASKED)
        write_bytes(self._queue / ASKED / name, content)
        self._asked[name] = frozenset(new)


def _files(folder: AnyPath) -> list[AnyPath]:
    """Return the files of rows in a folder, by name."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.endswith(SUFFIX)), key=lambda path: path.name)


def _rows(path: AnyPath, *fields: str) -> list[Mapping[str, Any]]:
    """Return the rows of a file. Raises ConfigError for a line that is not an object with an id and other fields."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            [row[name] for name in ("example_id", *fields)]
        except (ValueError, TypeError, KeyError, RecursionError):
            needed = " and ".join(("example_id", *fields))
            raise ConfigError(f"{path}, line {number}: a JSON object with {needed} is needed") from None
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
