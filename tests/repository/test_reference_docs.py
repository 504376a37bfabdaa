"""docs/reference equals the output of docs/reference/generate.py; `make reference` writes it again."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_runs import command_of
from paths import DOCS
from tiny_server import client_of, write_model

from hotset.cli.main import SUBCOMMANDS
from hotset.placement import ram

FOLDER = DOCS / "reference"
NAMES = (
    *("cli.md", "python.md", "http.md", "metrics.md", "files.md", "architectures.md", "backend-matrix.md"),
    "../guides/agents.md",
    *(f"../man/hotset{name}.1" for name in ("", *(f"-{name.replace(' ', '-')}" for name in SUBCOMMANDS))),
)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(generator: ModuleType) -> dict[str, str]:
    return generator.references()


@pytest.mark.parametrize("name", NAMES)
def test_reference_equals_the_code(made: dict[str, str], name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == made[name], "run `make reference` and commit the result"


def test_pages_of_routes_equal_the_code(made: dict[str, str]) -> None:
    there = {f"http/{path.name}": path.read_text("utf-8") for path in (FOLDER / "http").iterdir()}
    assert there == {name: text for name, text in made.items() if name.startswith("http/")}
    assert len(there) > 40


def test_every_subcommand_and_every_option_is_there(generator: ModuleType, made: dict[str, str]) -> None:
    sections = made["cli.md"].split("\n## ")[1:]
    assert [section.split("\n", 1)[0] for section in sections] == list(generator.SUBCOMMANDS)
    for section in sections:
        subcommand = section.split("\n", 1)[0]
        options = [
            p for p in command_of(subcommand).params if p.param_type_name == "option" and p.name != "help"
        ]
        missing = [o for p in options for o in (*p.opts, *p.secondary_opts) if f"`{o}`" not in section]
        assert not missing, f"{subcommand}: {missing}"


def test_every_public_name_is_there(made: dict[str, str]) -> None:
    import hotset

    missing = [
        name
        for name in hotset.__all__
        if name != "__version__"
        and f"## hotset.{name}\n" not in made["python.md"]
        and f"| `{name}` |" not in made["python.md"]
    ]
    assert not missing


def test_text_is_escaped_for_markdown(generator: ModuleType) -> None:
    text = "What it is.\n\na, b: of <these>\n    more\nc: x | y\n\n    block *\n"
    assert generator.prose(text) == (
        "What it is.\n\n- `a, b`: of \\<these>\n  more\n- `c`: x \\| y\n\n```\nblock *\n```"
    )


@pytest.mark.parametrize("options", [{}, {"ram_budget": 1.0}], ids=["mapped", "ram-budget"])
async def test_every_metric_of_a_server_is_there(
    made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)  # earlier tests loaded much into this process
    async with client_of(write_model(tmp_path / "tiny.gguf"), load=options) as (client, _):
        text = (await client.get("/metrics")).text
    found = set(re.findall(r"^# TYPE (hotset_\w+?)(?:_created)? ", text, re.MULTILINE))
    assert len(found) > 20
    assert not {name for name in found if not re.search(rf"`{name}(_total)?[`{{]", made["metrics.md"])}


def test_every_route_and_schema_is_there(made: dict[str, str], generator: ModuleType) -> None:
    document = generator.create_app(generator.host()).openapi()
    for path, methods in document["paths"].items():
        for method in methods:
            assert re.search(rf"^\| \[?`{method.upper()} {re.escape(path)}`", made["http.md"], re.M), path
    headings = set(re.findall(r"^## (\S+)$", made["http.md"], re.MULTILINE))
    assert headings == document["components"]["schemas"].keys()


def test_there_is_a_man_page_for_every_subcommand() -> None:
    there = {path.relative_to(FOLDER.parent).as_posix() for path in (DOCS / "man").iterdir()}
    assert there == {name.removeprefix("../") for name in NAMES if "/man/" in name}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not here")
@pytest.mark.parametrize("page", sorted((DOCS / "man").glob("*.1")), ids=lambda path: path.stem)
def test_man_page_equals_the_help(page: Path) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", page], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    if page.stem != "hotset":
        params = command_of(page.stem.removeprefix("hotset-").replace("sparse-", "sparse ")).params
        options = [
            name for param in params if param.name != "help" for name in (*param.opts, *param.secondary_opts)
        ]
        assert not [name for name in options if name.startswith("-") and name not in shown]


def test_roff_takes_no_text_for_its_requests(generator: ModuleType) -> None:
    assert generator.roff(".a -b\n'c \\d") == "\\&.a \\-b\n\\&'c \\ed"
