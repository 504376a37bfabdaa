"""Each option with a size, a duration or an enumeration has that type, in all commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runs import command_of, inside

from hotset.cli.help import shown_default
from hotset.cli.main import SUBCOMMANDS
from hotset.cli.values import DURATION, SIZE, TIME_OR_EVER
from hotset.errors import InvalidRequestError
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.parameters import seconds, size
from hotset.sampling_parameters import PARAMETERS
from hotset.server.model_settings import ModelsFile

# Words in the help of an option whose value must be a size, a duration or a choice.
SIZES = re.compile(r"\b(GiB|GB|bytes|budget|memory|disk|caches of)\b", re.IGNORECASE)
DURATIONS = re.compile(r"\b(seconds|minutes|hours|timeout|time that|for this time)\b", re.IGNORECASE)
CHOICES = re.compile(r"\b(?:[\w.]+, )+[\w.]+,? or [\w.]+\b|^\w+ or \w+\b|: \w+, \w+, \w+")
# Grammars, compared models, cards, devices, tensor types and rates in GB/s have other values.
OTHERS = {
    "--grammar",
    "--compare",
    "--gpu",
    "--device",
    "--type",
    "--hours",
    "--step-tokens",
    "--gpu-bandwidth",
    "--reasoning-budget",
}


def options() -> Iterator[tuple[str, Any]]:
    for command in SUBCOMMANDS:
        for one in command_of(command).params:
            if one.param_type_name == "option" and not one.is_flag and not OTHERS & set(one.opts):
                yield command, one


def test_sizes_durations_and_enumerations_have_their_types() -> None:
    found = {"SIZE": 0, "TIME": 0, "|": 0}
    for command, one in options():
        annotation, word = one.type_descriptor.annotation, one.metavar or ""
        for kind in found:
            found[kind] += kind in word
        if annotation is Path or annotation == list[Path] or "|" in word:
            continue
        says = f"{one.opts[0]} {one.help}"
        if SIZES.search(says) and annotation in (float, int):
            assert word == "SIZE", (command, says)
        if DURATIONS.search(says) and annotation in (float, int):
            assert word == "TIME", (command, says)
        assert not CHOICES.search(str(one.help)), (command, says)
    assert min(found.values()) >= 3
    assert found["|"] > 40


def test_help_names_no_bool_and_no_default_in_a_sentence() -> None:
    for command in SUBCOMMANDS:
        shown = inside(*command.split(), "--help-all").stdout
        assert "<bool>" not in shown
        assert "default: " not in shown.replace("[default: ", ""), command


def test_each_default_of_a_table_is_shown() -> None:
    shown = {name: shown_default(one) for _, one in options() for name in one.opts}
    for one in (*LOAD_PARAMETERS.values(), *PARAMETERS.values()):
        if one.option and one.kind in (int, float, size) and one.default is not None:
            assert shown[one.flag], one.name


@pytest.mark.parametrize(
    ("text", "gib"),
    [("20", 20), ("20G", 20), ("20GiB", 20), ("20 gb", 20), ("512M", 0.5), ("1.5T", 1536), ("1024B", 2**-20)],
)
def test_a_size_has_one_meaning(text: str, gib: float) -> None:
    assert SIZE(text) == gib == size("ram_budget", text)


@pytest.mark.parametrize(
    ("text", "duration"),
    [("5m", 300), ("90s", 90), ("1h30m", 5400), ("45", 45), ("1.5", 1.5), ("500ms", 0.5)],
)
def test_a_duration_has_one_meaning(text: str, duration: float) -> None:
    assert DURATION(text) == duration == seconds("max_seconds", text) == -TIME_OR_EVER(f"-{text}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("run", "m", "hi", "--ram-budget", "0"),
            "--ram-budget must be a number of GiB above 0, or",
        ),
        (("run", "m", "hi", "--cache-disk", "x"), "--cache-disk must be a number of GiB above 0"),
        (("run", "m", "hi", "--vram-budget", "-2"), "or -1 for all free memory, not '-2'"),
        (("serve", "m", "--timeout", "-1"), "--timeout must be a number of seconds, or a duration"),
        (("serve", "m", "--log-form", "xml"), "--log-form must be one of json, text, short, not 'xml'"),
        (("sparse", "trace", "--rows", "x", "--rows", "1G"), "--rows must be a number of GiB"),
        (("sparse", "calibrate", "m", "-f", __file__, "--only", "up"), "not 'up'"),
        (("quantize", "m", "o", "--type", "q9"), "--type: the type 'q9' is not known"),
    ],
)
def test_a_wrong_value_names_option_and_form(words: tuple[str, ...], message: str) -> None:
    done = inside(*words, returns=2)
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_the_models_file_takes_sizes_and_durations(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text("max_memory = '12G'\nkeep_alive = '1h'\n[models.a]\nload = { ram_budget = '512M' }\n")
    file = ModelsFile.read(path)
    assert (file.max_memory, file.keep_alive) == (12, 3600)
    path.write_text("max_memory = '12X'\n")
    with pytest.raises(InvalidRequestError, match="max_memory must be a number of GiB"):
        ModelsFile.read(path)


def test_a_missing_file_of_an_argument_is_named(tmp_path: Path) -> None:
    done = inside("eval", "model", tmp_path / "none", returns=2)
    assert done.stderr.startswith("error: FILE: there is no file ")
