"""Multiple-choice tasks from task files of EleutherAI's evaluation harness, with their data files.

A task file is YAML. Its templates are Jinja. Its data are JSON lines (or a JSON list); their objects are
documents:

    task: capitals
    dataset_path: json
    dataset_kwargs: {data_files: {test: test.jsonl, train: train.jsonl}}
    test_split: test
    fewshot_split: train
    output_type: multiple_choice
    doc_to_text: "Question: {{question}}\\nAnswer:"
    doc_to_choice: "{{choices}}"
    doc_to_target: answer

The prompts equal the harness's (ConfigurableTask of lm_eval/api/task.py, version 0.4.13). A key that is
not supported is rejected by name, so that no result belongs to another task.

The files are not trusted. YAML must not have tags, or aliases, which can grow without bounds; its depth is
limited. Templates are rendered in a process of their own (renderer.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from hotset.errors import FormatError, InvalidRequestError, TokenizerError
from hotset.escaping import clause
from hotset.files import expanded, missing, read_small_file, read_small_text
from hotset.parameters import shown
from hotset.text.few_shot import SAMPLERS, SEED, Shots, with_examples
from hotset.text.multiple_choice import Question, json_object
from hotset.text.renderer import TASK, Renderer

_LONGEST_FILE = 1 << 18  # bytes of YAML: the harness's longest have about 10,000
_LONGEST_DATA = 1 << 30
_LONGEST_NUMBER = 64  # characters: PyYAML's time for 1:1:1:… is quadratic
_NUMBER = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|[0-9_:.]+)")
_DEEPEST = 64  # PyYAML's time for [[[[… is quadratic
MOST_NULLS = 1 << 22  # fields that documents lack and others have
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_TEMPLATES = ("doc_to_text", "doc_to_choice", "doc_to_target", "description")
_TAKEN = {
    "task", "dataset_path", "dataset_kwargs", *_SPLITS, *_TEMPLATES, "output_type", "num_fewshot",
    "target_delimiter", "fewshot_delimiter", "fewshot_config", "metric_list",
}  # fmt: skip
# Keys that change neither prompts nor results.
_WITHOUT_EFFECT = {"tag", "task_alias", "metadata", "should_decontaminate", "doc_to_decontamination_query"}
_METRICS = ("acc", "acc_norm")


@dataclass(frozen=True)
class TaskQuestions:
    """Questions of a task. questions: each with `n_shots` examples in its context. files: all files read."""

    questions: list[Question]
    n_shots: int
    files: tuple[Path, ...] = ()


def is_task_file(path: Path) -> bool:
    """Return whether the name ends as a YAML file's does."""
    return path.suffix.lower() in (".yaml", ".yml")


def read_task(
    path: Path, n_shots: int | None = None, seed: int = SEED, limit: int | None = None
) -> TaskQuestions:
    """Return the questions of a task file: of its test split, otherwise of its validation split.

    n_shots: examples before each question, in place of the file's `num_fewshot`. seed: of the sampler. limit:
    the maximum number of questions, from the first on. Data paths are relative to the task file's folder.
    Raises FormatError for unsupported keys and invalid questions, InvalidRequestError for missing data files.
    """
    with ExitStack() as renderers:
        return _TaskFile(path, renderers).questions(n_shots, seed, limit)


@dataclass(frozen=True)
class _Document:
    fields: dict[str, Any]
    where: str


class _TaskFile:
    """A checked task file. renderers: closes the processes of its templates."""

    def __init__(self, path: Path, renderers: ExitStack) -> None:
        self._path = path
        self._given = _read_yaml(path)
        self._check_keys()
        self._name = self._text("task")
        self._files = self._data_files()
        self._sampler, self._fewshot_split = self._fewshot_config()
        self._delimiter = self._text("target_delimiter", " ")
        self._question_delimiter = self._text("fewshot_delimiter", "\n\n")
        self._text_of = _ValueSource("doc_to_text", self._text("doc_to_text"), renderers)
        self._description = _ValueSource("description", self._text("description", ""), renderers)
        self._choices_of = self._choices(renderers)
        self._target_of = self._target(renderers)

    def questions(self, n_shots: int | None, seed: int, limit: int | None) -> TaskQuestions:
        n = self._count("num_fewshot") if n_shots is None else n_shots
        split = self._split("test_split") or self._split("validation_split")
        if split is None:
            raise self._error("names no test_split or validation_split to take questions from")
        documents = self._documents(split)
        questions = (self._question(one, described=True) for one in islice(documents, limit))
        examples: list[_Document] = []
        if n:
            own = self._fewshot_split
            others = map(self._split, ("training_split", "validation_split", "test_split"))
            examples = self._documents(own or next(other for other in others if other))
        prompts = with_examples(
            questions,
            [one.fields for one in examples],
            cache(lambda i: self._question(examples[i], described=False)),
            # The harness compares the names of the two splits, even if neither is given.
            Shots(
                n,
                seed,
                self._sampler,
                self._question_delimiter,
                self._fewshot_split == self._split("test_split"),
            ),
            str(self._path),
        )
        files = (self._path, *(file for files in self._files.values() for file in files))
        return TaskQuestions(prompts, n, files)

    # ---- keys of the file ----

    def _error(self, said: str) -> FormatError:
        return FormatError(f"{self._path} {said}")

    def _check_keys(self) -> None:
        for key in self._given:
            if key not in _TAKEN | _WITHOUT_EFFECT:
                raise self._error(
                    f"has the key {clause(shown(key))}, which is not supported; a task file may have "
                    f"{', '.join(sorted(_TAKEN))}"
                )
        for key, only in (("output_type", "multiple_choice"), ("dataset_path", "json")):
            if (value := self._given.get(key)) != only:
                raise self._error(
                    f"has {clause(shown(value))} as {key}; only {only} is supported"
                    + (": files of JSON lines, which dataset_kwargs names" if only == "json" else "")
                )
        for metric in self._list("metric_list"):
            rest = {"metric", "aggregation", "higher_is_better"}
            if not (
                isinstance(metric, dict)
                and metric.get("metric") in _METRICS
                and metric.keys() <= rest
                and metric.get("aggregation", "mean") == "mean"
                and metric.get("higher_is_better", True) is True
            ):
                raise self._error(
                    f"has {clause(shown(metric))} in metric_list; only acc and acc_norm are supported, with "
                    "the aggregation mean"
                )

    def _text(self, key: str, default: str | None = None) -> str:
        value = self._given.get(key, default)
        if not isinstance(value, str):
            raise self._error(f"must have a text as {key}, not {clause(shown(value))}")
        return value

    def _split(self, key: str) -> str | None:
        return self._text(key) if key in self._given else None

    def _count(self, key: str) -> int:
        value = self._given.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(f"must have a number of 0 or more as {key}, not {clause(shown(value))}")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._given.get(key, [])
        if not isinstance(value, list):
            raise self._error(f"must have a list as {key}, not {clause(shown(value))}")
        return value

    def _mapping(self, key: str, known: set[str]) -> dict[str, Any]:
        value = self._given.get(key, {})
        if not isinstance(value, dict):
            raise self._error(f"must have a mapping as {key}, not {clause(shown(value))}")
        if unknown := value.keys() - known:
            names = ", ".join(clause(shown(name)) for name in unknown)
            raise self._error(
                f"has {names} in {key}, which is not supported; it may have {', '.join(sorted(known))}"
            )
        return value

    def _data_files(self) -> dict[str, list[Path]]:
        """Return the data files by split."""
        given: Any = self._mapping("dataset_kwargs", {"data_files"}).get("data_files")
        splits = given if isinstance(given, dict) else {"train": given}  # as in the library `datasets`
        found = {}
        for split, files in splits.items():
            names: list[Any] = files if isinstance(files, list) else [files]
            if not isinstance(split, str) or not names or not all(isinstance(name, str) for name in names):
                raise self._error("must have a file, or a list of files, for each split in data_files")
            if remote := next((name for name in names if "://" in name), None):
                raise self._error(
                    f"names {clause(shown(remote))} as data; only files on this machine are read"
                )
            found[split] = [self._path.parent / expanded(name) for name in names]
        return found

    def _fewshot_config(self) -> tuple[str, str | None]:
        """Return the sampler and the split of the examples."""
        given = self._mapping("fewshot_config", {"sampler", "split"})
        sampler, split = given.get("sampler", "default"), given.get("split", self._split("fewshot_split"))
        if sampler not in SAMPLERS:
            raise self._error(
                f"has {clause(shown(sampler))} as sampler; only {' and '.join(SAMPLERS)} are supported"
            )
        if not isinstance(split, str | None):
            raise self._error(f"must have a text as split of fewshot_config, not {clause(shown(split))}")
        return sampler, split

    def _choices(self, renderers: ExitStack) -> Callable[[_Document], Any]:
        given = self._given.get("doc_to_choice")
        if isinstance(given, str):
            return _ValueSource("doc_to_choice", given, renderers).literal
        texts = list(given.values()) if isinstance(given, dict) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self._error(
                "must have a template or a list of texts as doc_to_choice; in YAML quote yes, no and numbers"
            )
        return lambda _: texts

    def _target(self, renderers: ExitStack) -> Callable[[_Document], Any]:
        given = self._given.get("doc_to_target")
        if isinstance(given, int):
            return lambda _: given
        if not isinstance(given, str):
            raise self._error(
                f"must have a template or a number as doc_to_target, not {clause(shown(given))}"
            )
        return _ValueSource("doc_to_target", given, renderers).value

    # ---- documents ----

    def _documents(self, split: str) -> list[_Document]:
        if split not in self._files:
            raise self._error(
                f"names the split {clause(shown(split))}; data_files has {', '.join(map(repr, self._files))}"
            )
        found = [one for file in self._files[split] for one in _read_documents(file)]
        if not found:
            raise self._error(f"has no documents in the split {clause(shown(split))}")
        # Documents are rows of a table: a field that only some of them have is null in the others.
        names = dict.fromkeys(name for one in found for name in one.fields)
        if sum(len(names) - len(one.fields) for one in found) > MOST_NULLS:
            raise self._error(
                f"has documents in the split {clause(shown(split))} that have too few fields in common: "
                f"{len(found)} with {len(names)} fields in all"
            )
        return [replace(one, fields={name: one.fields.get(name) for name in names}) for one in found]

    def _question(self, document: _Document, *, described: bool) -> Question:
        where = document.where
        context = self._text_of.value(document)
        if not isinstance(context, str):
            raise FormatError(
                f"{where}: doc_to_text gives {clause(shown(context))}, and must give a text; tasks with a "
                "context for each choice are not supported"
            )
        choices = self._choices_of(document)
        if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
            raise FormatError(
                f"{where}: doc_to_choice gives {clause(shown(choices))}, and must give a list of texts"
            )
        target = self._target_of(document)
        if isinstance(target, str) and target in choices:
            target = choices.index(target)
        if not isinstance(target, int):
            raise FormatError(
                f"{where}: doc_to_target gives {clause(shown(target))}, and must give one of the choices or "
                "its number; questions with several right answers are not supported"
            )
        description = self._description.text(document) if described else ""
        return Question(
            self._name,
            context,
            tuple(choices),
            int(target),
            where,
            self._delimiter,
            description,
            document.fields,
        )


class _ValueSource:
    """A source of values from a document: the name of a field, or a template. key: of the task file."""

    def __init__(self, key: str, source: str, renderers: ExitStack) -> None:
        self._key, self._source, self._renderers = key, source, renderers
        self._renderer: Renderer | None = None

    def text(self, document: _Document) -> str:
        """Return a text. Raises FormatError if the value is not one."""
        value = self._field_or(document, "render") if self._source else ""
        if not isinstance(value, str):
            raise FormatError(f"{document.where}: {self._key} gives {clause(shown(value))}, not a text")
        return value

    def literal(self, document: _Document) -> Any:
        """Return the value of the field, or the rendered text of the template parsed as a Python literal."""
        return self._field_or(document, "literal")

    def value(self, document: _Document) -> Any:
        """Return the value of the field, or the rendered text of the template; digits become a number."""
        value = self._field_or(document, "render")
        is_number = self._source not in document.fields and re.fullmatch(r"0|[1-9][0-9]{0,8}", value)
        return int(value) if is_number else value

    def _field_or(self, document: _Document, render: str) -> Any:
        if self._source in document.fields:
            return document.fields[self._source]
        try:
            if self._renderer is None:
                self._renderer = Renderer(TASK)
                self._renderers.callback(self._renderer.close)
                self._renderer.compile(self._source)
            return getattr(self._renderer, render)(document.fields)
        except (TokenizerError, ValueError, RecursionError) as error:
            raise FormatError(f"{document.where}: {self._key}: {clause(error)}") from None


def _read_documents(file: Path) -> Iterator[_Document]:
    try:
        data = read_small_file(file, _LONGEST_DATA)
    except FileNotFoundError:
        remedy = "paths of data_files are relative to the folder of the task file"
        raise InvalidRequestError(missing(file, remedy=remedy)) from None
    if data[:1024].lstrip()[:1] == b"[":
        try:
            elements = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{file} is not JSON ({clause(error)})") from None
        for number, element in enumerate(elements, 1):
            if not isinstance(element, dict):
                raise FormatError(f"{file}, element {number}, is not a JSON object")
            yield _Document(element, f"{file}, element {number}")
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            where = f"{file}, line {number}"
            yield _Document(json_object(line, where), where)


def _read_yaml(path: Path) -> dict[Any, Any]:
    """Return the keys of a task file, without those that have no value."""
    text = read_small_text(path, _LONGEST_FILE)
    try:
        _check_events(text, path)
        given = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise FormatError(f"{path} is not YAML ({clause(error)})") from None
    if not isinstance(given, dict):
        raise FormatError(
            f"{path} is not a task file: it must have keys and values, such as task and dataset_path"
        )
    return {key: value for key, value in given.items() if value is not None}


def _check_events(text: str, path: Path) -> None:
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        where = f"{path}, line {event.start_mark.line + 1},"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise FormatError(f"{where} is nested deeper than {_DEEPEST} levels, which no task file is")
        if isinstance(event, yaml.AliasEvent):
            raise FormatError(
                f"{where} has an alias (*{clause(event.anchor)}), which is not supported; write it out"
            )
        if tag := getattr(event, "tag", None):
            reason = "no code of a task is run" if tag.startswith("!") else "leave it out"
            tag = clause(tag.replace("tag:yaml.org,2002:", "!!"))
            raise FormatError(f"{where} has {tag}, which is not supported: {reason}")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            value = event.value
            if len(value) > _LONGEST_NUMBER and _NUMBER.fullmatch(value):
                raise FormatError(
                    f"{where} has a number of {len(value)} characters; quote it, if it is a text"
                )
