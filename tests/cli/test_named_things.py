"""Wrong options and missing files and models have one message and one exit code, in every command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from cli_runs import command_of, inside, write_model

from hotset.cli.main import SUBCOMMANDS
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.parameters import Parameter, size
from hotset.sampling_parameters import PARAMETERS

TABLES = {**PARAMETERS, **LOAD_PARAMETERS}
MODELS = {"model", "models", "source", "names", "draft"}  # parameters that name a model
FILES_IN_TEXT = {"lora", "json_schema", "text", "compare"}  # texts that can name a file
MADE = {"cache_dir", "export_to", "directory", "work"}  # folders that a command makes
ELSEWHERE = {"ps", "stop", "launch"}  # commands for a server or another program
# Options that a parameter requires.
WITH: Mapping[str, tuple[str, ...]] = {
    "draft": ("--speculate", "draft"), "lookup": ("--speculate", "ngram"),
    "example_labels": ("--examples", "FILE"), "tls_cert": ("--tls-key", "FILE"),
    "tls_key": ("--tls-cert", "FILE"),
}  # fmt: skip
WITH_COMMAND: Mapping[str, tuple[str, ...]] = {
    "sparse trace": ("-f", "FILE"), "sparse report": ("-f", "FILE"), "sparse profile": ("-f", "FILE"),
    "run": ("-p", "hi"), "embed": ("-f", "FILE"), "rerank": ("-f", "FILE"), "sparse make": ("--text", "FILE"),
    "bench": ("-f", "FILE"),
}  # fmt: skip
REQUEST = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
QUESTION = {"goal": "to cut", "sol1": "use a knife", "sol2": "use a spoon", "label": 0}
FILES = {"batch": json.dumps(REQUEST), "eval": json.dumps(QUESTION)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("named")
    for command in SUBCOMMANDS:
        (made / f"{command}.txt").write_text(FILES.get(command, "FROM a text"))
    write_model(made / "tiny.gguf")
    return made


def names_a_path(one: Any) -> bool:
    annotation = one.type_descriptor.annotation
    return Path in (annotation, *get_args(annotation))


def is_number(one: Any) -> bool:
    return one.type_descriptor.annotation in (int, float)


def arguments_of(command: str, folder: Path, values: Mapping[str, str]) -> list[str]:
    """Return a command line with these values and all required arguments."""
    found = command.split()
    given = {"model": str(folder / "tiny.gguf"), **values}
    for one in command_of(command).params:
        default = str(folder / ("new.gguf" if one.name in ("target", "output") else f"{command}.txt"))
        value = given.get(one.name, given["model"] if one.name in MODELS else default)
        if one.metavar == "SRC_DIR" and one.name not in values:
            value = str(folder)
        is_model = one.name in ("model", "models") and command != "create"
        if one.name in values or one.required or is_model:
            found += [one.opts[0], value] if one.param_type_name == "option" else [value]
    more = [word for name in values for word in WITH.get(name, ())]
    if not {"file", "replay", "text"} & values.keys():
        more += WITH_COMMAND.get(command, ())
    return found + [word.replace("FILE", str(folder / f"{command}.txt")) for word in more]


def bad_value(one: Parameter) -> str | None:
    """Return a value that a parameter cannot have; None if every text is one."""
    if one.kind is Path or one.name == "lora":
        return "missing.file"
    if one.kind in (int, float):
        return str(one.low - 3) if one.low is not None else str(one.high + 1) if one.high is not None else "x"
    return (
        "x" if one.choices or one.kind is size or one.name in ("activation", "device", "predictor") else None
    )


def options_of_tables() -> Iterator[tuple[str, str, str]]:
    """Yield command, option and wrong value, for each sampling parameter and load setting."""
    for command in SUBCOMMANDS:
        for one in command_of(command).params:
            parameter = TABLES.get(one.name)
            if parameter is None or one.opts[0] != parameter.flag or one.name in MADE:
                continue
            if not str(one.help).startswith(parameter.summary):
                continue  # another option of the same name
            if (value := bad_value(parameter)) is not None:
                yield command, one.opts[0], value


@pytest.mark.parametrize(("command", "option", "value"), list(options_of_tables()))
def test_a_wrong_option_is_refused_before_the_model_is_looked_for(
    folder: Path, command: str, option: str, value: str
) -> None:
    given = arguments_of(command, folder, {"model": "missing-model"})
    done = inside(*given, option, value, returns=2)
    assert "missing-model" not in done.stderr
    assert value in done.stderr


def named_things() -> Iterator[tuple[str, str]]:
    """Yield command and parameter, for each parameter that names a file, a folder or a model."""
    for command in set(SUBCOMMANDS) - ELSEWHERE:
        for one in command_of(command).params:
            is_named = names_a_path(one) or (one.name in MODELS | FILES_IN_TEXT and not is_number(one))
            if is_named and one.name not in MADE:
                yield command, one.name


@pytest.mark.parametrize(("command", "name"), sorted(named_things()))
def test_a_missing_thing_has_one_message_and_exit_code(folder: Path, command: str, name: str) -> None:
    suffix = {"sparse report": "html", "embed": "npy"}.get(command, "gguf")
    missing = "missing-model" if name in MODELS else str(folder / "missing" / f"thing.{suffix}")
    done = inside(*arguments_of(command, folder, {name: missing}), returns=2)
    said = " ".join(done.stderr.split())
    assert "there is no " in said
    assert "missing" in said


def test_a_missing_data_file_of_a_task_has_the_same_message_and_exit_code(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "{task: t, dataset_path: json, dataset_kwargs: {data_files: {test: none.jsonl}}, test_split: test, "
        "output_type: multiple_choice, doc_to_text: q, doc_to_choice: c, doc_to_target: a}"
    )
    done = inside("eval", "missing-model", str(task), returns=2)
    said = " ".join(done.stderr.split())
    assert f"there is no file {tmp_path / 'none.jsonl'}; paths of data_files are relative to" in said
