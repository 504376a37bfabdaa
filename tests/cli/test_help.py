"""The help: short enough to read, and complete with --help-all."""

from __future__ import annotations

import re

import pytest
from cli_runs import command_of, inside

from hotset.cli.help import MOST_SHOWN
from hotset.cli.main import GROUPS, SUBCOMMANDS

SCREEN = 50  # lines


@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_fits_on_a_screen(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (["--help"], ["run", "-h"], ["serve", "-h"], ["sparse", "-h"]):
        assert len(inside(*words).stdout.splitlines()) <= SCREEN, words


def test_help_groups_the_commands() -> None:
    shown = inside("--help").stdout
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == list(GROUPS)
    for name in SUBCOMMANDS:
        words = name.split()
        assert re.search(rf"^  {words[0]} .*{words[-1]}|^  {words[0]} ", shown, re.MULTILINE), name
        assert inside(*words, "-h").stdout.startswith(f"Usage: hotset {name} "), name


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_short_help_has_few_options_and_the_long_help_all(name: str) -> None:
    words = name.split()
    short, long = inside(*words, "-h").stdout, inside(*words, "--help-all").stdout
    assert not re.search(r"[{}]", long.partition("\n\n")[0]), "the arguments in the usage"
    assert "<bool>" not in long
    options = [p for p in command_of(name).params if p.param_type_name == "option" and not p.hidden]
    listed = {p.name for p in options if re.search(rf"^  .*{re.escape(p.opts[0])}\b", short, re.MULTILINE)}
    assert min(len(options), 3) <= len(listed) <= MOST_SHOWN, listed
    missing = [p.opts[0] for p in options if p.opts[0] not in long]
    assert not missing


def test_a_short_option_has_one_meaning() -> None:
    """Check that a short option abbreviates the same long option in all commands that show it."""
    meanings: dict[str, set[str]] = {}
    for name in SUBCOMMANDS:
        for one in command_of(name).params:
            names = [] if one.param_type_name != "option" or one.hidden else [*one.opts, *one.secondary_opts]
            for short in names:
                if not short.startswith("--"):
                    meanings.setdefault(short, set()).add(next(iter(one.opts)))
    assert {"-c", "-f", "-n", "-o", "-t"} <= meanings.keys()
    assert {short: names for short, names in meanings.items() if len(names) > 1} == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("profile", "sparse profile"),
        ("train-predictor", "sparse train"),
        ("sparsify", "sparse make"),
        ("ls", "list"),
    ],
)
def test_earlier_names_are_aliases(old: str, new: str) -> None:
    assert inside(old, "-h").stdout == inside(*new.split(), "-h").stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bennch", "did you mean bench?"),
        ("trian", "did you mean sparse train"),
        ("delete", "did you mean rm?"),
        ("sparse trian", "did you mean train"),
    ],
)
def test_a_misspelled_command_suggests_the_nearest(typed: str, meant: str) -> None:
    assert meant in " ".join(inside(*typed.split(), returns=2).stderr.split())
