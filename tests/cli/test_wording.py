"""Messages of the library name settings of Python; the command line names its options in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cli_runs import command_of
from tiny_server import write_model

import hotset
from hotset.cli.main import SUBCOMMANDS
from hotset.cli.wording import in_options, option_of, use_options
from hotset.errors import HotsetError
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.sampling_parameters import PARAMETERS
from hotset.settings import LoadSettings

SOURCES = Path(hotset.__file__).parent
OWN_WORDS = {"cli", "server", "report"}  # for users of the command line and of a server
OWN_FILES = {"report.py", "sampling_parameters.py", "load_parameters.py"}  # tables that name options
COMMANDS = re.compile(r"(['`])(hotset|ray) .*?\1")  # another program's line, or one of hotset's


@cache
def options() -> frozenset[str]:
    """Every option of every subcommand."""
    return frozenset(opt for name in SUBCOMMANDS for one in command_of(name).params for opt in one.opts)


def texts(path: Path) -> Iterator[str]:
    """Yield the strings in the code of a module, without docstrings, and with 0 for values in f-strings."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def messages() -> dict[str, list[str]]:
    """Return the messages of the library by module."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if name.partition("/")[0] not in OWN_WORDS and path.name not in OWN_FILES:
            found[name] = [COMMANDS.sub("", text) for text in texts(path) if " " in text]
    return found


def test_messages_of_the_library_name_no_options() -> None:
    naming = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    assert [(name, text) for name, found in messages().items() for text in found if naming.search(text)] == []


def test_names_in_backticks_have_options() -> None:
    names = {name for found in messages().values() for text in found for name in re.findall(r"`(\w+)`", text)}
    parameters = {one.name for name in SUBCOMMANDS for one in command_of(name).params}
    assert names
    assert names <= parameters


def test_each_name_has_an_option() -> None:
    for table in (LOAD_PARAMETERS, PARAMETERS):
        named = {one.name: option_of(one.name) for one in table.values() if one.option}
        assert len(named) > 20
        assert set(named.values()) <= options()
    assert [*LOAD_PARAMETERS] == [name for name in LoadSettings.__dataclass_fields__ if name != "progress"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize(
    ("settings", "named", "option"),
    [
        ({"n_ctx": 10**12}, "lower n_ctx", "lower --ctx-size"),
        ({"n_ctx": 0}, "n_ctx must be", "--ctx-size must be"),
        ({"n_threads": 0}, "n_threads must be", "--threads must be"),
        ({"split": "rows"}, "split must be one of", "--split must be one of"),
        ({"kv_type": "f64"}, "kv_type must be", "--cache-type must be"),
        ({"ram_budget": 1e-6}, "raise ram_budget", "raise --ram-budget"),
        pytest.param(
            {"device": "cuda:99"}, "device='cpu'", "--device cpu", marks=pytest.mark.backend("triton")
        ),
        ({"gpu_index": "m.index", "split": "layers"}, "`split`", "--split"),
        ({"cache_dir": "c", "device": "reference"}, "cache_dir cannot", "--cache-dir cannot"),
    ],
    ids=str,
)
def test_an_error_of_load_names_settings(
    path: Path, settings: dict[str, Any], named: str, option: str
) -> None:
    with pytest.raises(HotsetError) as raised:
        hotset.load(path, **settings)
    assert named in str(raised.value)
    assert not re.search(r"(?<![\w-])--?[a-z]", str(raised.value))
    said = in_options(str(raised.value))
    assert option in said
    assert named not in said.replace(option, "")


def test_values_and_words_become_options() -> None:
    said = "leave `device` out, use device='auto' or split='layers', try vram_budget=0.5, or device='cpu'"
    assert in_options(said) == (
        "leave --device out, use --device auto or --split layers, try --vram-budget 0.5, or --device cpu"
    )
    use_options(command_of("quantize").params)
    assert in_options("insist with allow_requantize=True") == "insist with --allow-requantize"
    use_options(())
    assert in_options("insist with allow_requantize=True") == "insist with allow_requantize=True"
    for unchanged in ("the device is lost; leave it out", "a draft model", "there is no file 'device=auto'"):
        assert in_options(unchanged) == unchanged
