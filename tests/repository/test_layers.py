"""Imports go only downward in LAYERS, and never in a cycle.

docs/contributing/architecture.md shows the table. Imports inside functions and for type checkers count too:
they hide a cycle, but do not remove it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paths import BENCH, DOCS, TESTS

import hotset
from hotset.backends.registry import DEVICE_BACKENDS

ROOT = Path(hotset.__file__).parent
ARCHITECTURE = DOCS / "contributing/architecture.md"
# Modules and folders of src/hotset, the lowest layer first.
LAYERS = (
    ("errors", "units", "escaping"),
    ("files", "cores", "memory", "energy", "reporter", "parameters"),
    ("sampling_parameters", "load_parameters"),
    ("formats", "text", "storage"), ("model",), ("offload",), ("backends",), ("sparsity", "vision"),
    ("settings",),
    ("placement",), ("engine", "convert", "report"), ("outputs", "images"), ("generation", "loader"),
    ("comparison",), ("api",), ("async_model",),
    ("evaluation", "training", "server"), ("scale",), ("cli",),
)  # fmt: skip
# Modules of a device backend that are above placement: backends/registry.py imports them by name, and only
# such modules of the same backend may import them too.
PARTS_OF_PLUGINS = {"detection", "planning", "opening", "measuring", "autotune", "report"}
# Parts of the package itself, which exist before any module is imported.
OF_THE_PACKAGE = {"_core", "__version__"}


def modules() -> dict[str, Path]:
    """Return name below `hotset` → file. A package's name means its __init__.py, "" hotset's __init__.py."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree, cached for each tree."""
    return tuple(ast.walk(tree))


def imports_of(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield the modules of hotset that a source imports anywhere."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "hotset":
                    yield alias.name.removeprefix("hotset").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            package, _, inside = (node.module or "").partition(".")
            if package != "hotset":
                continue
            for alias in node.names:
                full = f"{inside}.{alias.name}".removeprefix(".")
                if full in names:
                    yield full
                elif inside or alias.name not in OF_THE_PACKAGE:
                    yield inside


def graph() -> dict[str, set[str]]:
    found = modules()
    return {name: set(imports_of(tree_of(path), set(found))) for name, path in found.items()}


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return strongly connected modules (Tarjan): several, or one that imports itself."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports.get(name, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1 or name in imports.get(name, ()):
                found.add(frozenset(stack[at:]))
            del stack[at:]

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


# Modules that use the native module. Others use these, or only its types for a type checker.
OWNERS_OF_THE_CORE = {
    "backends.base", "backends.cpu", "backends.embedding", "backends.triton.cpu_offload", "backends.vulkan",
    "offload", "formats.encode", "formats.mapped", "engine.sampler", "placement.disk", "cli.doctor",
}  # fmt: skip


def uses_of_the_core(tree: ast.Module) -> bool:
    """Return whether a module imports the native module for more than types."""
    of_types = {
        inner
        for node in walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in walk(node)
    }
    return any(
        isinstance(node, ast.ImportFrom)
        and node not in of_types
        and any(alias.name == "_core" for alias in node.names)
        for node in walk(tree)
    )


def test_the_native_module_has_owners() -> None:
    using = {name for name, path in modules().items() if uses_of_the_core(tree_of(path))}
    assert {
        name for name in using if not any(f"{name}.".startswith(f"{o}.") for o in OWNERS_OF_THE_CORE)
    } == set()


@pytest.mark.skipif(not ARCHITECTURE.is_file(), reason="docs/ is not beside the tests")
def test_the_architecture_shows_the_layers() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", ARCHITECTURE.read_text("utf-8"), re.MULTILINE)
    shown = {int(n): tuple(re.findall(r"`(\w+)`", cell)) for n, cell in rows}
    assert shown == dict(enumerate(LAYERS, 1))


def test_imports_run_downward() -> None:
    order = {name: n for n, names in enumerate(LAYERS, 1) for name in names}
    top = {name.partition(".")[0] for name in modules()} - {""}
    assert set(order) == top, "LAYERS has every module and folder of src/hotset once"
    order[""] = order["api"]  # `import hotset` is for hotset.load
    upward = []
    for name, others in graph().items():
        for other in others if name else ():  # hotset itself hands out names of every layer
            mine, its = name.partition(".")[0], other.partition(".")[0]
            own = order["placement"] + 0.5 if is_part_of_plugin(name) else order[mine]
            if mine != its and order[its] >= own:
                upward.append(f"{name} imports {other or 'hotset'}")
    assert not upward


def is_part_of_plugin(name: str) -> bool:
    """Return whether a module of a device backend may import placement."""
    folder, _, part = name.removeprefix("backends.").partition(".")
    return folder in (*DEVICE_BACKENDS, "device") and part in PARTS_OF_PLUGINS


def test_device_backends_are_plugins() -> None:
    """Check that no module imports a device backend by name, and that kernels do not import placement."""
    found = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        for backend in DEVICE_BACKENDS
        if f"{other}.".startswith(f"backends.{backend}.")
        and not (
            f"{name}.".startswith(f"backends.{backend}.")
            and (is_part_of_plugin(name) or not is_part_of_plugin(other))
        )
    ]
    assert not found


DEVICE_KINDS = {word.removesuffix("[:N]") for words in DEVICE_BACKENDS.values() for word in words}
MAKERS = ("nvidia", "amd", "metal")
DEVICE_NAMES = re.compile(
    rf"(?<![a-z0-9])({'|'.join({*DEVICE_BACKENDS, *DEVICE_KINDS, *MAKERS})})(?![a-z0-9])", re.IGNORECASE
)


def named_devices(tree: ast.Module) -> list[str]:
    """Return the texts and names in code, but not in docstrings, that name a device or a device backend."""
    docstrings = {node.value for node in walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in walk(tree):
        match node:
            case ast.Constant(str(said)) if node not in docstrings:
                found.append(said)
            case ast.Name(said) | ast.Attribute(_, said) | ast.FunctionDef(said) | ast.ClassDef(said):
                found.append(said)
    return [said for said in found if DEVICE_NAMES.search(said)]


def test_only_backends_name_devices() -> None:
    """Check that other modules ask the registry. The table of cards has the names of cards."""
    found = {name: named_devices(tree_of(path)) for name, path in modules().items()}
    assert {name for name, said in found.items() if said} - {"placement.cards"} <= {
        name for name in found if name.startswith("backends.")
    }


def test_names_of_devices_are_found() -> None:
    tree = ast.parse('"""For cuda."""\nx = f"no {y} NVIDIA GPU"\ntorch.cuda.f()\nvulkan = "amd64, mpsa"\n')
    assert sorted(named_devices(tree)) == [" NVIDIA GPU", "cuda", "vulkan"]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not circles({name: others for name, others in graph().items() if name})


# Large or optional libraries. Only these are imported inside functions ...
SLOW = {
    "torch", "triton", "ray", "matplotlib", "scipy", "pyarrow", "safetensors", "rich", "fastapi", "starlette",
    "uvicorn", "pydantic", "prompt_toolkit", "jinja2", "tokenizers", "sentencepiece", "llguidance",
    "huggingface_hub", "certifi", "filelock", "psutil", "mcp", "opentelemetry", "PIL",
}  # fmt: skip
# ... and modules of hotset, in modules that every start loads: a start must not wait for modules it does not
# need.
LOADED_BY_EVERY_START = {
    "api", "cli.answer", "cli.console", "cli.main", "cli.models", "cli.options", "cli.progress", "cli.run",
    "cli.spellings",
    "loader.build", "loader.decide", "loader.prompt_cache", "placement.detect", "sparsity.modes",
    "sparsity.preparing",
    "sparsity.profile", "sparsity.sidecar", "storage.names",
}  # fmt: skip


def imports_at_head(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def inner_imports(tree: ast.Module) -> set[ast.Import | ast.ImportFrom]:
    """Return the imports inside functions, except in `try` blocks, which test for optional packages."""
    found, tried = set(), set()
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= {one for one in walk(node) if isinstance(one, ast.Import | ast.ImportFrom)}
        elif isinstance(node, ast.Try):
            tried |= {one for one in node.body if isinstance(one, ast.Import | ast.ImportFrom)}
    return found - tried


def libraries_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
    return {name.partition(".")[0] for name in names}


def late_imports(files: dict[str, Path]) -> list[str]:
    """Return the imports inside functions that the rule above does not allow."""
    trees = {name: tree_of(path) for name, path in files.items()}
    names = set(files)
    heads = {
        name: {other for node in imports_at_head(tree) for other in imports_of(node, names)}
        for name, tree in trees.items()
    }
    slow = {
        name
        for name, tree in trees.items()
        if any(libraries_of(node) & SLOW for node in imports_at_head(tree))
    }
    while more := {name for name, others in heads.items() if others & slow} - slow:
        slow |= more
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in sorted(inner_imports(tree), key=lambda node: node.lineno)
        if not libraries_of(node) & (SLOW | sys.stdlib_module_names)
        and name not in LOADED_BY_EVERY_START
        and not set(imports_of(node, names)) & slow
    ]


def test_imports_are_at_the_top_of_a_file() -> None:
    assert not late_imports(modules())


def test_late_imports_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f():\n    import torch\n    from hotset import slow\n    from hotset import b\n"
        "    try:\n        from hotset import c\n    except ImportError:\n        pass\n"
    )
    (tmp_path / "slow.py").write_text("import torch\n")
    (tmp_path / "b.py").write_text("")
    files = {name: tmp_path / f"{name}.py" for name in ("a", "b", "slow")}
    assert late_imports(files) == ["a:4: from hotset import b"]


def test_no_function_is_longer_than_80_lines() -> None:
    """Count from the `def` to the last line: a longer function does several things or has many arguments."""
    assert not [found for path in modules().values() for found in long_functions(path, 80)]


def long_functions(path: Path, most: int) -> list[str]:
    return [
        f"{path.name}: {node.name} has {length} lines"
        for node in walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > most
    ]


def test_long_functions_are_found(tmp_path: Path) -> None:
    source = (
        "class A:\n    async def f():\n        a\n        b\ndef g(\n    x,\n):\n    pass\ndef h(): pass\n"
    )
    (tmp_path / "m.py").write_text(source)
    assert sorted(long_functions(tmp_path / "m.py", 2)) == ["m.py: f has 3 lines", "m.py: g has 4 lines"]


def test_api_module_is_short() -> None:
    """Keep api.py short: loader/ opens, plans and builds a model."""
    assert len((ROOT / "api.py").read_text("utf-8").splitlines()) < 500


def test_no_module_probes_attributes_of_backends() -> None:
    """Forbid getattr and hasattr on backends and stages, whose classes define all their attributes."""
    asked = [
        f"{name}:{node.lineno}"
        for name, path in modules().items()
        for node in walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and re.search(r"backend|stage", ast.unparse(node.args[0]))
    ]
    assert not asked


def test_no_test_is_imported() -> None:
    """Check that no file imports a test module; shared code is in tests/support."""
    importing = [
        f"{path.name}: {name}"
        for folder in (TESTS, BENCH)
        for path in folder.rglob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text("utf-8"), re.M)
        if name != path.stem  # a program started in a new process
    ]
    assert not importing


def test_test_folders_mirror_the_package() -> None:
    """Allow other folders only for tests of code outside src/hotset."""
    others = {".", "bench", "repository", "golden", "fuzz", "images"}  # images: several parts together
    files = list(TESTS.rglob("test_*.py"))
    folders = {path.parent.relative_to(TESTS) for path in files}
    assert {str(folder) for folder in folders if not (ROOT / folder).is_dir()} <= others
    assert len({path.name for path in files}) == len(files), "pytest tells files apart by their names"


def test_every_way_to_import_is_seen() -> None:
    names = {"", "a", "a.b", "c", "d"}
    source = """
from typing import TYPE_CHECKING
import numpy, hotset.d
if TYPE_CHECKING:
    from hotset.a.b import Name
def f():
    from hotset import c, _core, __version__
    from hotset.a import b
    from hotset import load
"""
    assert sorted(imports_of(ast.parse(source), names)) == ["", "a.b", "a.b", "c", "d"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}) == {
        frozenset("abc"),
        frozenset("f"),
    }
