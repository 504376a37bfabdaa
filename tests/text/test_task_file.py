"""Prompts of task files and of known formats, compared with EleutherAI's evaluation harness.

tests/data/harness_prompts.json: files of random words, task files, and what lm-eval 0.4.13 (ConfigurableTask,
`build_all_requests(limit=4)` with the seed 1234) made of them for 0, 1 and 5 examples: context, continuations
and the right one. Its own hellaswag.yaml, arc_easy.yaml and piqa.yaml made the prompts of these formats.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotset.cli.evaluate import ExampleOptions
from hotset.errors import HotsetError
from hotset.text import few_shot, renderer, task_file
from hotset.text.few_shot import Shots, with_examples
from hotset.text.multiple_choice import Question, read_questions
from hotset.text.task_file import read_task

STORED = json.loads((Path(__file__).parents[1] / "data" / "harness_prompts.json").read_text())
FORMATS = ("hellaswag", "arc", "piqa")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, documents in STORED["files"].items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in documents))
    for name, text in STORED["tasks"].items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def prompts(questions: list[Question]) -> list[list[Any]]:
    return [
        [one.context, [one.delimiter + choice for choice in one.choices], one.answer] for one in questions
    ]


def of_a_format(folder: Path, name: str, n: int) -> list[Question]:
    questions = read_questions((folder / f"{name}.test.jsonl").read_bytes().split(b"\n"), "test")
    options = ExampleOptions(shots=n, examples=folder / f"{name}.train.jsonl", seed=1234)
    return options.before(questions).questions


@pytest.mark.parametrize("key", STORED["prompts"])
def test_prompts_equal_the_harnesss(folder: Path, key: str) -> None:
    name, shots = key.split("/")
    if name in FORMATS:
        questions = of_a_format(folder, name, int(shots))
    else:
        questions = read_task(folder / f"{name}.yaml", int(shots), limit=4).questions
    assert prompts(questions) == STORED["prompts"][key]
    assert len(questions) >= 3


def test_the_task_file_says_how_many_examples(folder: Path) -> None:
    task = read_task(folder / "first_n.yaml")
    assert task.n_shots == 2
    assert task.questions == read_task(folder / "first_n.yaml", 2).questions
    assert read_task(folder / "loop.yaml").n_shots == 0


def test_another_seed_draws_other_examples_and_the_same_one_the_same(folder: Path) -> None:
    once, again, other = (prompts(read_task(folder / "loop.yaml", 3, seed).questions) for seed in (5, 5, 6))
    assert once == again != other


def question(text: str, answer: int = 0) -> Question:
    return Question("t", text, ("yes", "no"), answer, f"f, {text}", document={"text": text})


@pytest.mark.parametrize("shots", [Shots(2), Shots(2, one_more=False), Shots(2, sampler="first_n")])
def test_no_question_is_its_own_example(shots: Shots) -> None:
    file = [question(text) for text in "abc"]
    for _ in range(2):  # two copies
        for one in with_examples(file, [one.document for one in file], file.__getitem__, shots, "f"):
            *examples, asked = one.context.split("\n\n")
            assert len(examples) == 2
            assert f"{asked} yes" not in examples
        file += [question("a")]


@pytest.mark.parametrize(
    ("shots", "n"), [(Shots(3), 3), (Shots(4, one_more=False), 3), (Shots(3, sampler="first_n"), 3)]
)
def test_too_few_examples(shots: Shots, n: int) -> None:
    file = [question(text) for text in "abcd"[:n]]
    with pytest.raises(HotsetError, match=r"f has \d examples for a question, and . shots need that many"):
        with_examples(file, [one.document for one in file], file.__getitem__, shots, "f")


def test_a_json_list_and_paths_are_relative_to_the_task_file(folder: Path, tmp_path: Path) -> None:
    documents = STORED["files"]["cap.test.jsonl"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "list.json").write_text(json.dumps(documents, indent=1))
    task = tmp_path / "task.yml"
    task.write_text(
        STORED["tasks"]["missing"]
        .replace("cap.test.jsonl", "data/list.json")
        .replace("training_split: train", "")
    )
    (first, *_) = read_task(task).questions
    assert first.where == f"{tmp_path}/data/list.json, element 1"
    assert prompts([first]) == STORED["prompts"]["missing/0"][:1]


# -- refused files -------------------------------------------------------------------------------

GOOD = """\
task: t
dataset_path: json
dataset_kwargs: {data_files: {test: d.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: a
"""
DOCUMENT = {"q": "why", "c": ["so", "thus"], "a": 1}


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def refused(folder: Path, text: str, document: Any = DOCUMENT) -> str:
    (folder / "t.yaml").write_text(text)
    (folder / "d.jsonl").write_text(json.dumps(document))
    with pytest.raises(HotsetError) as told:
        read_task(folder / "t.yaml")
    assert len(str(told.value)) < 700
    assert "\n" not in str(told.value)
    return str(told.value)


def test_the_good_task_is_good(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(GOOD)
    (tmp_path / "d.jsonl").write_text(json.dumps(DOCUMENT))
    assert prompts(read_task(tmp_path / "t.yaml").questions) == [["why", [" so", " thus"], 1]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not YAML"),
        ("- a\n", "is not a task file"),
        *((start * 100_000, "line 1, is nested deeper than 64 levels") for start in ("[", "{", "? ", "- ")),
        ("a: " + "1" * 5000, "line 1, has a number of 5000 characters; quote it"),
        ("a: -0x" + "f" * 5000, "has a number of 5003 characters"),
        ("a: 1" + ":1" * 100_000, "has a number of 200001 characters"),
        ("a: 2024-99-99", "is not YAML"),
        (GOOD + "metadata: !!int ''\n", "line 9, has !!int, which is not supported: leave it out"),
        (GOOD + "metadata: !!bool x\n", "line 9, has !!bool"),
        (GOOD + "metric_list: [{metric: [acc]}]\n", "in metric_list; only acc and acc_norm"),
        ("a: &x [1]\nb: *x\n", r"line 2, has an alias \(\*x\)"),
        (changed('"{{q}}"', "!function utils.f"), "line 6, has !function, which is not supported: no code"),
        (changed('"{{q}}"', "!!python/name:os.system x"), "has !!python/name:os.system, which"),
        (GOOD + "include: x.yaml\n", "has the key 'include', which is not supported"),
        (GOOD + "group: x\n", "has the key 'group'"),
        (GOOD + "process_docs: x\n", "has the key 'process_docs'"),
        (GOOD + "2: x\n", "has the key 2,"),
        (changed("multiple_choice", "generate_until"), "has 'generate_until' as output_type; only"),
        (changed("output_type: multiple_choice\n", ""), "has None as output_type"),
        (changed("path: json", "path: allenai/ai2_arc"), "has 'allenai/ai2_arc' as dataset_path; only json"),
        (changed("{test: d.jsonl}", "{test: 'https://x/d.jsonl'}"), "only files on this machine"),
        (changed("{test: d.jsonl}", "{test: e.jsonl}"), "no file .*e.jsonl; paths .* relative to"),
        (changed("{test: d.jsonl}", "{test: []}"), "a file, or a list of files, for each split"),
        (changed("{test: d.jsonl}", "{test: d.jsonl}, field: x"), "has 'field' in dataset_kwargs"),
        (changed("test_split: test", "test_split: dev"), "names the split 'dev'; data_files has 'test'"),
        (changed("test_split: test\n", ""), "names no test_split or validation_split"),
        (changed("task: t", "task: [a, b]"), "must have a text as task"),
        (GOOD + "num_fewshot: -1\n", "a number of 0 or more as num_fewshot, not -1"),
        (GOOD + "num_fewshot: 1\n", "has 0 examples for a question, and 1 shots need that many"),
        (GOOD + "fewshot_config: {sampler: balanced}\n", "has 'balanced' as sampler; only default and"),
        (GOOD + "fewshot_config: {samples: []}\n", "has 'samples' in fewshot_config"),
        (GOOD + "metric_list: [{metric: f1}]\n", "in metric_list; only acc and acc_norm"),
        (GOOD + "target_delimiter: 3\n", "a text as target_delimiter, not 3"),
        (changed('"{{c}}"', "[no, yes]"), "in YAML quote yes, no and numbers"),
        (changed("target: a", "target: [0, 1]"), "a template or a number as doc_to_target"),
        (changed('"{{q}}"', '"{{q"'), "d.jsonl, line 1: doc_to_text: The template is not valid Jinja"),
        (changed('"{{q}}"', '"{{other}}"'), "The template failed on this question .*'other' is undefined"),
        (changed('"{{q}}"', '"{{q.__class__.__mro__}}"'), "The template failed on this question"),
        (changed('"{{q}}"', '"{{a}}"'), "a context for each choice are not supported"),
        (changed('"{{c}}"', '"{{q}}"'), "doc_to_choice: The template failed on this question"),
        (changed('"{{c}}"', '"{{ {1, 2} }}"'), "doc_to_choice"),
        (changed('"{{c}}"', "\"{{ '[' * 100000 }}\""), "doc_to_choice: The template"),
        (changed('"{{c}}"', "\"{{ '-' * 100000 ~ '1' }}\""), "doc_to_choice: The template"),
        (changed('"{{c}}"', "a"), "doc_to_choice gives 1, and must give a list of texts"),
        (changed("target: a", "target: 2"), "names choice 2 of 2 as the right one"),
        (changed("target: a", "target: q"), "doc_to_target gives 'why', and must give one of the choices"),
        (changed("target: a", "target: '[0, 1]'"), "several right answers are not supported"),
    ],
)  # fmt: skip
def test_unsupported_features_are_named(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, refused(tmp_path, text))


def test_a_template_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "LIMITS", replace(renderer.LIMITS, seconds=0.1))
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "The template runs for more than 0.1 s and was ended: change the task file" in refused(
        tmp_path, changed("{{q}}", loop)
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "has no documents in the split 'test'"),
        ("[1]", "element 1, is not a JSON object"),
        ("[", "is not JSON"),
        ("{}\n[]", "line 2, is not a JSON object"),
        ('{"q": 1, "c": ["a", "b"], "a": 0}', "a context for each choice"),
        ('{"q": "x", "c": ["a", " "], "a": 0}', "has an empty choice"),
        ('{"q": "x", "c": ["a", 1], "a": 0}', "must give a list of texts"),
    ],
)
def test_invalid_documents(tmp_path: Path, data: str, said: str) -> None:
    (tmp_path / "t.yaml").write_text(changed('"{{q}}"', "q"))
    (tmp_path / "d.jsonl").write_text(data)
    with pytest.raises(HotsetError, match=said):
        read_task(tmp_path / "t.yaml")


def test_documents_without_common_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the nulls: each document gets a null for every field that only others have."""
    (tmp_path / "t.yaml").write_text(GOOD)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(DOCUMENT | {f"f{i}": 1}) + "\n" for i in range(9)))
    monkeypatch.setattr(task_file, "MOST_NULLS", 72)
    assert len(read_task(tmp_path / "t.yaml").questions) == 9
    monkeypatch.setattr(task_file, "MOST_NULLS", 71)
    with pytest.raises(HotsetError, match=r"too few fields in common: 9 with 12 fields in all"):
        read_task(tmp_path / "t.yaml")


def test_prompts_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.yaml").write_text(
        changed("{{q}}", "{{ 'a' * 100 }}") + "fewshot_config: {sampler: first_n}\n"
    )
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(DOCUMENT | {"q": i}) + "\n" for i in range(9)))
    monkeypatch.setattr(few_shot, "MOST_CHARS", 9 * (2 * 100 + 1 + 4 + 2 + 6))
    assert len(read_task(tmp_path / "t.yaml", 1).questions) == 9
    with pytest.raises(HotsetError, match=r"line 6: the prompts up to here .* fewer shots or questions"):
        read_task(tmp_path / "t.yaml", 2)
    assert len(read_task(tmp_path / "t.yaml", 2, limit=5).questions) == 5


def test_the_processes_of_the_templates_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[Any] = []
    start: Callable[..., Any] = subprocess.Popen

    def started(*given: Any, **options: Any) -> Any:
        processes.append(start(*given, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", started)
    read_task(folder / "loop.yaml", 1)
    assert len(processes) == 3  # doc_to_text, doc_to_choice, doc_to_target: the description is a field
    assert all(process.returncode is not None for process in processes)
