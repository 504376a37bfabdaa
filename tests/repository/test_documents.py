"""Commands and programs of every Markdown file run unchanged, on tiny models.

The blocks of a document (`sh` and `python`) run in order in one folder, which has the files that they name
and a store of models (scratch.py). A new document, block or command is covered without a change here. An
unknown or failing command fails the test. Three tables list the exceptions: ADDED, NOT_RUN and
PYTHON_NOT_RUN.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import documents
import httpx
import numpy as np
import pytest
import typer
from cases import quick_are
from cli_runs import command_of, inside, needs_core, options_of, split_command
from documents import ROOT, Block, Command
from scratch import N_CTX, QUICK_SPARSIFYING, QUICK_TRAINING, write_scratch
from tiny_server import client_to

import hotset
from hotset.cli import main as cli
from hotset.server.service import Service
from hotset.sparsity.profile import collect
from hotset.sparsity.sidecar import fingerprint

pytestmark = needs_core
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in documents.documents()}

ADDED = (
    # Options at the end of a command, where the last value counts: small sizes, and a seed for each test.
    (r"hotset run", "--seed 1"),
    (r"hotset run (?!.*--json-schema)", "-n 4"),
    (r"hotset serve", "--max-tokens 64"),
    (r"hotset bench", "-p 4 -n 2 -r 1"),
    (r"hotset sparse (profile|trace|report) .*-f", "-c 64 -n 256"),
    (r"hotset perplexity", "-c 64 --chunks 2"),
    (r"hotset sparse calibrate", "-c 32 --tokens 64 --measured 128"),
    (r"hotset sparse train", QUICK_TRAINING),
    (r"hotset sparse make", QUICK_SPARSIFYING),
    # Test machines have no GPU: PyTorch on the CPU simulates one with a small memory budget.
    (r"hotset run .*--vram-budget", "--device simulated --vram-budget 1"),
)
NOT_RUN = {  # and the reason; options and arguments are still checked
    r"make ": "minutes to hours",
    r"pip ": "the network",
    r"(uvx|uv|pipx) ": "the network; what they run is checked",
    r"docker ": "a daemon: test_deployment.py runs what the image starts",
    r"hotset --(install|show)-completion": "a shell: tests/cli/test_completion.py",
    r"python packaging/": "a release: test_deployment.py has it",
    r"python bench/": "minutes to hours, and models and programs to compare with",
    r"(HOTSET_VULKAN_TRACE=.* )?hotset (run|plan|bench) .*--device vulkan": "a Vulkan driver",
    r"hotset (serve|run) qwen3-": "a model of gigabytes",
    r"hotset (ps|stop)\b": "a running server: tests/cli/test_loaded.py",
    r"hotset pull ": "the network: test_storage.py has a hub of its own",
    r"hotset .*--(ray|replicas) ": "Ray: tests/cluster",
    r"hotset sparse make .*--adapters adapters/": "the published model: test_sparsify_adapters.py",
    r"hotset sparse make .*--from-adapters ": "hours",
    r"hotset .*wikitext2-": "a text that is not in the repository",
    r"hotset .*--image ": "a vision model: tests/images",
    r"hotset convert .*--mmproj": "a vision checkpoint: tests/convert/test_projector.py",
    r"ray ": "another program: tests/cluster",
    r"llm ": "another program: tests/clients",
}
PYTHON_NOT_RUN = {  # and the reason; imports still run
    "class SoftCap(Operation)": "a class of another module",
    'device="cuda"': "a GPU",
    '"type": "image"': "a vision model: tests/images",
}
RUN = {name: path for name, path in DOCUMENTS.items() if "/reference/http/" not in name}
"""Documents whose blocks run here. Requests of the pages of routes run in tests/golden."""
OF_OTHERS = {"convert-hf-to-powerinfer-gguf.py", "convert_lora_to_gguf.py"}  # source files of other projects
LANGUAGES = ("sh", "python", "yaml", "cpp", "")


# -- shell ---------------------------------------------------------------------------------------


class Shell:
    """Runs the commands of a document in the working directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._serve = ["serve", "smollm2-135m"]  # curl asks the last started server

    def run(self, command: Command) -> None:
        program, text = command.words[0], " ".join(command.words)
        if program in CHECKS:
            CHECKS[program](list(command.words[1:]))
        if any(re.match(pattern, text) for pattern in NOT_RUN):
            return
        assert program in ("hotset", "curl"), f"{program} is not known: run it, or say in NOT_RUN why not"
        if program == "hotset":
            self._hotset(command)
        else:
            self._curl(command)

    def _hotset(self, command: Command) -> None:
        words, text = list(command.words[1:]), " ".join(command.words)
        words += [word for pattern, more in ADDED if re.match(pattern, text) for word in more.split()]
        if words[0] == "serve":
            self._serve = words
            self._ask(lambda client: client.get("/health"))
            return
        done = inside(*words, stdin=command.stdin or "Hello\n")
        if "--json" in words or "--json-schema" in words:
            json.loads(done.stdout)

    def _curl(self, command: Command) -> None:
        _, url, option, body = command.words
        assert option == "-d"
        kind = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl sends it by default
        self._ask(lambda client: client.post(url, content=body, headers=kind))

    def _ask(self, request: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> None:
        """Send a request to the server that the last `hotset serve` started."""
        services: list[Service] = []
        with self._monkeypatch.context() as patch:
            patch.setattr("hotset.server.listen.listen", lambda service, told: services.append(service))
            done = inside(*self._serve, returns=None)
        assert done.returncode == 0, done.stderr

        async def ask() -> None:
            async with client_to(services[0]) as client:
                answer = await request(client)
                assert answer.status_code == 200, answer.text

        asyncio.run(ask())


@cache
def own_options() -> frozenset[str]:
    """Return the options of `hotset` itself."""
    params = typer.main.get_command(cli.app).params
    return frozenset({"-h", "--help", "--help-all", *(option for param in params for option in param.opts)})


def check_options(words: list[str]) -> None:
    """Check that a subcommand knows these options and gets all required arguments."""
    name, words = split_command(words)
    if name in own_options():
        return
    assert name in cli.SUBCOMMANDS, f"hotset has no subcommand {name}"
    command = command_of(name)
    parser = command.make_parser(command.context_class(command, info_name=name))
    values, rest, _ = parser.parse_args(words)
    assert not rest, f"hotset {name} does not take {rest}"
    missing = [param.name for param in command.params if param.required and not values.get(param.name)]
    assert not missing, f"hotset {name} needs {missing}"


def check_targets(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"the Makefile has no {word}"


def check_packages(words: list[str]) -> None:
    """Check that a command installs this folder: hotset is not on PyPI."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        assert not word.startswith("hotset"), "hotset is not on PyPI: pip install '.[EXTRA]'"
        if match := re.fullmatch(r"\.\[(.*)\]", word):
            assert set(match[1].split(",")) <= extras.keys(), f"not all of {match[1]} are extras"


def check_tool(words: list[str]) -> None:
    """Check that a command of uvx, uv or pipx installs this folder and runs valid words of hotset."""
    tool = words[: words.index("hotset")] if "hotset" in words[1:] else words
    assert any(word.startswith(".") for word in tool), "hotset is not on PyPI: --from . or --spec ."
    check_packages([word for word in tool if word.startswith(("hotset", "."))])
    if words[len(tool) + 1 :]:
        check_options(words[len(tool) + 1 :])


def check_script(words: list[str]) -> None:
    script, *rest = words
    assert (ROOT / script).is_file(), f"there is no {script}"
    sources = "".join(path.read_text("utf-8") for path in (ROOT / Path(script).parts[0]).rglob("*.py"))
    for word in rest:  # scripts share options
        assert not word.startswith("-") or f'"{word}"' in sources, f"{script} does not know {word}"


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "hotset": check_options, "make": check_targets, "pip": check_packages, "uvx": check_tool,
    "uv": check_tool, "pipx": check_tool, "python": check_script,
}  # fmt: skip


# -- Python --------------------------------------------------------------------------------------


def run_python(block: Block) -> None:
    program = ast.parse(block.text)
    if any(text in block.text for text in PYTHON_NOT_RUN):
        program.body = [node for node in program.body if isinstance(node, ast.Import | ast.ImportFrom)]
    with given() as names:
        try:
            exec(compile(program, block.place, "exec"), names)
        finally:
            for value in names.values():
                if isinstance(value, hotset.Model):
                    value.close()


@contextmanager
def given() -> Iterator[dict[str, Any]]:
    """Yield the names that fragments of programs assume: a ReLU model, a text and values made of them."""
    text = Path("text.txt").read_text()[: N_CTX - 500]
    with hotset.load("relu.gguf", n_threads=1) as model:
        tokens = np.array(model.encode(text), np.int32)
        profiles = [
            collect(model.tap_steps, model.config, part, model=fingerprint(model.gguf))
            for part in (tokens[:64], tokens[64:128])
        ]
        yield {
            "path": Path("relu.gguf"), "text": text, "tokens": tokens, "model": model, "gguf": model.gguf,
            "config": model.config, "backend": model.backend, "profile": profiles[0], "other": profiles[1],
        }  # fmt: skip


# -- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scratch(tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", quick_are(RUN.keys() - {"docs/guides/report.md"}, RUN))
def test_commands_of_documents_run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_seed: None, name: str
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    shell, failures = Shell(monkeypatch), []
    for block in documents.blocks(DOCUMENTS[name]):
        assert block.language in LANGUAGES, f"{block.place}: {block.language}"
        parts: list[tuple[str, Callable[[], None]]] = []
        if block.language == "python":
            parts = [(block.place, partial(run_python, block))]
        elif block.language == "sh":
            parts = [(f"{c.place}: {c}", partial(shell.run, c)) for c in documents.commands(block)]
        else:
            assert not re.search("^hotset ", block.text, re.MULTILINE), f"{block.place}: is this sh?"
        for what, run in parts:
            try:
                run()
            except Exception as error:
                failures.append(f"{what}\n    {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_inline_code_names_existing_commands(name: str) -> None:
    for place, span in documents.spans(DOCUMENTS[name]):
        program, *words = span.split()
        name, _ = split_command(words)
        if program == "hotset" and name not in {"", "SUBCOMMAND", *own_options()}:
            assert name in cli.SUBCOMMANDS, f"{place}: {span}"
            known = options_of(name) | {"-h", "--help", "--help-all"}
            used = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", span))
            assert used <= known, f"{place}: {used - known}"
        elif span.startswith(("make ", "pip install ")):
            CHECKS[program](shlex.split(span)[1:])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    path = DOCUMENTS[name]
    for link in documents.links(path):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in documents.anchors(target), link


@pytest.mark.parametrize("name", DOCUMENTS)
def test_source_files_that_are_named_exist(name: str) -> None:
    """Find files by the end of their path, except in old documents, and except new and foreign files."""
    if name.startswith(("docs/contributing/decisions/", "CHANGELOG")):
        return
    for place, span in documents.spans(DOCUMENTS[name]):
        if "NAME" in span or span in OF_OTHERS:
            continue
        if re.fullmatch(r"(?:[\w-]+/)*[\w-]+\.(?:py|cpp|h)", span):
            assert any(f"/{path}".endswith(f"/{span}") for path in sources()), f"{place}: {span}"


@cache
def sources() -> tuple[str, ...]:
    folders = ("src", "csrc", "tests", "bench", "docs", "packaging")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
    return tuple(path.relative_to(ROOT).as_posix() for path in files)


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("docs/contributing/architecture.md", 200)])
def test_an_entrance_stays_short(name: str, most: int) -> None:
    assert len(DOCUMENTS[name].read_text("utf-8").splitlines()) <= most


def test_the_tables_have_nothing_that_is_not_there() -> None:
    blocks = [block for path in DOCUMENTS.values() for block in documents.blocks(path)]
    shell = [block for block in blocks if block.language == "sh"]
    texts = [" ".join(command.words) for block in shell for command in documents.commands(block)]
    for pattern in (*NOT_RUN, *(pattern for pattern, _ in ADDED)):
        assert any(re.match(pattern, text) for text in texts), pattern
    for text in PYTHON_NOT_RUN:
        assert any(text in block.text for block in blocks if block.language == "python"), text


def test_messages_do_not_install_from_pypi() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"pip install '?hotset", path.read_text("utf-8")), path


@pytest.mark.parametrize(
    ("command", "why"),
    {
        "hotset dance": "no subcommand dance",
        "hotset run --dance": "No such option",
        "hotset plan a b": r"does not take \['b'\]",
        "hotset plan": r"needs \['model'\]",
        "hotset show nothing.gguf": "nothing.gguf",
        "pip install 'hotset[serve]'": "not on PyPI",
        "uvx hotset run": "not on PyPI",
        "uvx --from . hotset dance": "no subcommand dance",
        "pipx install '.[dance]'": "not all of dance",
        "pip install '.[dance]'": "not all of dance",
        "make dance": "has no dance",
        "python bench/dance.py": "there is no bench/dance.py",
        "python bench/startup.py --dance": "does not know --dance",
        "dance": "dance is not known",
    }.items(),
)
def test_a_wrong_command_fails(monkeypatch: pytest.MonkeyPatch, command: str, why: str) -> None:
    [read] = documents.commands(Block("a.md", 1, "sh", command))
    with pytest.raises(Exception, match=why):
        Shell(monkeypatch).run(read)


def test_shell_is_read_as_a_shell_reads_it() -> None:
    text = 'a \'b c\' \\\n  "d"  # e\n\n# f\necho "g h" | i -\n'
    read = list(documents.commands(Block("a.md", 5, "sh", text)))
    assert read == [Command("a.md:5", ("a", "b c", "d")), Command("a.md:9", ("i", "-"), "g h\n")]
    for unknown in ("a > b", "a && b", "a; b", "a | b", "$(a)"):
        with pytest.raises(ValueError, match=r"a\.md:1: .*does not know"):
            list(documents.commands(Block("a.md", 1, "sh", unknown)))
